//! SIGINT and SIGTERM: the first is passed on to the running stage, the second ends it.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use stage::Exit;

use crate::error::say;

/// Knows how often the user asked to stop, and which stage to tell.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt {
    count: Arc<AtomicUsize>,
    group: Arc<Mutex<Option<u32>>>,
}

impl Interrupt {
    /// Starts to listen.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let interrupt = Self { count: Arc::default(), group: Arc::default() };
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
        let own = interrupt.clone();
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in signals.forever() {
                own.received(if signal == SIGTERM { "TERM" } else { "INT" });
            }
        })?;
        Ok(interrupt)
    }

    /// Whether the user asked to stop.
    pub(crate) fn asked(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// Names the process group that signals go to from now on.
    pub(crate) fn watch(&self, group: Option<u32>) {
        *self.group.lock().unwrap_or_else(PoisonError::into_inner) = group;
        // The user may have asked between the start of the stage and now.
        if let (true, Some(group)) = (self.asked(), group) {
            send("INT", group);
        }
    }

    fn received(&self, signal: &str) {
        let before = self.count.fetch_add(1, Ordering::SeqCst);
        let group = *self.group.lock().unwrap_or_else(PoisonError::into_inner);
        match group {
            Some(group) if before == 0 => send(signal, group),
            Some(group) => send("KILL", group),
            None => leave(),
        }
    }
}

/// Nothing of ours runs: whatever was being read, hashed or published is as if it had not begun.
#[expect(clippy::exit, reason = "the main thread may be hashing a large file")]
fn leave() {
    say(&mut std::io::stderr(), "interrupted\n");
    std::process::exit(Exit::Interrupted.code());
}

/// Signals a whole process group. The shell's own `kill` spares us the only unsafe call of the torch-free side.
pub(crate) fn send(signal: &str, group: u32) {
    let kill = format!("kill -s {signal} -- -{group}");
    let status = Command::new("sh")
        .args(["-c", &kill])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    // A group that is gone needs no signal.
    drop(status);
}

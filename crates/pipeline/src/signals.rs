//! SIGINT and SIGTERM: the first is passed on to the running stages, the second ends them.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use stage::Exit;

use crate::error::say;

/// Knows how often the user asked to stop, and which stages to tell.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt {
    count: Arc<AtomicUsize>,
    groups: Arc<Mutex<BTreeSet<u32>>>,
}

impl Interrupt {
    /// Starts to listen.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let interrupt = Self { count: Arc::default(), groups: Arc::default() };
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

    /// Names a process group that signals go to from now on.
    pub(crate) fn watch(&self, group: u32) {
        self.groups().insert(group);
        // The user may have asked between the start of the stage and now.
        if self.asked() {
            send("INT", group);
        }
    }

    /// The process group is gone.
    pub(crate) fn forget(&self, group: u32) {
        self.groups().remove(&group);
    }

    fn groups(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn received(&self, signal: &str) {
        let before = self.count.fetch_add(1, Ordering::SeqCst);
        let groups = self.groups().clone();
        if groups.is_empty() {
            leave();
        }
        for group in groups {
            send(if before == 0 { signal } else { "KILL" }, group);
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

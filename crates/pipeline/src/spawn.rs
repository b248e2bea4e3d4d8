//! One stage process: started, listened to, ended. Knows neither keys nor artifacts.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use spec::Problem;
use stage::{Event, Exit, Ledger, RunRequest};
use store::Lock;

use crate::error::Result;
use crate::programs::ended;
use crate::signals::Interrupt;

/// What a good stage said at its end.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) summary: String,
    pub(crate) ledger: Ledger,
    pub(crate) info: Value,
}

/// What a bad stage said, or what its end says.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) problem: Problem,
    pub(crate) exit: Exit,
}

/// All that came of a process.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) outcome: std::result::Result<Done, Failed>,
    pub(crate) warnings: Vec<String>,
    pub(crate) rejected: u64,
    /// Done and total of the last phase, when the total was known.
    pub(crate) progress: Option<(u64, u64)>,
    /// Peak of the process's resident memory, as last seen.
    pub(crate) memory_bytes: Option<u64>,
}

/// Runs a stage program to its end; `on_event` sees each event as it comes. It holds `lock` as long as it lives.
pub(crate) fn run(
    program: &Path,
    request: &RunRequest,
    request_file: &Path,
    log: &Path,
    lock: &Lock,
    interrupt: &Interrupt,
    mut on_event: impl FnMut(&Event),
) -> Result<Ended> {
    fs_err::write(request_file, serde_json::to_vec_pretty(request).map_err(std::io::Error::from)?)?;
    let log_file = fs_err::File::create(log)?;
    let started = Command::new(program)
        .args(["run", "--request"])
        .arg(request_file)
        .stdin(lock.as_stdin()?)
        .stdout(Stdio::piped())
        .stderr(Stdio::from(log_file.try_clone()?.into_parts().0))
        // Its own group: a terminal's ctrl-C comes to the runner alone, which passes it on once.
        .process_group(0)
        .spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(error) => {
            let problem = Problem::new(format!("`{}` cannot be started: {error}", program.display()));
            let outcome = Err(Failed { problem, exit: Exit::Failed });
            return Ok(Ended { outcome, warnings: Vec::new(), rejected: 0, progress: None, memory_bytes: None });
        }
    };
    interrupt.watch(child.id());
    let (mut last, mut warnings, mut rejected, mut progress) = (None, Vec::new(), 0, None);
    let id = child.id();
    let mut memory_bytes = None;
    let watch = || memory_bytes = peak_memory(id).or(memory_bytes);
    let status = listen(&mut child, watch, |line| match serde_json::from_slice::<Event>(line) {
        Ok(event) => {
            match &event {
                Event::Warning { message } => warnings.push(message.clone()),
                Event::Rejected { .. } => rejected += 1,
                Event::Done { .. } | Event::Failed { .. } => last = Some(event.clone()),
                Event::Progress { done, total, .. } => progress = total.map(|total| (*done, total)),
                Event::Metric { .. } | Event::Output { .. } => {}
            }
            on_event(&event);
        }
        // A library of the stage printed something: it belongs to the log.
        Err(_) => {
            let _ = (&log_file).write_all(line).and_then(|()| (&log_file).write_all(b"\n"));
        }
    });
    interrupt.forget(child.id());
    let outcome = judge(program, last, status?);
    Ok(Ended { outcome, warnings, rejected, progress, memory_bytes })
}

/// How often a process is looked at.
const WATCH: Duration = Duration::from_millis(100);

/// Peak of a living process's resident memory, as Linux tells.
fn peak_memory(id: u32) -> Option<u64> {
    let text = fs_err::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Feeds each line of the child's standard output to `on_line` until the child is gone; calls `watch` now and then.
fn listen(child: &mut Child, mut watch: impl FnMut(), mut on_line: impl FnMut(&[u8])) -> Result<ExitStatus> {
    let (send, lines) = mpsc::channel::<Vec<u8>>();
    if let Some(stdout) = child.stdout.take() {
        thread::Builder::new().name("events".to_owned()).spawn(move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(std::result::Result::ok) {
                if !line.is_empty() && send.send(line).is_err() {
                    break;
                }
            }
        })?;
    } else {
        drop(send);
    }
    watch();
    let mut seen = Instant::now();
    loop {
        match lines.recv_timeout(WATCH) {
            Ok(line) => {
                if seen.elapsed() >= WATCH {
                    watch();
                    seen = Instant::now();
                }
                on_line(&line);
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(child.wait()?),
            Err(RecvTimeoutError::Timeout) => {
                watch();
                // A process that the stage left behind may hold the pipe open.
                if let Some(status) = child.try_wait()? {
                    while let Ok(line) = lines.recv_timeout(Duration::from_millis(100)) {
                        on_line(&line);
                    }
                    return Ok(status);
                }
            }
        }
    }
}

/// The stage's last word and its exit status must agree.
fn judge(program: &Path, last: Option<Event>, status: ExitStatus) -> std::result::Result<Done, Failed> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let failed = |message: String, help: Option<&str>| {
        let problem = Problem::new(message);
        let problem = match help {
            Some(help) => problem.help(help),
            None => problem,
        };
        Err(Failed { problem, exit: status.code().map_or(Exit::Failed, Exit::from_code) })
    };
    match last {
        Some(Event::Done { summary, ledger, info }) if status.success() => Ok(Done { summary, ledger, info }),
        Some(Event::Done { .. }) => {
            failed(format!("`{name}` said that it was done, but then ended with {}", ended(status)), None)
        }
        Some(Event::Failed { problem, exit }) => Err(Failed { problem, exit: Exit::from_code(exit) }),
        _ if status.success() => failed(
            format!("`{name}` ended without saying `done`"),
            Some("the last line of a stage must be a `done` event"),
        )
        .map_err(|failed: Failed| Failed { exit: Exit::Failed, ..failed }),
        _ => {
            use std::os::unix::process::ExitStatusExt;
            let help =
                (status.signal() == Some(9)).then_some("the system kills a process like this when memory runs out");
            failed(format!("`{name}` crashed: {}", ended(status)), help)
        }
    }
}

/// The last lines of a log, for the report of a failure.
pub(crate) fn tail(log: &Path, lines: usize) -> Vec<String> {
    const WINDOW: u64 = 16 << 10;
    let read = || -> std::io::Result<Vec<u8>> {
        use std::io::{Seek, SeekFrom};
        let mut file = fs_err::File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(WINDOW)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let text = String::from_utf8_lossy(&read().unwrap_or_default()).into_owned();
    let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    all[all.len().saturating_sub(lines)..].iter().map(|line| (*line).to_owned()).collect()
}

/// Where a try's request lies: beside its work folders.
pub(crate) fn request_path(out: &Path) -> PathBuf {
    out.with_file_name("request.json")
}

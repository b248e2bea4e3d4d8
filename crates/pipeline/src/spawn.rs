//! One run of a stage program: started, listened to, judged by what it said and how it ended. Knows neither keys nor artifacts.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use serde_json::Value;
use spec::Problem;
use stage::{Event, Exit, Ledger, RunRequest};
use store::Lock;

use crate::error::Result;
use crate::programs::ended;
use crate::ranks::{self, End, Team};
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
    /// Peak of the resident memory, as last seen, of all its processes together.
    pub(crate) memory_bytes: Option<u64>,
}

/// A piece of work to start.
pub(crate) struct Start<'a> {
    pub(crate) program: &'a Path,
    pub(crate) request: &'a RunRequest,
    /// Where the request is written.
    pub(crate) request_file: &'a Path,
    pub(crate) log: &'a Path,
    /// Held by the processes as long as they live.
    pub(crate) lock: &'a Lock,
    /// Processes that share the work.
    pub(crate) ranks: usize,
}

/// Runs a stage program to its end; `on_event` sees each event as it comes.
pub(crate) fn run(start: &Start<'_>, interrupt: &Interrupt, mut on_event: impl FnMut(&Event)) -> Result<Ended> {
    fs_err::write(start.request_file, serde_json::to_vec_pretty(start.request).map_err(std::io::Error::from)?)?;
    let log = fs_err::OpenOptions::new().create(true).append(true).open(start.log)?;
    let mut team = match Team::start(start, &log)? {
        Ok(team) => team,
        Err(error) => {
            let problem = Problem::new(format!("`{}` cannot be started: {error}", start.program.display()));
            let outcome = Err(Failed { problem, exit: Exit::Failed });
            return Ok(Ended { outcome, warnings: Vec::new(), rejected: 0, progress: None, memory_bytes: None });
        }
    };
    interrupt.watch(team.group());
    let (mut last, mut warnings, mut rejected, mut progress) = (vec![None; start.ranks], Vec::new(), 0, None);
    let ends = team.listen(|rank, line| match serde_json::from_slice::<Event>(line) {
        Ok(event) => {
            match &event {
                Event::Warning { message } => warnings.push(message.clone()),
                Event::Rejected { .. } => rejected += 1,
                Event::Done { .. } | Event::Failed { .. } => last[rank] = Some(event.clone()),
                Event::Progress { done, total, .. } => progress = total.map(|total| (*done, total)),
                Event::Metric { .. } | Event::Output { .. } => {}
            }
            on_event(&event);
        }
        // A library of the stage printed something: it belongs to the log.
        Err(_) => {
            let _ = (&log).write_all(&[&ranks::tag(rank, start.ranks), line, b"\n"].concat());
        }
    });
    interrupt.forget(team.group());
    let (outcome, memory_bytes) = (judge_all(start, last, ends?), team.memory());
    Ok(Ended { outcome, warnings, rejected, progress, memory_bytes })
}

/// One word for all ranks: that of the first, if all went well; else the failure that the others followed from.
fn judge_all(start: &Start<'_>, last: Vec<Option<Event>>, ends: Vec<End>) -> std::result::Result<Done, Failed> {
    let name = start.program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (mut done, mut failures) = (None, Vec::new());
    for (rank, (last, end)) in last.into_iter().zip(ends).enumerate() {
        let name =
            if start.ranks == 1 { format!("`{name}`") } else { format!("`{name}`, rank {rank} of {},", start.ranks) };
        // Only the first rank says that all is done.
        let silent = rank > 0 && last.is_none() && end.status.success();
        match judge(&name, last, end.status) {
            Ok(word) if rank == 0 => done = Some(word),
            Ok(_) => {}
            Err(_) if silent => {}
            // A rank that lost another one, or was ended for it, is not where it began.
            Err(failed) => failures.push((end.ended_by_us, failed.exit == Exit::Lost, end.order, failed)),
        }
    }
    failures.sort_by_key(|(ended_by_us, lost, order, _)| (*ended_by_us, *lost, *order));
    match (failures.into_iter().next(), done) {
        (Some((.., failed)), _) => Err(failed),
        (None, Some(done)) => Ok(done),
        (None, None) => {
            let problem = Problem::new(format!("`{name}` ended without a word of its first rank"));
            Err(Failed { problem, exit: Exit::Failed })
        }
    }
}

/// The stage's last word and its exit status must agree.
fn judge(name: &str, last: Option<Event>, status: ExitStatus) -> std::result::Result<Done, Failed> {
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
            failed(format!("{name} said that it was done, but then ended with {}", ended(status)), None)
        }
        Some(Event::Failed { problem, exit }) => Err(Failed { problem, exit: Exit::from_code(exit) }),
        _ if status.success() => failed(
            format!("{name} ended without saying `done`"),
            Some("the last line of a stage must be a `done` event"),
        )
        .map_err(|failed: Failed| Failed { exit: Exit::Failed, ..failed }),
        _ => {
            use std::os::unix::process::ExitStatusExt;
            let help =
                (status.signal() == Some(9)).then_some("the system kills a process like this when memory runs out");
            failed(format!("{name} crashed: {}", ended(status)), help)
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

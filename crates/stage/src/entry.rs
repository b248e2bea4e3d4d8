//! `main` of a stage program: arguments, requests, answers, exit codes. The only place of a stage that reads its arguments.

use std::io::{self, Read, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use spec::{Launch, Problem};

use crate::parameters::parse;
use crate::{
    CONTRACT, CheckRequest, Checked, Description, Estimate, EstimateRequest, Event, Events, Exit, Failure, Outcome,
    RunRequest, Stage, Work,
};

/// Answers `describe`, `check --request FILE` and `run --request FILE` (`-` is standard input) for stage `S`.
pub fn entry<S: Stage>() -> ExitCode {
    let description = S::describe().description::<S>();
    let args: Vec<String> = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let exit = match args.as_slice() {
        ["describe"] => answer(&description),
        ["check", "--request", file] => match read_request::<CheckRequest>(Path::new(file)) {
            Ok(request) => answer(&check::<S>(&description, &request)),
            Err(failure) => complain(&failure),
        },
        ["estimate", "--request", file] => {
            match read_request::<EstimateRequest>(Path::new(file)).and_then(|request| estimate::<S>(&request)) {
                Ok(estimate) => answer(&estimate),
                Err(failure) => complain(&failure),
            }
        }
        ["run", "--request", file] => match read_request::<RunRequest>(Path::new(file)) {
            Ok(request) => run::<S>(&description, request),
            Err(failure) => complain(&failure),
        },
        ["-h" | "--help"] => {
            let written = io::stdout().write_all(usage(&description).as_bytes());
            if written.is_ok() { Exit::Ok } else { Exit::Io }
        }
        ["-V" | "--version"] => {
            let line = format!("pipeline-{} step version {}\n", description.stage, description.version);
            if io::stdout().write_all(line.as_bytes()).is_ok() { Exit::Ok } else { Exit::Io }
        }
        _ => {
            log(&usage(&description));
            Exit::Usage
        }
    };
    exit.into()
}

fn usage(description: &Description) -> String {
    let stage = &description.stage;
    format!(
        "{about}\n\n\
         A stage program of the pipeline; `pipeline {stage} RECIPE` runs it on its own.\n\n\
         usage:\n  \
         pipeline-{stage} describe              what it takes and makes, as JSON\n  \
         pipeline-{stage} check --request FILE  looks parameters over, answers in JSON\n  \
         pipeline-{stage} estimate --request FILE  says what a run would have to do\n  \
         pipeline-{stage} run --request FILE    does the work, reports in JSON lines\n",
        about = description.about,
    )
}

fn check<S: Stage>(description: &Description, request: &CheckRequest) -> Checked {
    match parse::<S>(description, &request.parameters) {
        Ok((parameters, settings)) => S::check(&parameters, &settings, request),
        Err(problems) => Checked { problems, ..Checked::default() },
    }
}

fn estimate<S: Stage>(request: &EstimateRequest) -> Result<Estimate, Failure> {
    let description = S::describe().description::<S>();
    let (parameters, settings) = parse::<S>(&description, &request.parameters).map_err(first)?;
    S::estimate(&parameters, &settings, request)
}

/// Which rank of a run this process is, by its environment; alone if nobody says so.
pub fn launch() -> Result<Launch, Failure> {
    Launch::read(|name| std::env::var(name).ok()).map_err(|problem| Failure::new(Exit::Usage, problem))
}

fn run<S: Stage>(description: &Description, request: RunRequest) -> Exit {
    let launch = match launch() {
        Ok(launch) => launch,
        Err(failure) => return complain(&failure),
    };
    let events = match Events::stdout(launch.rank == 0) {
        Ok(events) => events,
        Err(error) => return complain(&error.into()),
    };
    let outcome = match parse::<S>(description, &request.parameters) {
        Ok((parameters, settings)) => {
            let work = Work { parameters, settings, request, events: events.clone() };
            guarded(|| S::run(&work), &description.stage)
        }
        Err(problems) => Err(first(problems)),
    };
    match outcome {
        Ok(Outcome { summary, ledger, info }) => {
            events.send(&Event::Done { summary, ledger, info });
            Exit::Ok
        }
        Err(Failure { mut problem, exit }) => {
            if launch.world > 1 && !problem.message.starts_with(&launch.title()) {
                problem.message = format!("{}: {}", launch.title(), problem.message);
            }
            log(&format!("error: {}\n", problem.message));
            events.send(&Event::Failed { problem, exit: exit.code() });
            exit
        }
    }
}

/// Problems that `check` would have found: the runner checks first, so this is a hand-made request.
fn first(problems: Vec<Problem>) -> Failure {
    let problem = problems.into_iter().next().unwrap_or_else(|| Problem::new("the parameters cannot be read"));
    Failure::new(Exit::Recipe, problem)
}

/// Turns a panic into a report that names the broken invariant and its place.
fn guarded(body: impl FnOnce() -> Result<Outcome, Failure>, stage: &str) -> Result<Outcome, Failure> {
    let seen = Arc::new(Mutex::new(None::<String>));
    let note = Arc::clone(&seen);
    panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
        let thread = std::thread::current().name().unwrap_or("unnamed").to_owned();
        log(&format!(
            "internal error in thread {thread} at {place}: {text}\n{}\n",
            std::backtrace::Backtrace::capture()
        ));
        note.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(format!("{text} (at {place})"));
    }));
    let result = panic::catch_unwind(AssertUnwindSafe(body));
    drop(panic::take_hook());
    result.unwrap_or_else(|_| {
        let text = seen.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        let problem = Problem::new(format!("internal error: {text}"))
            .help(format!("this is a bug in the stage `{stage}`; please report it with the log"));
        Err(Failure::new(Exit::Bug, problem))
    })
}

/// Reads a request and makes sure that both sides speak the same contract.
fn read_request<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let usage = |message: String| Failure::new(Exit::Usage, Problem::new(message));
    let text = if path == Path::new("-") {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text)?;
        text
    } else {
        fs_err::read_to_string(path).map_err(Failure::from_error)?
    };
    let value: serde_json::Value = serde_json::from_str(&text)
        .map_err(|error| usage(format!("the request `{}` is not JSON: {error}", path.display())))?;
    match value.get("contract").and_then(serde_json::Value::as_u64) {
        Some(n) if n == u64::from(CONTRACT) => {}
        Some(n) => {
            return Err(usage(format!("the request speaks contract {n}, this program speaks {CONTRACT}")));
        }
        None => return Err(usage("the request has no `contract` number".to_owned())),
    }
    T::deserialize(value).map_err(|error| usage(format!("the request cannot be read: {error}")))
}

fn answer(value: &impl Serialize) -> Exit {
    let written = serde_json::to_vec(value).map_err(io::Error::from).and_then(|mut line| {
        line.push(b'\n');
        io::stdout().write_all(&line)
    });
    if written.is_ok() { Exit::Ok } else { Exit::Io }
}

fn complain(failure: &Failure) -> Exit {
    log(&format!("error: {}\n", failure.problem.message));
    failure.exit
}

/// Standard error is the stage's log; nothing can be done about a log that cannot be written.
fn log(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

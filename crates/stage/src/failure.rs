//! How a stage fails: a problem for the user and an exit code for scripts.

use std::error::Error;
use std::io;

use spec::Problem;

/// Exit codes of the runner and of every stage program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// The stage failed for a reason of its own.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The recipe, the graph or a parameter is wrong.
    Recipe = 3,
    /// Data or a model is missing or unusable.
    Input = 4,
    /// A number became infinite or not a number.
    Numbers = 5,
    /// Disk full, no permission, or another failure of the file system.
    Io = 6,
    /// The Hub, or a remote that shares artifacts, cannot be reached or refuses.
    Hub = 7,
    /// Another rank of the same run is gone or hangs: the consequence of some other failure.
    Lost = 8,
    /// A benchmark's number is not within its bounds.
    Missed = 9,
    /// There was no memory left, on the host or on a GPU.
    Memory = 10,
    /// A broken invariant of the program itself.
    Bug = 101,
    /// Stopped by SIGINT or SIGTERM.
    Interrupted = 130,
}

impl Exit {
    /// All codes, with the sentence that help texts print.
    pub const TABLE: &[(Self, &str)] = &[
        (Self::Ok, "done"),
        (Self::Failed, "a stage failed"),
        (Self::Usage, "the command line is wrong"),
        (Self::Recipe, "the recipe, the graph or a parameter is wrong"),
        (Self::Input, "data or a model is missing or unusable"),
        (Self::Numbers, "a number became infinite or not a number"),
        (Self::Io, "the file system failed: disk full, no permission"),
        (Self::Hub, "the Hub or a remote cannot be reached or refuses"),
        (Self::Lost, "a rank of a distributed run was lost"),
        (Self::Missed, "a benchmark's number is out of its bounds"),
        (Self::Memory, "out of memory"),
        (Self::Bug, "a bug in a program of ours"),
        (Self::Interrupted, "interrupted; what was finished is kept"),
    ];

    /// The number.
    pub fn code(self) -> i32 {
        self as i32
    }

    /// The exit with this number; unknown numbers are [`Exit::Failed`].
    pub fn from_code(code: i32) -> Self {
        Self::TABLE.iter().map(|(exit, _)| *exit).find(|exit| exit.code() == code).unwrap_or(Self::Failed)
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A failed run.
#[derive(Debug, Clone)]
pub struct Failure {
    /// What went wrong.
    pub problem: Problem,
    /// Which kind of thing went wrong.
    pub exit: Exit,
}

impl Failure {
    /// A failure of a given kind.
    pub fn new(exit: Exit, problem: Problem) -> Self {
        Self { problem, exit }
    }

    /// The error's messages, outermost first, joined by `: `. Failures of the file system get [`Exit::Io`].
    pub fn from_error(error: impl Error + 'static) -> Self {
        let (message, exit) = describe_chain(&error);
        Self::new(exit, Problem::new(message))
    }

    /// As [`Failure::from_error`], keeping the diagnostic's help. One whose code ends in `::out_of_memory` gets [`Exit::Memory`].
    pub fn from_diagnostic(error: impl miette::Diagnostic + 'static) -> Self {
        let help = error.help().map(|help| help.to_string());
        let memory = error.code().is_some_and(|code| code.to_string().ends_with("::out_of_memory"));
        let mut failure = Self::from_error(error);
        failure.problem.help = help;
        if memory { failure.exit(Exit::Memory) } else { failure }
    }

    /// The run was asked to stop; `kept` says what a rerun continues from.
    pub fn interrupted(kept: impl Into<String>) -> Self {
        Self::new(Exit::Interrupted, Problem::new("interrupted").help(kept))
    }

    /// The same failure with another exit code.
    #[must_use]
    pub fn exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::new(Exit::Failed, problem)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::from_error(error).exit(Exit::Io)
    }
}

/// Messages of an error and its sources, and the exit code that an [`io::Error`] among them calls for.
fn describe_chain(error: &(dyn Error + 'static)) -> (String, Exit) {
    let mut message = String::new();
    let mut exit = Exit::Failed;
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        // Many errors repeat their source in their own message.
        if !message.contains(&text) {
            if !message.is_empty() {
                message.push_str(": ");
            }
            message.push_str(&text);
        }
        if let Some(io) = error.downcast_ref::<io::Error>() {
            use io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
            if matches!(io.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem | PermissionDenied) {
                exit = Exit::Io;
            }
        }
        next = error.source();
    }
    (message, exit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error, miette::Diagnostic)]
    #[error("cannot write `a.parquet`")]
    #[diagnostic(help("free some space"))]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_full_disk_is_an_io_failure_whatever_wraps_it() {
        let failure = Failure::from_diagnostic(Outer(io::Error::from(io::ErrorKind::StorageFull)));
        assert_eq!(failure.exit, Exit::Io);
        assert_eq!(failure.problem.message, "cannot write `a.parquet`: no storage space");
        assert_eq!(failure.problem.help.as_deref(), Some("free some space"));
    }

    #[derive(Debug, thiserror::Error, miette::Diagnostic)]
    #[error("out of memory: 3 bytes")]
    #[diagnostic(code(any::out_of_memory))]
    struct Full;

    #[test]
    fn what_ran_out_of_memory_has_its_own_code() {
        assert_eq!(Failure::from_diagnostic(Full).exit, Exit::Memory);
    }

    #[test]
    fn codes_round_trip() {
        for (exit, _) in Exit::TABLE {
            assert_eq!(Exit::from_code(exit.code()), *exit);
        }
        assert_eq!(Exit::from_code(77), Exit::Failed);
    }
}

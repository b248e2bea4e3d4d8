//! Failures, each with the rank that saw it.

use std::time::Duration;

/// What went wrong between ranks.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum Error {
    /// The ranks did not come together.
    #[error("rank {rank} of {world} could not meet the others at {meeting} within {}: {reason}", seconds(*.timeout))]
    #[diagnostic(
        code(comm::meeting),
        help("all ranks must be started, see the same `MASTER_ADDR` and `MASTER_PORT`, and reach that address")
    )]
    Meeting {
        /// This rank.
        rank: usize,
        /// Ranks in all.
        world: usize,
        /// `HOST:PORT`.
        meeting: String,
        /// How long it was tried.
        timeout: Duration,
        /// libtorch's words.
        reason: String,
    },
    /// Another rank is gone, hangs, or this one cannot reach it.
    #[error("rank {rank} of {world} lost another rank: {call} with ranks {} failed: {reason}", list(.with))]
    #[diagnostic(
        code(comm::lost),
        help(
            "the rank that failed first says why; a rank that only waits too long needs a longer `dist_env.timeout_minutes`"
        )
    )]
    Lost {
        /// This rank.
        rank: usize,
        /// Ranks in all.
        world: usize,
        /// What was under way, such as `all_reduce 17`.
        call: String,
        /// The group's ranks.
        with: Vec<usize>,
        /// libtorch's words.
        reason: String,
    },
    /// Ranks made different calls.
    #[error("rank {rank} of {world}: the ranks do not make the same call: {calls}")]
    #[diagnostic(code(comm::mismatch), help("this is a bug, or the ranks run different programs, recipes or data"))]
    Mismatch {
        /// This rank.
        rank: usize,
        /// Ranks in all.
        world: usize,
        /// What each rank asked for.
        calls: String,
    },
    /// A call that can't be right on any rank.
    #[error("rank {rank} of {world}: {call}: {reason}")]
    #[diagnostic(code(comm::call), help("this is a bug of the caller"))]
    Call {
        /// This rank.
        rank: usize,
        /// Ranks in all.
        world: usize,
        /// The collective.
        call: String,
        /// The rule that was broken.
        reason: String,
    },
    /// A failure of libtorch that concerns no other rank.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Torch(torch::Error),
}

impl Error {
    /// Whether another rank's end is behind it: not the first thing that went wrong.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Meeting { .. })
    }
}

impl From<torch::Error> for Error {
    fn from(error: torch::Error) -> Self {
        Self::Torch(error)
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn seconds(timeout: Duration) -> String {
    format!("{:.1} s", timeout.as_secs_f64())
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

//! Failures of spreading a run.

/// What went wrong.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum Error {
    /// Between ranks.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Comm(#[from] comm::Error),
    /// In a layer or a weight file.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Nn(#[from] nn::Error),
    /// In libtorch.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Torch(#[from] torch::Error),
    /// Ranks that were given different work.
    #[error("rank {rank} of {world} has another {what} than rank {other}")]
    #[diagnostic(
        code(parallel::differ),
        help("every rank must read the same recipe, model and data, and run the same program")
    )]
    Differ {
        /// This rank.
        rank: usize,
        /// Ranks in all.
        world: usize,
        /// What differs.
        what: String,
        /// A rank it differs from.
        other: usize,
    },
    /// A model that a technique cannot spread.
    #[error("{0}")]
    #[diagnostic(code(parallel::unfit))]
    Unfit(String),
}

impl Error {
    /// Whether another rank's end is behind it: not the first thing that went wrong.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Comm(error) if error.is_loss())
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

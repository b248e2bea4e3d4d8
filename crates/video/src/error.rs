//! Why a clip could not be read or written.

use std::path::PathBuf;

use miette::Diagnostic;
use thiserror::Error;

/// Why a clip could not be read or written.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// The bytes are broken: truncated, corrupt, or not what their signature promises.
    #[error("cannot decode: {0}")]
    #[diagnostic(code(video::decode), help("play the file in a video player; save it again or remove it"))]
    Decode(String),
    /// Larger than this program decodes.
    #[error("too large: {0}")]
    #[diagnostic(code(video::too_large), help("scale the clip down before using it"))]
    TooLarge(String),
    /// Sound, perhaps, but of a kind that is not read here.
    #[error("unsupported: {0}")]
    #[diagnostic(code(video::unsupported))]
    Unsupported(String),
    /// The file could not be written.
    #[error("cannot write `{}`: {reason}", path.display())]
    #[diagnostic(code(video::write))]
    Write {
        /// The file.
        path: PathBuf,
        /// What FFmpeg or the disk says.
        reason: String,
    },
}

impl Error {
    /// Reason code for a `rejects` row: `decode`, `too_large`, `unsupported` or `write`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Decode(_) => "decode",
            Self::TooLarge(_) => "too_large",
            Self::Unsupported(_) => "unsupported",
            Self::Write { .. } => "write",
        }
    }
}

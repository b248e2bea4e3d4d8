//! Why a picture could not be read or written.

use std::path::PathBuf;

use miette::Diagnostic;
use thiserror::Error;

/// Why a picture could not be read or written.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// No bytes at all.
    #[error("the file is empty (0 bytes)")]
    #[diagnostic(code(media::empty))]
    Empty,
    /// The bytes are broken: truncated, corrupt, or not what their signature promises.
    #[error("cannot decode: {0}")]
    #[diagnostic(code(media::decode), help("open the file in a picture viewer; save it again or remove it"))]
    Decode(String),
    /// Larger than this program decodes.
    #[error("too large: {0}")]
    #[diagnostic(code(media::too_large), help("scale the picture down before using it"))]
    TooLarge(String),
    /// Sound, perhaps, but of a kind that is not read here.
    #[error("unsupported: {0}")]
    #[diagnostic(code(media::unsupported), help("supported are JPEG, PNG, WebP, GIF, BMP and TIFF"))]
    Unsupported(String),
    /// A text for a PNG that the format cannot hold.
    #[error("PNG text `{keyword}`: {reason}")]
    #[diagnostic(code(media::text))]
    Text {
        /// Its keyword.
        keyword: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The file could not be written.
    #[error("cannot write `{}`", path.display())]
    #[diagnostic(code(media::write))]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// Reason code for a `rejects` row: `empty`, `decode`, `too_large`, `unsupported`, `text` or `write`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Decode(_) => "decode",
            Self::TooLarge(_) => "too_large",
            Self::Unsupported(_) => "unsupported",
            Self::Text { .. } => "text",
            Self::Write { .. } => "write",
        }
    }
}

impl From<image::ImageError> for Error {
    fn from(error: image::ImageError) -> Self {
        use image::ImageError as E;
        match error {
            E::Limits(_) => Self::TooLarge(error.to_string()),
            E::Unsupported(_) => Self::Unsupported(error.to_string()),
            E::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Self::Decode("the file ends too early (truncated)".to_owned())
            }
            _ => Self::Decode(error.to_string()),
        }
    }
}

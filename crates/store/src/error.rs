//! What can go wrong on disk.

use std::io;
use std::path::PathBuf;

use miette::Diagnostic;
use thiserror::Error;

/// A failure of the store.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// A file operation failed; the message of `fs_err` names the path.
    #[error("{0}")]
    #[diagnostic(code(store::io))]
    Io(#[from] io::Error),
    /// A folder that is no cache, or one of another version.
    #[error("`{}` is a cache of format {found}, this program reads format {}", path.display(), crate::cache::FORMAT)]
    #[diagnostic(code(store::format), help("choose another folder with `--cache DIR` or PIPELINE_CACHE"))]
    Format {
        /// The folder.
        path: PathBuf,
        /// Its format.
        found: String,
    },
    /// A source that is not there.
    #[error("`{}` does not exist", path.display())]
    #[diagnostic(code(store::missing))]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A source of which no file counts.
    #[error("`{}` has no file that matches {}", path.display(), spec::glob::told(globs))]
    #[diagnostic(code(store::empty))]
    Empty {
        /// The folder.
        path: PathBuf,
        /// The globs.
        globs: Vec<String>,
    },
    /// Something in a finished artifact that cannot be kept.
    #[error("`{path}` in the result is {what}, which cannot be published")]
    #[diagnostic(code(store::kind))]
    Unpublishable {
        /// Path inside the artifact.
        path: String,
        /// What it is.
        what: String,
    },
    /// A path that is not UTF-8 has no portable name.
    #[error("the name of `{}` is not UTF-8", path.display())]
    #[diagnostic(code(store::name), help("rename the file"))]
    Name {
        /// The path.
        path: PathBuf,
    },
    /// Not a digest.
    #[error("`{0}` is not a digest: 64 hexadecimal digits are expected")]
    #[diagnostic(code(store::digest))]
    Digest(String),
}

//! What can go wrong with a table: always names the file, and the column where there is one.

use std::io;
use std::path::{Path, PathBuf};

use arrow::error::ArrowError;
use miette::Diagnostic;
use parquet::errors::ParquetError;
use thiserror::Error;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A table that cannot be written or read.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} `{path}`: {source}")]
    #[diagnostic(code(tables::io))]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// File.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Not Parquet or Arrow, truncated, or damaged.
    #[error("`{path}` is truncated, damaged or not a table: {detail}")]
    #[diagnostic(code(tables::damaged), help("delete the artifact that holds it and run the stage again"))]
    Damaged {
        /// File.
        path: PathBuf,
        /// What the decoder said.
        detail: String,
    },
    /// No table where one was expected.
    #[error("no `.parquet` file in `{path}`")]
    #[diagnostic(code(tables::no_files))]
    NoFiles {
        /// File or folder.
        path: PathBuf,
    },
    /// A column is not there.
    #[error("`{path}` has no column `{column}`")]
    #[diagnostic(code(tables::missing_column), help("{help}"))]
    MissingColumn {
        /// File.
        path: PathBuf,
        /// Column.
        column: String,
        /// The columns it has.
        help: String,
    },
    /// A column has another type.
    #[error("column `{column}` of `{path}` is `{found}`, not `{expected}`")]
    #[diagnostic(code(tables::column_type))]
    ColumnType {
        /// File.
        path: PathBuf,
        /// Column.
        column: String,
        /// Its Arrow type.
        found: String,
        /// The type it must have.
        expected: String,
    },
    /// A null where the table allows none.
    #[error("column `{column}` of `{path}` holds a null in row {row}")]
    #[diagnostic(code(tables::null))]
    Null {
        /// File.
        path: PathBuf,
        /// Column.
        column: String,
        /// Row, from 0, within the batch that was read.
        row: usize,
    },
    /// A tensor column that does not say what it holds, or says something else.
    #[error("column `{column}` of `{path}`: {detail}")]
    #[diagnostic(code(tables::metadata))]
    Metadata {
        /// File.
        path: PathBuf,
        /// Column.
        column: String,
        /// What is missing or contradictory.
        detail: String,
    },
    /// A row whose tensor does not fit its own description.
    #[error("{table} row `{item}`: {detail}")]
    #[diagnostic(code(tables::bad_row))]
    BadRow {
        /// Table.
        table: &'static str,
        /// Sample id or caption digest.
        item: String,
        /// What does not fit.
        detail: String,
    },
    /// A caption that was never encoded.
    #[error("`{path}` has no `{encoder}` embedding of caption {digest}")]
    #[diagnostic(code(tables::no_caption), help("{help}"))]
    NoCaption {
        /// Folder of the captions table.
        path: PathBuf,
        /// Caption digest.
        digest: String,
        /// Text encoder.
        encoder: String,
        /// The encoders there are.
        help: String,
    },
}

impl Error {
    /// Kind of the operating system's error, if it is one: a full disk, a missing permission.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. } => Some(source.kind()),
            _ => None,
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.into(), source }
    }

    pub(crate) fn damaged(path: &Path, detail: impl Into<String>) -> Self {
        Self::Damaged { path: path.into(), detail: detail.into() }
    }

    /// An error of the Parquet library while writing or reading `path`.
    pub(crate) fn parquet(action: &'static str, path: &Path, error: ParquetError) -> Self {
        match error {
            ParquetError::External(source) => match source.downcast::<io::Error>() {
                Ok(source) => Self::io(action, path, *source),
                Err(source) => Self::damaged(path, source.to_string()),
            },
            ParquetError::General(detail) | ParquetError::EOF(detail) => Self::damaged(path, detail),
            other => Self::damaged(path, other.to_string()),
        }
    }

    /// An error of the Arrow library while writing or reading `path`.
    pub(crate) fn arrow(action: &'static str, path: &Path, error: ArrowError) -> Self {
        match error {
            ArrowError::IoError(_, source) => Self::io(action, path, source),
            ArrowError::ExternalError(source) => match source.downcast::<io::Error>() {
                Ok(source) => Self::io(action, path, *source),
                Err(source) => Self::damaged(path, source.to_string()),
            },
            ArrowError::ParquetError(detail) => Self::damaged(path, detail),
            other => Self::damaged(path, other.to_string()),
        }
    }
}

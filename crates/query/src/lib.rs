//! SQL over a run's tables, in process: read-only, deterministic, with scalar functions over tensor columns.
//!
//! Knows files, not artifacts: the runner says which Parquet files make which table.

mod error;
mod filter;
mod grid;
mod render;
mod session;
mod source;
mod tensor;

pub use error::{Error, Result};
pub use session::{ColumnInfo, Session, run};
pub use source::{Column, TableSource};

/// How a result is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// For reading: a grid, tensors and media shortened.
    #[default]
    Table,
    /// Comma-separated values with a header; nothing shortened, lists as `[1, 2]`, binary as hex, null as empty text.
    Csv,
    /// A JSON array with one object per line; nothing shortened, binary as hex, NaN and infinity as null.
    Json,
    /// JSON Lines: one such object a line, and nothing else.
    Jsonl,
    /// A Parquet file, columns as they are; see [`Session::save`].
    Parquet,
}

impl Format {
    /// Names, as users write them.
    pub const NAMES: [&str; 5] = ["table", "csv", "json", "jsonl", "parquet"];

    /// The format that a file's extension means.
    pub fn of_path(path: &std::path::Path) -> Option<Self> {
        path.extension()?.to_str()?.to_ascii_lowercase().parse().ok().filter(|format| *format != Self::Table)
    }
}

impl std::str::FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "table" => Ok(Self::Table),
            "csv" => Ok(Self::Csv),
            "json" => Ok(Self::Json),
            "jsonl" => Ok(Self::Jsonl),
            "parquet" => Ok(Self::Parquet),
            _ => Err(Error::UnknownFormat { name: name.into(), help: spec::suggest::help(name, Self::NAMES) }),
        }
    }
}

//! What can go wrong with a query, said in the user's words rather than the engine's.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use datafusion::common::SchemaError;
use datafusion::error::DataFusionError;
use miette::Diagnostic;
use thiserror::Error;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A query that cannot be answered.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// No such format.
    #[error("unknown output format `{name}`")]
    #[diagnostic(code(query::unknown_format), help("{help}"))]
    UnknownFormat {
        /// As given.
        name: String,
        /// Suggestion.
        help: String,
    },
    /// Parquet is no text.
    #[error("Parquet is written to a file only")]
    #[diagnostic(code(query::parquet_needs_file), help("name one: `--output result.parquet`"))]
    ParquetNeedsFile,
    /// The query needs more memory than it may use, and cannot go on with the disk's help.
    #[error("the query needs more memory than a query may use")]
    #[diagnostic(
        code(query::memory),
        help("select fewer columns (without `bytes` and `latent`), or filter before you join")
    )]
    Memory,
    /// No statement.
    #[error("the query is empty")]
    #[diagnostic(code(query::empty), help("such as `select count(*) from samples`"))]
    Empty,
    /// More than one statement.
    #[error("the query has {0} statements; give one at a time")]
    #[diagnostic(code(query::many))]
    Many(usize),
    /// Not SQL.
    #[error("the query is not valid SQL: {0}")]
    #[diagnostic(code(query::syntax))]
    Syntax(String),
    /// A statement that would change something.
    #[error("`{0}` is not allowed: tables of a run are read-only")]
    #[diagnostic(code(query::read_only), help("use `select`, `show tables`, `describe` or `explain`"))]
    ReadOnly(String),
    /// No such table.
    #[error("no table `{name}`")]
    #[diagnostic(code(query::unknown_table), help("{help}"))]
    UnknownTable {
        /// As written.
        name: String,
        /// Suggestion and list.
        help: String,
    },
    /// No such column.
    #[error("no column `{name}`")]
    #[diagnostic(code(query::unknown_column), help("{help}"))]
    UnknownColumn {
        /// As written.
        name: String,
        /// Suggestion, or the list.
        help: String,
    },
    /// The query is SQL, but cannot be planned or failed while running.
    #[error("{0}")]
    #[diagnostic(code(query::failed))]
    Failed(String),
    /// A file of a table cannot be used.
    #[error("table `{table}`: `{path}` {detail}")]
    #[diagnostic(code(query::bad_file))]
    BadFile {
        /// Table.
        table: String,
        /// File.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The result cannot be written.
    #[error("cannot write the result: {0}")]
    #[diagnostic(code(query::output))]
    Output(#[source] io::Error),
}

impl Error {
    pub(crate) fn bad_file(table: &str, path: &Path, detail: impl Into<String>) -> Self {
        Self::BadFile { table: table.into(), path: path.into(), detail: detail.into() }
    }

    /// From the engine's error.
    pub(crate) fn from_engine(error: &DataFusionError) -> Self {
        match error.find_root() {
            DataFusionError::SQL(parser, _) => Self::Syntax(plain(&parser.to_string())),
            DataFusionError::SchemaError(schema, _) => match schema.as_ref() {
                SchemaError::FieldNotFound { field, valid_fields } => {
                    let name = field.flat_name();
                    let names: BTreeSet<String> = valid_fields
                        .iter()
                        .map(|valid| if field.relation.is_some() { valid.flat_name() } else { valid.name.clone() })
                        .collect();
                    let help = spec::suggest::help(&name, names.iter().map(String::as_str));
                    Self::UnknownColumn { name, help }
                }
                other => Self::Failed(plain(&other.to_string())),
            },
            DataFusionError::ResourcesExhausted(_) => Self::Memory,
            DataFusionError::Collection(errors) if !errors.is_empty() => Self::from_engine(&errors[0]),
            DataFusionError::IoError(error) => Self::Failed(format!("cannot read a table: {error}")),
            DataFusionError::Execution(text) | DataFusionError::Plan(text) | DataFusionError::NotImplemented(text) => {
                Self::Failed(plain(text))
            }
            DataFusionError::External(error) => Self::Failed(plain(&error.to_string())),
            other => Self::Failed(plain(&other.strip_backtrace())),
        }
    }
}

/// One line, in lower case, without the engine's prefixes.
fn plain(text: &str) -> String {
    let text =
        ["sql parser error: ", "Schema error: ", "Error during planning: ", "Execution error: ", "Arrow error: "]
            .iter()
            .fold(text.trim(), |text, prefix| text.strip_prefix(prefix).unwrap_or(text))
            .replace('\n', " ");
    let word = text.split_whitespace().next().unwrap_or_default();
    if word.chars().skip(1).any(char::is_uppercase) {
        return text;
    }
    let mut letters = text.chars();
    letters.next().map(|first| first.to_lowercase().chain(letters).collect()).unwrap_or_default()
}

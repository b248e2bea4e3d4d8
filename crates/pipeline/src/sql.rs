//! `pipeline sql`: the tables of a recipe's current artifacts, and what ran, as one database.

use crate::error::Result;
use crate::workspace::Workspace;

/// Runs a query and prints its rows.
pub(crate) fn print(_workspace: &Workspace, _query: Option<&str>, _format: &str) -> Result<()> {
    Ok(())
}

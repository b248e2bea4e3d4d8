//! `pipeline sql`: the tables of a recipe's current artifacts, and the stages themselves, as one database.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use query::{Column, Format, Session, TableSource};
use serde_json::{Value, json};
use spec::glob::matches_any;
use stage::Exit;

use crate::error::{Error, Result, say};
use crate::show::{Current, current, status};
use crate::workspace::Workspace;

/// What is listed when no query is given.
const CATALOG: &str = "select table_name as \"table\", column_name as \"column\", data_type as \"type\" \
                       from information_schema.columns where table_schema = 'public' order by table_name, ordinal_position";

const STAGE_COLUMNS: &[(&str, Column)] = &[
    ("stage", Column::Text),
    ("status", Column::Text),
    ("rows_in", Column::Integer),
    ("rows_out", Column::Integer),
    ("rows_rejected", Column::Integer),
    ("rows_held", Column::Integer),
    ("seconds", Column::Float),
    ("bytes", Column::Integer),
    ("files", Column::Integer),
    ("summary", Column::Text),
    ("started", Column::Text),
    ("device", Column::Text),
    ("key", Column::Text),
    ("digest", Column::Text),
    ("path", Column::Text),
];

/// Answers a query on standard output.
pub(crate) fn print(workspace: &Workspace, query: Option<&str>, format: &str) -> Result<()> {
    let failed = |error: query::Error| Error::from_diagnostic(exit_of(&error), &error);
    let format: Format = format.parse().map_err(failed)?;
    let stages = current(workspace)?;
    for stage in stages.iter().filter(|stage| stage.artifact.is_some() && !stage.fresh) {
        let text = format!("note: `{}` is of an earlier run; the recipe now asks for another\n", stage.stage);
        say(&mut std::io::stderr(), &text);
    }
    let mut tables: Vec<TableSource> =
        files(workspace, &stages)?.into_iter().map(|(name, files)| TableSource::files(name, files)).collect();
    let rows: Vec<Value> = stages.iter().map(|stage| row(workspace, stage)).collect();
    tables.push(TableSource::rows("stages", STAGE_COLUMNS, &rows).map_err(failed)?);
    let session = Session::new(&tables).map_err(failed)?;
    match session.run(query.unwrap_or(CATALOG), format, &mut std::io::stdout().lock()) {
        Ok(_) => Ok(()),
        // `pipeline sql … | head` is no failure.
        Err(query::Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Table → its files in all current artifacts; a stage that has not run yet gives a table without rows.
fn files(workspace: &Workspace, stages: &[Current]) -> Result<BTreeMap<String, Vec<PathBuf>>> {
    let names: BTreeSet<String> = stages.iter().map(|stage| stage.stage.clone()).collect();
    let described = workspace.describe(&names)?;
    let mut tables: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for stage in stages {
        let Some((_, description)) = described.get(&stage.stage) else { continue };
        for (table, glob) in &description.tables {
            let files = tables.entry(table.clone()).or_default();
            if let Some(artifact) = &stage.artifact {
                let globs = [glob.clone()];
                let made = artifact.manifest.files.iter().filter(|file| matches_any(&globs, &file.path));
                files.extend(made.map(|file| artifact.path.join(&file.path)));
            }
        }
    }
    Ok(tables)
}

fn row(workspace: &Workspace, stage: &Current) -> Value {
    let mut row = json!({"stage": stage.stage, "status": status(workspace, stage)});
    if let Some(artifact) = &stage.artifact {
        let manifest = &artifact.manifest;
        for (column, name) in
            [("rows_in", "in"), ("rows_out", "out"), ("rows_rejected", "rejected"), ("rows_held", "held")]
        {
            row[column] = manifest.ledger.get(name).cloned().unwrap_or(Value::Null);
        }
        row["seconds"] = json!(manifest.seconds);
        row["bytes"] = json!(manifest.bytes());
        row["files"] = json!(manifest.files.len());
        row["summary"] = json!(manifest.summary);
        row["key"] = json!(manifest.key);
        row["digest"] = json!(manifest.digest);
        row["path"] = json!(artifact.path);
    }
    if let Some(record) = &stage.record {
        row["started"] = json!(record.started);
        row["device"] = json!(record.device);
    }
    row
}

fn exit_of(error: &query::Error) -> Exit {
    match error {
        query::Error::BadFile { .. } => Exit::Input,
        query::Error::Output(_) => Exit::Io,
        query::Error::Failed(_) => Exit::Failed,
        _ => Exit::Usage,
    }
}

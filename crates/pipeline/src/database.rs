//! The database of a recipe: the tables of its artifacts, and what the runner knows as tables (`stages`, `runs`, `files`,
//! `ledger`).
//!
//! A table that several stages write means what the last of them made of it (a stage that cleans `samples` replaces those
//! of `ingest`), but `rejects` and `held` are lists of all stages together. `stage.table` is what one stage wrote.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use query::{Column, Session, TableSource};
use serde_json::{Value, json};
use spec::glob::matches_any;
use stage::{Description, Exit};

use crate::error::{Error, Result};
use crate::ledger;
use crate::record::{RunRecord, Status};
use crate::show::{Current, status};
use crate::workspace::Workspace;

/// Tables to which every stage adds its rows.
const GATHERED: &[&str] = &["rejects", "held"];

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

const RUN_COLUMNS: &[(&str, Column)] = &[
    ("run", Column::Integer),
    ("started", Column::Text),
    ("seconds", Column::Float),
    ("exit", Column::Integer),
    ("made", Column::Integer),
    ("cached", Column::Integer),
    ("failed", Column::Text),
    ("overrides", Column::Text),
];

const STAGE_RUN_COLUMNS: &[(&str, Column)] = &[
    ("run", Column::Integer),
    ("stage", Column::Text),
    ("status", Column::Text),
    ("reason", Column::Text),
    ("started", Column::Text),
    ("seconds", Column::Float),
    ("device", Column::Text),
    ("threads", Column::Integer),
    ("rejected", Column::Integer),
    ("error", Column::Text),
    ("key", Column::Text),
    ("digest", Column::Text),
];

const FILE_COLUMNS: &[(&str, Column)] = &[
    ("stage", Column::Text),
    ("path", Column::Text),
    ("bytes", Column::Integer),
    ("digest", Column::Text),
    ("measured", Column::Boolean),
    ("location", Column::Text),
];

/// Opens the database of these artifacts.
pub(crate) fn open(workspace: &Workspace, stages: &[Current]) -> Result<Session> {
    let names: BTreeSet<String> = stages.iter().map(|stage| stage.stage.clone()).collect();
    let described: BTreeMap<String, Description> =
        workspace.describe(&names)?.into_iter().map(|(name, (_, description))| (name, description)).collect();
    let mut tables = Vec::new();
    let mut plain: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for stage in stages {
        let Some(description) = described.get(&stage.stage) else { continue };
        for table in description.tables.keys() {
            let own = files_of(stage, description, table);
            let files = plain.entry(table.clone()).or_default();
            if GATHERED.contains(&table.as_str()) {
                files.extend(own.iter().cloned());
            } else if !own.is_empty() {
                // Stages come in the order in which they can run: the later one has the last word.
                files.clone_from(&own);
            }
            tables.push(TableSource::files(table, own).of(&stage.stage));
        }
    }
    tables.extend(plain.into_iter().map(|(name, files)| TableSource::files(name, files)));
    let stage_rows: Vec<Value> = stages.iter().map(|stage| row(workspace, stage)).collect();
    let (runs, stage_runs) = runs(workspace);
    let files: Vec<Value> = stages.iter().flat_map(files_rows).collect();
    for (name, columns, rows) in [
        ("stages", STAGE_COLUMNS, stage_rows),
        ("runs", RUN_COLUMNS, runs),
        ("stage_runs", STAGE_RUN_COLUMNS, stage_runs),
        ("files", FILE_COLUMNS, files),
    ] {
        tables.push(TableSource::rows(name, columns, &rows).map_err(failed)?);
    }
    let mut session = Session::new(&tables).map_err(failed)?;
    if let Some(sql) = ledger::sql(&session, stages, &described).map_err(failed)? {
        session.view("ledger", &sql).map_err(failed)?;
    }
    Ok(session)
}

/// Files of one table of one stage; none if the stage has not run yet.
fn files_of(stage: &Current, description: &Description, table: &str) -> Vec<PathBuf> {
    let (Some(artifact), Some(glob)) = (&stage.artifact, description.tables.get(table)) else { return Vec::new() };
    let globs = [glob.clone()];
    let made = artifact.manifest.files.iter().filter(|file| matches_any(&globs, &file.path));
    made.map(|file| artifact.path.join(&file.path)).collect()
}

fn files_rows(stage: &Current) -> Vec<Value> {
    let Some(artifact) = &stage.artifact else { return Vec::new() };
    let file = |file: &store::FileRecord| {
        json!({
            "stage": stage.stage, "path": file.path, "bytes": file.bytes, "digest": file.digest, "measured": file.measured,
            "location": artifact.path.join(&file.path),
        })
    };
    artifact.manifest.files.iter().map(file).collect()
}

/// Rows of `runs` and of `stage_runs`, oldest first.
fn runs(workspace: &Workspace) -> (Vec<Value>, Vec<Value>) {
    let (mut runs, mut stages) = (Vec::new(), Vec::new());
    let recipe = &workspace.recipe.name;
    for number in workspace.cache.run_numbers(recipe) {
        let Some(record) = workspace.cache.run_record::<RunRecord>(recipe, number) else { continue };
        let count = |status: Status| record.stages.iter().filter(|stage| stage.status == status).count();
        let failed = record.stages.iter().find(|stage| stage.error.is_some()).map(|stage| stage.stage.clone());
        runs.push(json!({
            "run": number, "started": record.started, "seconds": record.seconds, "exit": record.exit,
            "made": count(Status::Made), "cached": count(Status::Cached), "failed": failed,
            "overrides": record.overrides.join(" "),
        }));
        for stage in record.stages {
            stages.push(json!({
                "run": number, "stage": stage.stage, "status": stage.status.name(), "reason": stage.reason,
                "started": stage.started, "seconds": stage.seconds, "device": stage.device, "threads": stage.threads,
                "rejected": stage.rejected, "error": stage.error, "key": stage.key, "digest": stage.digest,
            }));
        }
    }
    (runs, stages)
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

/// A failed query as an error of the command line.
#[expect(clippy::needless_pass_by_value, reason = "for `map_err(failed)`")]
pub(crate) fn failed(error: query::Error) -> Error {
    Error::from_diagnostic(exit_of(&error), &error)
}

fn exit_of(error: &query::Error) -> Exit {
    match error {
        query::Error::BadFile { .. } => Exit::Input,
        query::Error::Output(_) => Exit::Io,
        query::Error::Failed(_) | query::Error::Memory => Exit::Failed,
        _ => Exit::Usage,
    }
}

//! `pipeline status`: where each stage stands, what is being made, and the recipe's runs, newest first.

use std::fmt::Write as _;

use serde_json::json;
use store::Cache;

use crate::clock::{size, told};
use crate::error::{Result, say};
use crate::record::{RunRecord, Status};
use crate::show::{Current, current, status};
use crate::workspace::Workspace;

/// Runs that are told.
const RUNS: usize = 10;

pub(crate) fn print(workspace: &Workspace, json: bool) -> Result<()> {
    let stages = current(workspace)?;
    let (cache, recipe) = (&workspace.cache, &workspace.recipe.name);
    let numbers = cache.run_numbers(recipe).into_iter().rev();
    let runs: Vec<(u64, RunRecord)> =
        numbers.filter_map(|number| Some((number, cache.run_record(recipe, number)?))).take(RUNS).collect();
    let out = if json { as_json(workspace, &stages, &runs) } else { as_text(workspace, &stages, &runs) };
    say(&mut std::io::stdout(), &out);
    Ok(())
}

/// Keys of a stage that some runner is making now.
fn being_made(cache: &Cache, stage: &str) -> Vec<String> {
    let keys = cache.keys_in_work(stage).into_iter();
    keys.filter(|key| matches!(cache.try_lock(stage, key), Ok(None))).map(|key| key.short()).collect()
}

fn as_json(workspace: &Workspace, stages: &[Current], runs: &[(u64, RunRecord)]) -> String {
    let stage = |stage: &Current| {
        let manifest = stage.artifact.as_ref().map(|artifact| &artifact.manifest);
        json!({
            "stage": stage.stage, "status": status(workspace, stage), "key": manifest.map(|manifest| manifest.key),
            "bytes": manifest.map(store::Manifest::bytes), "summary": manifest.map(|manifest| &manifest.summary),
            "being_made": being_made(&workspace.cache, &stage.stage),
        })
    };
    let runs: Vec<_> = runs.iter().map(|(number, record)| json!({"run": number, "record": record})).collect();
    format!("{}\n", json!({"stages": stages.iter().map(stage).collect::<Vec<_>>(), "runs": runs}))
}

fn as_text(workspace: &Workspace, stages: &[Current], runs: &[(u64, RunRecord)]) -> String {
    let mut out = String::new();
    let width = stages.iter().map(|stage| stage.stage.len()).max().unwrap_or(0);
    for stage in stages {
        let rest = stage.artifact.as_ref().map_or_else(String::new, |artifact| {
            format!("{}, {}", artifact.manifest.summary, size(artifact.manifest.bytes()))
        });
        let _ = writeln!(out, "{:width$}  {:7}  {rest}", stage.stage, status(workspace, stage));
        for key in being_made(&workspace.cache, &stage.stage) {
            let _ = writeln!(out, "{:width$}  being made: {key}", "");
        }
    }
    if runs.is_empty() {
        out.push_str("no run yet\n");
    }
    for (number, record) in runs {
        let of = |status: Status| -> Vec<&str> {
            record.stages.iter().filter(|stage| stage.status == status).map(|stage| stage.stage.as_str()).collect()
        };
        let mut parts = Vec::new();
        for (word, status) in [
            ("made", Status::Made),
            ("cached", Status::Cached),
            ("failed", Status::Failed),
            ("interrupted", Status::Interrupted),
        ] {
            let names = of(status);
            if !names.is_empty() {
                parts.push(format!("{word} {}", names.join(", ")));
            }
        }
        let exit = record.exit.map_or_else(|| "killed or running".to_owned(), |exit| format!("exit {exit}"));
        let _ =
            writeln!(out, "run {number}  {}  {}  {exit}  {}", record.started, told(record.seconds), parts.join("; "));
    }
    out
}

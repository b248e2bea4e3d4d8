//! `pipeline gc`: frees what no kept run reaches.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use store::{Cache, Collection, Digest, Policy};

use crate::clock::{size, system};
use crate::error::{Result, say};
use crate::record::RunRecord;

/// What the user asked for.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Newest runs of each recipe whose artifacts are kept.
    pub(crate) keep_runs: usize,
    pub(crate) older_than: Option<Duration>,
    pub(crate) max_size: Option<u64>,
    pub(crate) dry_run: bool,
}

/// Collects and says what went.
pub(crate) fn print(folder: &Path, request: &Request, json: bool) -> Result<()> {
    let cache = Cache::open(folder)?;
    let policy = Policy {
        roots: roots(&cache, request.keep_runs),
        younger_than: request.older_than,
        max_bytes: request.max_size,
    };
    let found = cache.collect(&policy, system(), request.dry_run)?;
    let runs = forget_runs(&cache, request, &found)?;
    say(&mut std::io::stdout(), &if json { as_json(&found, request, runs) } else { told(&found, request, runs) });
    Ok(())
}

/// Artifacts of the newest runs of every recipe.
fn roots(cache: &Cache, keep_runs: usize) -> BTreeSet<(String, Digest)> {
    let kept = |recipe: String| -> Vec<RunRecord> { cache.run_records(&recipe).take(keep_runs).collect() };
    let stages = cache.recipes().into_iter().flat_map(kept).flat_map(|run| run.stages);
    stages.map(|stage| (stage.stage, stage.key)).collect()
}

/// Removes the records of runs whose artifacts went, so that nothing points at what is not there; counts them.
fn forget_runs(cache: &Cache, request: &Request, found: &Collection) -> Result<usize> {
    let gone: BTreeSet<(&str, Digest)> = found.artifacts.iter().map(|one| (one.stage.as_str(), one.key)).collect();
    let mut forgotten = 0;
    for recipe in cache.recipes() {
        for number in cache.run_numbers(&recipe).into_iter().rev().skip(request.keep_runs.max(1)) {
            let Some(run) = cache.run_record::<RunRecord>(&recipe, number) else { continue };
            if run.stages.iter().any(|stage| gone.contains(&(stage.stage.as_str(), stage.key))) {
                forgotten += 1;
                if !request.dry_run {
                    cache.remove_run(&recipe, number)?;
                }
            }
        }
    }
    Ok(forgotten)
}

fn as_json(found: &Collection, request: &Request, runs: usize) -> String {
    let artifacts: Vec<_> =
        (found.artifacts.iter()).map(|one| json!({"stage": one.stage, "key": one.key, "bytes": one.bytes})).collect();
    let report = json!({"dry_run": request.dry_run, "artifacts": artifacts, "leftovers": found.leftovers, "runs": runs,
        "freed_bytes": found.freed, "kept_bytes": found.kept});
    format!("{report}\n")
}

fn told(found: &Collection, request: &Request, runs: usize) -> String {
    let mut out = String::new();
    for one in &found.artifacts {
        let _ = writeln!(out, "{}  {}  {}", one.stage, one.key.short(), size(one.bytes));
    }
    for path in &found.leftovers {
        let _ = writeln!(out, "left over  {}", path.display());
    }
    let count = |n: usize, one: &str| if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") };
    let _ = writeln!(
        out,
        "{} {}, {} and {}: {} free, {} kept",
        if request.dry_run { "would remove" } else { "removed" },
        count(found.artifacts.len(), "artifact"),
        count(found.leftovers.len(), "leftover"),
        count(runs, "run record"),
        size(found.freed),
        size(found.kept),
    );
    out
}

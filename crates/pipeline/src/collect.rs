//! `pipeline gc`: frees what no kept run reaches.

use std::collections::{BTreeMap, BTreeSet};
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
    /// Newest runs of each stage of each recipe whose artifacts are kept.
    pub(crate) keep_runs: usize,
    pub(crate) older_than: Option<Duration>,
    pub(crate) max_size: Option<u64>,
    pub(crate) dry_run: bool,
}

/// Collects and says what went.
pub(crate) fn print(folder: &Path, request: &Request, json: bool) -> Result<()> {
    let cache = Cache::open(folder)?;
    let kept = Kept::of(&cache, request.keep_runs);
    let policy = Policy { roots: kept.artifacts, younger_than: request.older_than, max_bytes: request.max_size };
    let found = cache.collect(&policy, system(), request.dry_run)?;
    let runs = forget_runs(&cache, request, &kept.runs, &found)?;
    say(&mut std::io::stdout(), &if json { as_json(&found, request, runs) } else { told(&found, request, runs) });
    Ok(())
}

/// What stays, whatever else goes.
#[derive(Default)]
struct Kept {
    /// (stage, key).
    artifacts: BTreeSet<(String, Digest)>,
    /// (recipe, number) of the runs that say so.
    runs: BTreeSet<(String, u64)>,
}

impl Kept {
    /// Of each stage of each recipe, what the newest `keep_runs` runs that left an artifact of *that stage* left. A run of a
    /// few stages, or one that failed, says nothing of the others, whose results are still the recipe's.
    fn of(cache: &Cache, keep_runs: usize) -> Self {
        let mut kept = Self::default();
        for recipe in cache.recipes() {
            let mut runs: BTreeMap<String, usize> = BTreeMap::new();
            for number in cache.run_numbers(&recipe).into_iter().rev() {
                let Some(run) = cache.run_record::<RunRecord>(&recipe, number) else { continue };
                let left = run.stages.into_iter().filter(|stage| stage.digest.is_some());
                let there = left.filter(|stage| cache.artifact_path(&stage.stage, &stage.key).exists());
                let wanted = there.filter(|stage| runs.get(&stage.stage).is_none_or(|count| *count < keep_runs));
                // A run that repaired something names a stage more than once.
                let artifacts: BTreeSet<_> = wanted.map(|stage| (stage.stage, stage.key)).collect();
                let stages: BTreeSet<&String> = artifacts.iter().map(|(stage, _)| stage).collect();
                for stage in stages {
                    *runs.entry(stage.clone()).or_default() += 1;
                }
                if !artifacts.is_empty() {
                    kept.runs.insert((recipe.clone(), number));
                }
                kept.artifacts.extend(artifacts);
            }
        }
        kept
    }
}

/// Removes the records of runs whose artifacts went, unless a result that stays is known by them; counts them.
fn forget_runs(cache: &Cache, request: &Request, kept: &BTreeSet<(String, u64)>, found: &Collection) -> Result<usize> {
    let gone: BTreeSet<(&str, Digest)> = found.artifacts.iter().map(|one| (one.stage.as_str(), one.key)).collect();
    let mut forgotten = 0;
    for recipe in cache.recipes() {
        for number in cache.run_numbers(&recipe).into_iter().rev().skip(request.keep_runs.max(1)) {
            if kept.contains(&(recipe.clone(), number)) {
                continue;
            }
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

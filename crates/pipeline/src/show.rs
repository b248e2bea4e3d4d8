//! `pipeline show`: what each stage's current artifact is, where it came from, and what it holds.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::{Value, json};
use spec::suggest;
use store::{Artifact, Lookup};

use crate::clock::{size, told};
use crate::error::{Error, Result, say};
use crate::plan::{State, judge};
use crate::record::last_made;
use crate::selection::{Request, Selection};
use crate::workspace::Workspace;

/// A stage's current artifact: the one that the recipe asks for now, else the last one that its runs made.
pub(crate) struct Current {
    pub(crate) stage: String,
    pub(crate) artifact: Option<Artifact>,
    /// Whether it is what the recipe asks for now.
    pub(crate) fresh: bool,
    /// From the run that made or last used it.
    pub(crate) record: Option<crate::record::StageRecord>,
}

/// Current artifacts of all stages of the recipe. Works without the sources, the Hub and the programs, from what ran before.
pub(crate) fn current(workspace: &Workspace) -> Result<Vec<Current>> {
    let selection = Selection::new(&workspace.graph, &workspace.recipe, &Request::default())?;
    let fresh = fresh(workspace, &selection);
    Ok(workspace
        .graph
        .nodes()
        .filter(|node| selection.all.contains(&node.name))
        .map(|node| {
            let last = last_made(workspace, &node.name);
            let now = fresh.iter().find(|artifact| artifact.manifest.stage == node.name).cloned();
            let (record, old) = last.map_or((None, None), |(record, artifact)| (Some(record), artifact));
            Current { stage: node.name.clone(), fresh: now.is_some(), artifact: now.or(old), record }
        })
        .collect())
}

/// Artifacts that the recipe asks for now and that are there; none if it cannot be prepared now.
fn fresh(workspace: &Workspace, selection: &Selection) -> Vec<Artifact> {
    let Ok(stages) = workspace.prepare(&selection.all, &selection.implied) else { return Vec::new() };
    let mut made = std::collections::BTreeMap::new();
    for stage in &stages {
        if let State::Cached { artifact } = judge(workspace, stage, &made, false) {
            made.insert(stage.node.name.clone(), *artifact);
        }
    }
    made.into_values().collect()
}

/// `pipeline show RECIPE [STAGE]`.
pub(crate) fn print(workspace: &Workspace, stage: Option<&str>, json: bool) -> Result<()> {
    let all = current(workspace)?;
    let names: BTreeSet<&str> = all.iter().map(|current| current.stage.as_str()).collect();
    if let Some(name) = stage.filter(|name| !names.contains(name)) {
        let help = suggest::help(name, names.iter().copied());
        return Err(Error::usage(format!("the recipe has no stage `{name}`"), help));
    }
    let mut out = String::new();
    for current in all.iter().filter(|current| stage.is_none_or(|name| name == current.stage)) {
        if json {
            let _ = writeln!(out, "{}", as_json(current));
        } else {
            describe(current, stage.is_some(), &mut out);
        }
    }
    say(&mut std::io::stdout(), &out);
    Ok(())
}

fn as_json(current: &Current) -> Value {
    let artifact = current.artifact.as_ref();
    json!({
        "stage": current.stage,
        "fresh": current.fresh,
        "path": artifact.map(|artifact| &artifact.path),
        "manifest": artifact.map(|artifact| &artifact.manifest),
        "last": current.record,
    })
}

fn describe(current: &Current, in_full: bool, out: &mut String) {
    let Some(Artifact { path, manifest }) = &current.artifact else {
        let _ = writeln!(out, "{}\n  no artifact yet", current.stage);
        return;
    };
    let stale = if current.fresh { "" } else { "  (of an earlier run; the recipe now asks for another)" };
    let _ = writeln!(out, "{}  {}{stale}", current.stage, manifest.kind);
    let mut line = |name: &str, text: String| {
        let _ = writeln!(out, "  {name:8}  {text}");
    };
    line("artifact", path.display().to_string());
    line("key", manifest.key.to_string());
    line("digest", manifest.digest.to_string());
    let rows = |name: &str| manifest.ledger.get(name).and_then(Value::as_u64).unwrap_or(0);
    let ledger =
        format!("{} in = {} out + {} rejected + {} held", rows("in"), rows("out"), rows("rejected"), rows("held"));
    line("rows", ledger);
    line("files", format!("{}, {}", manifest.files.len(), size(manifest.bytes())));
    line("made in", told(manifest.seconds));
    if !manifest.summary.is_empty() {
        line("summary", manifest.summary.clone());
    }
    for warning in &manifest.warnings {
        line("warning", warning.clone());
    }
    if !in_full {
        return;
    }
    for (name, source) in &manifest.sources {
        let commit = source.commit.as_ref().map(|commit| format!(" at {commit}")).unwrap_or_default();
        line("source", format!("{name}: {}{commit}", source.location));
    }
    for (name, input) in &manifest.inputs {
        line("input", format!("{name}: {} {}", input.stage, input.key.short()));
    }
    let pretty =
        |value: &Value| serde_json::to_string_pretty(value).unwrap_or_default().replace('\n', "\n            ");
    line("asked", pretty(&manifest.material.parameters));
    if !manifest.info.is_null() {
        line("info", pretty(&manifest.info));
    }
    for file in &manifest.files {
        line("file", format!("{}  {}  {}", file.path, size(file.bytes), file.digest.short()));
    }
}
/// Whether an artifact is there and what the recipe asks for, in a word.
pub(crate) fn status(workspace: &Workspace, current: &Current) -> &'static str {
    match &current.artifact {
        None => "absent",
        Some(artifact) => match workspace.cache.artifact(&current.stage, &artifact.manifest.key) {
            Lookup::Hit(_) if current.fresh => "cached",
            Lookup::Hit(_) => "stale",
            Lookup::Absent | Lookup::Broken(_) => "damaged",
        },
    }
}

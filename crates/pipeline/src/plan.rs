//! Freshness: for each stage, whether its result is there, and if not, why it must run.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::json;
use store::{Artifact, Digest, Lookup, Manifest, Material, SCHEMA};

use crate::clock;
use crate::disk;
use crate::error::{Error, Result, say};
use crate::explain::{self, Change};
use crate::forecast::Forecast;
use crate::record::last_before;
use crate::selection::Selection;
use crate::workspace::{Prepared, Workspace};

/// What is to be done about a stage.
#[derive(Debug, Clone)]
pub(crate) enum State {
    /// Nothing: the result is there.
    Cached { artifact: Box<Artifact> },
    /// Bring it from the remote.
    Remote { manifest: Box<Manifest> },
    /// Run it. `lost` is what an earlier artifact that is damaged took to make, in seconds.
    ToRun { material: Material, reason: String, changes: Vec<Change>, lost: Option<f64> },
    /// Not known before these stages ran.
    Waits { on: Vec<String> },
}

/// Judges one stage. `made` holds the artifacts of the stages before it that are there.
pub(crate) fn judge(workspace: &Workspace, stage: &Prepared, made: &BTreeMap<String, Artifact>, forced: bool) -> State {
    let mut inputs = BTreeMap::new();
    let mut on: Vec<String> = Vec::new();
    for (input, from) in &stage.node.inputs {
        match made.get(from) {
            Some(artifact) => {
                inputs.insert(input.clone(), artifact.manifest.digest);
            }
            None => on.push(from.clone()),
        }
    }
    if !on.is_empty() {
        on.sort();
        on.dedup();
        return State::Waits { on };
    }
    let material = Material {
        schema: SCHEMA,
        stage: stage.node.name.clone(),
        version: stage.description.version,
        parameters: stage.checked.key.clone(),
        sources: stage.sources.iter().map(|found| (found.name.clone(), found.identity.digest)).collect(),
        inputs,
    };
    let cache = &workspace.cache;
    let name = &stage.node.name;
    let key = material.key();
    let lookup = if workspace.options.repair { cache.verify(name, &key) } else { cache.artifact(name, &key) };
    let (mut lost, mut changes) = (None, Vec::new());
    let reason = match lookup {
        Lookup::Hit(_) if forced => "forced".to_owned(),
        Lookup::Hit(artifact) => return State::Cached { artifact },
        Lookup::Broken(_) | Lookup::Absent if let Some(manifest) = elsewhere(workspace, name, &key, forced) => {
            return State::Remote { manifest: Box::new(manifest) };
        }
        Lookup::Broken(why) => {
            lost = Some(cache.manifest(name, &key).ok().flatten().map_or(0.0, |manifest| manifest.seconds));
            format!("the earlier artifact is damaged: {why}")
        }
        Lookup::Absent => match last_before(workspace, &stage.node.name) {
            None => "no earlier artifact".to_owned(),
            Some(record) if record.key == material.key() => "the earlier artifact was removed".to_owned(),
            Some(record) => match cache.manifest(&stage.node.name, &record.key) {
                Ok(Some(manifest)) => {
                    changes = explain::changes(workspace, stage, &manifest.material, &material);
                    explain::sentence(&changes)
                }
                Ok(None) | Err(_) => "no earlier artifact".to_owned(),
            },
        },
    };
    State::ToRun { material, reason, changes, lost }
}

/// What the remote has under that key, if there is one and it may be used.
fn elsewhere(workspace: &Workspace, stage: &str, key: &Digest, forced: bool) -> Option<Manifest> {
    if forced { None } else { workspace.exchange.as_ref()?.manifest(stage, key) }
}

/// The error of a stage that must not run here and is not there.
pub(crate) fn left_out(workspace: &Workspace, stage: &str, state: &State) -> Error {
    let why = match state {
        State::ToRun { reason, .. } => reason.clone(),
        State::Waits { on } => format!("waits for {}", on.join(", ")),
        State::Cached { .. } | State::Remote { .. } => "cached".to_owned(),
    };
    Error::usage(
        format!("the stage `{stage}` is not cached ({why}), is needed, and is left out by the command line"),
        format!("`pipeline run {} --until {stage}` makes it", workspace.recipe.path.display()),
    )
}

/// What is said of a source that is not there.
pub(crate) fn absence(path: &str) -> String {
    format!("`{path}` is not there; it is taken to be what it was when an artifact was made of it")
}

/// The error of a stage that must run and cannot, if it cannot.
pub(crate) fn unable(workspace: &Workspace, stage: &Prepared, reason: &str) -> Option<Error> {
    let path = stage.absent.first()?;
    let name = &stage.node.name;
    let problem =
        spec::Problem::new(format!("`{name}` must run ({reason}), and `{path}`, which it reads, is not there"))
            .field(stage.sources.iter().find(|found| found.resolved.location == *path).map_or("", |found| &found.name))
            .help("bring it back; what needs no more than the cache has is there without it");
    Some(Error::new(stage::Exit::Input, workspace.recipe.locate(&workspace.graph, name, &problem)))
}

/// All stages of the selection with their states, as far as they can be known before anything runs.
pub(crate) fn states(workspace: &Workspace, selection: &Selection, stages: &[Prepared]) -> Result<Vec<State>> {
    let mut made = BTreeMap::new();
    let mut states = Vec::new();
    for stage in stages {
        let name = &stage.node.name;
        let state = judge(workspace, stage, &made, selection.force.contains(name));
        if let State::Cached { artifact } = &state {
            made.insert(name.clone(), (**artifact).clone());
        } else if let State::Remote { manifest } = &state {
            // It will lie there.
            let path = workspace.cache.artifact_path(name, &manifest.key);
            made.insert(name.clone(), Artifact { path, manifest: (**manifest).clone() });
        } else if !selection.run.contains(name) {
            return Err(left_out(workspace, name, &state));
        }
        states.push(state);
    }
    Ok(states)
}

/// Artifacts that are there, by stage.
pub(crate) fn there(states: &[State]) -> BTreeMap<String, Artifact> {
    let there = states.iter().filter_map(|state| match state {
        State::Cached { artifact } => Some((artifact.manifest.stage.clone(), (**artifact).clone())),
        State::Remote { .. } | State::ToRun { .. } | State::Waits { .. } => None,
    });
    there.collect()
}

/// Prices of the stages that are to run or wait, in the order of `stages`; of a cached one, nothing.
pub(crate) fn forecasts(workspace: &Workspace, stages: &[Prepared], states: &[State]) -> Vec<Option<Forecast>> {
    let made = there(states);
    // Files that changed anywhere before a waiting stage.
    let changed: Vec<String> = (states.iter())
        .flat_map(|state| match state {
            State::ToRun { changes, .. } => changes.as_slice(),
            State::Cached { .. } | State::Remote { .. } | State::Waits { .. } => &[],
        })
        .flat_map(|change| &change.files)
        .map(|file| file.trim_end_matches(" (new)").trim_end_matches(" (gone)").to_owned())
        .collect();
    let of = |(stage, state): (&Prepared, &State)| match state {
        State::Cached { .. } | State::Remote { .. } => None,
        State::ToRun { .. } => Some(Forecast::of(workspace, stage, &made, None)),
        State::Waits { .. } => Some(Forecast::of(workspace, stage, &made, Some(changed.clone()))),
    };
    stages.iter().zip(states).map(of).collect()
}

/// `pipeline plan`.
pub(crate) fn print(workspace: &Workspace, selection: &Selection, json: bool) -> Result<()> {
    let stages = workspace.prepare(&selection.all, &selection.implied)?;
    let states = states(workspace, selection, &stages)?;
    let forecasts = forecasts(workspace, &stages, &states);
    let out = if json {
        as_json(workspace, &stages, &states, &forecasts)
    } else {
        as_text(workspace, &stages, &states, &forecasts)
    };
    say(&mut std::io::stdout(), &out);
    Ok(())
}

/// State in a word, why, and the key if it is known.
fn words(state: &State) -> (&'static str, String, Option<Digest>) {
    let told = |word, manifest: &Manifest| {
        let rows = |name: &str| manifest.ledger.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
        let held = if rows("held") > 0 { format!(", {} held back", rows("held")) } else { String::new() };
        (word, format!("{} rows{held}, {}", rows("out"), clock::size(manifest.bytes())), Some(manifest.key))
    };
    match state {
        State::Cached { artifact } => told("cached", &artifact.manifest),
        State::Remote { manifest } => told("remote", manifest),
        State::ToRun { material, reason, .. } => ("to run", reason.clone(), Some(material.key())),
        State::Waits { on } => ("waits", format!("for {}", on.join(", ")), None),
    }
}

fn troubles(workspace: &Workspace) -> Vec<String> {
    workspace.exchange.iter().flat_map(crate::exchange::Exchange::troubles).collect()
}

fn as_json(workspace: &Workspace, stages: &[Prepared], states: &[State], forecasts: &[Option<Forecast>]) -> String {
    let stage = |((stage, state), forecast): ((&Prepared, &State), &Option<Forecast>)| {
        let (word, reason, key) = words(state);
        let changes = if let State::ToRun { changes, .. } = state { changes.as_slice() } else { &[] };
        let manifest = match state {
            State::Cached { artifact } => Some(&artifact.manifest),
            State::Remote { manifest } => Some(&**manifest),
            State::ToRun { .. } | State::Waits { .. } => None,
        };
        json!({
            "stage": stage.node.name, "state": word.replace(' ', "_"), "reason": reason, "changes": changes, "key": key,
            "device": stage.resources.device, "ranks": stage.resources.ranks, "notes": stage.checked.notes,
            "absent": stage.absent, "forecast": forecast,
            "ledger": manifest.map(|manifest| &manifest.ledger), "summary": manifest.map(|manifest| &manifest.summary),
        })
    };
    let list: Vec<_> = stages.iter().zip(states).zip(forecasts).map(stage).collect();
    let to_run = forecasts.iter().flatten().count();
    let plan = json!({
        "recipe": workspace.recipe.name, "overrides": workspace.recipe.overrides, "to_run": to_run, "stages": list,
        "notes": troubles(workspace),
        "free_bytes": disk::free(workspace.cache.root()),
    });
    format!("{plan}\n")
}

fn as_text(workspace: &Workspace, stages: &[Prepared], states: &[State], forecasts: &[Option<Forecast>]) -> String {
    let mut out = String::new();
    let width = stages.iter().map(|stage| stage.node.name.len()).max().unwrap_or(0);
    for ((stage, state), forecast) in stages.iter().zip(states).zip(forecasts) {
        let (word, reason, _) = words(state);
        let _ = writeln!(out, "{:width$}  {word:6}  {reason}", stage.node.name);
        let absent = stage.absent.iter().map(|path| format!("note: {}", absence(path)));
        let told = forecast.iter().flat_map(|forecast| std::iter::once(forecast.line()).chain(forecast.facts.clone()));
        for line in told.chain(stage.checked.notes.iter().map(|note| format!("note: {note}"))).chain(absent) {
            if !line.is_empty() {
                let _ = writeln!(out, "{:width$}          {line}", "");
            }
        }
    }
    for trouble in troubles(workspace) {
        let _ = writeln!(out, "note: {trouble}");
    }
    for text in &workspace.recipe.overrides {
        let _ = writeln!(out, "override: {text}");
    }
    let coming: Vec<&Forecast> = forecasts.iter().flatten().collect();
    let fetched: Vec<u64> = states
        .iter()
        .filter_map(|state| if let State::Remote { manifest } = state { Some(manifest.bytes()) } else { None })
        .collect();
    if let (Some(exchange), false) = (&workspace.exchange, fetched.is_empty()) {
        let size = clock::size(fetched.iter().sum());
        let _ = writeln!(out, "{} to fetch from {}, {size} at most", fetched.len(), exchange.address());
    }
    if coming.is_empty() {
        if fetched.is_empty() {
            out.push_str("nothing to do\n");
        }
        return out;
    }
    let all = |of: fn(&Forecast) -> Option<f64>| coming.iter().map(|forecast| of(forecast)).sum::<Option<f64>>();
    let mut total = vec![format!("{} to run", coming.len())];
    total.extend(all(|forecast| forecast.seconds).map(|seconds| format!("about {}", clock::told(seconds))));
    let bytes = all(|forecast| forecast.bytes.map(|bytes| bytes as f64)).map(|bytes| clock::size(bytes as u64));
    let free = disk::free(workspace.cache.root()).map(clock::size);
    total.extend(bytes.zip(free).map(|(bytes, free)| format!("{bytes} of {free} free")));
    let _ = writeln!(out, "{}", total.join(", "));
    out
}

//! Freshness: for each stage, whether its result is there, and if not, why it must run.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::json;
use store::{Artifact, Lookup, Material, SCHEMA};

use crate::clock;
use crate::error::{Error, Result, say};
use crate::explain;
use crate::record::last_made;
use crate::selection::Selection;
use crate::workspace::{Prepared, Workspace};

/// What is to be done about a stage.
#[derive(Debug, Clone)]
pub(crate) enum State {
    /// Nothing: the result is there.
    Cached { artifact: Box<Artifact> },
    /// Run it. `lost` is what an earlier artifact that is damaged took to make, in seconds.
    ToRun { material: Material, reason: String, lost: Option<f64> },
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
    let mut lost = None;
    let reason = match lookup {
        Lookup::Hit(_) if forced => "forced".to_owned(),
        Lookup::Hit(artifact) => return State::Cached { artifact },
        Lookup::Broken(why) => {
            lost = Some(cache.manifest(name, &key).ok().flatten().map_or(0.0, |manifest| manifest.seconds));
            format!("the earlier artifact is damaged: {why}")
        }
        Lookup::Absent => match last_made(cache, &workspace.recipe.name, &stage.node.name) {
            None => "no earlier artifact".to_owned(),
            Some((record, _)) if record.key == material.key() => "the earlier artifact was removed".to_owned(),
            Some((record, _)) => match cache.manifest(&stage.node.name, &record.key) {
                Ok(Some(manifest)) => explain::changes(cache, &manifest.material, &material, |input| {
                    stage.node.inputs.get(input).cloned().unwrap_or_else(|| input.to_owned())
                }),
                Ok(None) | Err(_) => "no earlier artifact".to_owned(),
            },
        },
    };
    State::ToRun { material, reason, lost }
}

/// The error of a stage that must not run here and is not there.
pub(crate) fn left_out(workspace: &Workspace, stage: &str, state: &State) -> Error {
    let why = match state {
        State::ToRun { reason, .. } => reason.clone(),
        State::Waits { on } => format!("waits for {}", on.join(", ")),
        State::Cached { .. } => "cached".to_owned(),
    };
    Error::usage(
        format!("the stage `{stage}` is not cached ({why}), is needed, and is left out by the command line"),
        format!("`pipeline run {} --until {stage}` makes it", workspace.recipe.path.display()),
    )
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
        } else if !selection.run.contains(name) {
            return Err(left_out(workspace, name, &state));
        }
        states.push(state);
    }
    Ok(states)
}

/// `pipeline plan`.
pub(crate) fn print(workspace: &Workspace, selection: &Selection, json: bool) -> Result<()> {
    let stages = workspace.prepare(&selection.all, &selection.implied)?;
    let states = states(workspace, selection, &stages)?;
    let mut out = String::new();
    let width = stages.iter().map(|stage| stage.node.name.len()).max().unwrap_or(0);
    let (mut to_run, mut list) = (0, Vec::new());
    for (stage, state) in stages.iter().zip(&states) {
        let name = &stage.node.name;
        let (word, reason, key) = match state {
            State::Cached { artifact } => {
                let rows = artifact.manifest.ledger.get("out").and_then(serde_json::Value::as_u64).unwrap_or(0);
                let text = format!("{rows} rows, {}", clock::size(artifact.manifest.bytes()));
                ("cached", text, Some(artifact.manifest.key))
            }
            State::ToRun { material, reason, .. } => ("to run", reason.clone(), Some(material.key())),
            State::Waits { on } => ("waits", format!("for {}", on.join(", ")), None),
        };
        to_run += usize::from(word != "cached");
        if json {
            list.push(json!({
                "stage": name, "state": word.replace(' ', "_"), "reason": reason, "key": key, "device": stage.device,
                "notes": stage.checked.notes,
            }));
        } else {
            let _ = writeln!(out, "{name:width$}  {word:6}  {reason}");
            for note in &stage.checked.notes {
                let _ = writeln!(out, "{:width$}          note: {note}", "");
            }
        }
    }
    if json {
        let plan = json!({
            "recipe": workspace.recipe.name, "overrides": workspace.recipe.overrides, "to_run": to_run, "stages": list,
        });
        out = format!("{plan}\n");
    } else {
        for text in &workspace.recipe.overrides {
            let _ = writeln!(out, "override: {text}");
        }
        if to_run == 0 {
            out.push_str("nothing to do\n");
        }
    }
    say(&mut std::io::stdout(), &out);
    Ok(())
}

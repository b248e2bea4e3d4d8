//! Why a stage must run: what changed between two keys' materials, in sentences, each with its place in the recipe.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use store::{Cache, Digest, Entry, Material};

use crate::workspace::{Prepared, Workspace};

/// At most this many changes are named in one sentence; the rest is counted.
const NAMED: usize = 3;

/// One difference between an earlier result and the one that is asked for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Change {
    /// The sentence.
    pub(crate) what: String,
    /// File and line of the value, if it was written.
    pub(crate) place: Option<String>,
    /// Parameter, `.`-separated, if it is one.
    pub(crate) parameter: Option<String>,
    /// Value before, if it is a parameter.
    pub(crate) old: Option<Value>,
    /// Value now.
    pub(crate) new: Option<Value>,
    /// Files of a source: changed, new or gone.
    pub(crate) files: Vec<String>,
    /// Stage whose result changed, if it is an input.
    pub(crate) input: Option<String>,
}

impl Change {
    fn of(what: String) -> Self {
        Self { what, place: None, parameter: None, old: None, new: None, files: Vec::new(), input: None }
    }

    /// The sentence with its place.
    pub(crate) fn told(&self) -> String {
        match &self.place {
            Some(place) => format!("{} ({place})", self.what),
            None => self.what.clone(),
        }
    }
}

/// The first few changes in one sentence.
pub(crate) fn sentence(changes: &[Change]) -> String {
    let mut told: Vec<String> = changes.iter().take(NAMED).map(Change::told).collect();
    if changes.len() > NAMED {
        told.push(format!("{} more", changes.len() - NAMED));
    }
    told.join(", ")
}

/// All that differs between an earlier result of a stage and the one that is asked for.
pub(crate) fn changes(workspace: &Workspace, stage: &Prepared, old: &Material, new: &Material) -> Vec<Change> {
    let mut changes = Vec::new();
    if old.schema != new.schema {
        changes.push(Change::of(format!("the format of keys changed {} → {}", old.schema, new.schema)));
    }
    if old.version != new.version {
        changes.push(Change::of(format!("the stage's own version changed {} → {}", old.version, new.version)));
    }
    parameters("", &old.parameters, &new.parameters, &mut |path, old, new| {
        let change = Change::of(format!("parameter `{path}` changed {} → {}", told(old), told(new)));
        let values = (Some(old.clone()), Some(new.clone()));
        let place = place(workspace, stage, path);
        changes.push(Change { place, parameter: Some(path.to_owned()), old: values.0, new: values.1, ..change });
    });
    for (name, digest) in &new.sources {
        let place = || place(workspace, stage, name);
        match old.sources.get(name) {
            None => changes.push(Change { place: place(), ..Change::of(format!("source `{name}` is new")) }),
            Some(before) if before != digest => {
                let files = files(&workspace.cache, before, digest);
                let told = if files.is_empty() { String::new() } else { format!(": {}", listed(&files)) };
                changes.push(Change { files, ..Change::of(format!("source `{name}` changed{told}")) });
            }
            Some(_) => {}
        }
    }
    let gone = old.sources.keys().filter(|name| !new.sources.contains_key(*name));
    changes.extend(gone.map(|name| Change::of(format!("source `{name}` is gone"))));
    let from = |input: &str| stage.node.inputs.get(input).cloned().unwrap_or_else(|| input.to_owned());
    for (name, digest) in &new.inputs {
        if old.inputs.get(name) != Some(digest) {
            let from = from(name);
            changes.push(Change { input: Some(from.clone()), ..Change::of(format!("input `{from}` changed")) });
        }
    }
    let gone = old.inputs.keys().filter(|name| !new.inputs.contains_key(*name));
    changes.extend(gone.map(|name| Change::of(format!("input `{name}` is gone"))));
    changes.dedup();
    changes
}

/// Where a parameter was written: in the recipe, or in a file that it names. A stage may group its parameters in the key:
/// `pictures.dtype` is `dtype` in the recipe.
fn place(workspace: &Workspace, stage: &Prepared, path: &str) -> Option<String> {
    let recipe = &workspace.recipe;
    let in_recipe = |path: &str| {
        let (file, line) = recipe.written(&workspace.graph, &stage.node.name, path)?;
        Some(if file == "--set" { file } else { format!("{file}:{line}") })
    };
    let in_file = |path: &str| {
        let (file, line) = stage.checked.written.iter().find_map(|(file, lines)| Some((file, lines.get(path)?)))?;
        let shown = match (file.strip_prefix(&recipe.base_dir), recipe.path.parent()) {
            (Ok(below), Some(folder)) => folder.join(below),
            _ => file.clone(),
        };
        Some(format!("{}:{line}", shown.display()))
    };
    let mut around = std::iter::successors(Some(path), |path| Some(path.rsplit_once('.')?.0));
    let mut ends = std::iter::successors(Some(path), |path| Some(path.split_once('.')?.1));
    in_recipe(path).or_else(|| around.find_map(in_file)).or_else(|| ends.find_map(in_recipe))
}

fn parameters(path: &str, old: &Value, new: &Value, changed: &mut impl FnMut(&str, &Value, &Value)) {
    match (old, new) {
        (Value::Object(a), Value::Object(b)) => {
            let mut names: Vec<&String> = a.keys().chain(b.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let absent = &Value::Null;
                parameters(&path, a.get(name).unwrap_or(absent), b.get(name).unwrap_or(absent), changed);
            }
        }
        _ if old == new => {}
        _ => changed(path, old, new),
    }
}

fn told(value: &Value) -> String {
    let text = match value {
        Value::Null => "unset".to_owned(),
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    };
    if text.chars().count() > 60 { format!("{}…", text.chars().take(57).collect::<String>()) } else { text }
}

fn listed(files: &[String]) -> String {
    let more = files.len().saturating_sub(NAMED);
    let text = files[..files.len() - more].join(", ");
    if more > 0 { format!("{text} and {more} more") } else { text }
}

/// Which files of a source changed, as far as both lists are remembered.
fn files(cache: &Cache, old: &Digest, new: &Digest) -> Vec<String> {
    let by_path = |entries: Vec<Entry>| -> BTreeMap<String, String> {
        entries.into_iter().map(|entry| (entry.path, entry.digest)).collect()
    };
    let (Some(old), Some(new)) = (cache.entries_of(old), cache.entries_of(new)) else { return Vec::new() };
    let (old, new) = (by_path(old), by_path(new));
    let mut named: Vec<String> = new
        .iter()
        .filter_map(|(path, digest)| match old.get(path) {
            None => Some(format!("{path} (new)")),
            Some(before) if before != digest => Some(path.clone()),
            Some(_) => None,
        })
        .collect();
    named.extend(old.keys().filter(|path| !new.contains_key(*path)).map(|path| format!("{path} (gone)")));
    named.sort();
    named
}

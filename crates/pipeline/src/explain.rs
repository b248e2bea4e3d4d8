//! Why a stage must run, in one sentence: what changed between two keys' materials.

use std::collections::BTreeMap;

use serde_json::Value;
use store::{Cache, Entry, Material};

/// At most this many changes are named; the rest is counted.
const NAMED: usize = 3;

/// What differs between an earlier result and the one that is asked for. `made_by` names an input's stage.
pub(crate) fn changes(cache: &Cache, old: &Material, new: &Material, made_by: impl Fn(&str) -> String) -> String {
    let mut changes = Vec::new();
    if old.schema != new.schema {
        changes.push(format!("the format of keys changed {} → {}", old.schema, new.schema));
    }
    if old.version != new.version {
        changes.push(format!("the stage's own version changed {} → {}", old.version, new.version));
    }
    parameters("", &old.parameters, &new.parameters, &mut changes);
    for (name, digest) in &new.sources {
        match old.sources.get(name) {
            None => changes.push(format!("source `{name}` is new")),
            Some(before) if before != digest => {
                changes.push(match files(cache, before, digest) {
                    Some(files) => format!("source `{name}` changed: {files}"),
                    None => format!("source `{name}` changed"),
                });
            }
            Some(_) => {}
        }
    }
    changes
        .extend(old.sources.keys().filter(|n| !new.sources.contains_key(*n)).map(|n| format!("source `{n}` is gone")));
    for (name, digest) in &new.inputs {
        if old.inputs.get(name) != Some(digest) {
            changes.push(format!("input `{}` changed", made_by(name)));
        }
    }
    changes.extend(old.inputs.keys().filter(|n| !new.inputs.contains_key(*n)).map(|n| format!("input `{n}` is gone")));
    changes.dedup();
    let more = changes.len().saturating_sub(NAMED);
    changes.truncate(NAMED);
    if more > 0 {
        changes.push(format!("{more} more"));
    }
    changes.join(", ")
}

fn parameters(path: &str, old: &Value, new: &Value, changes: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(a), Value::Object(b)) => {
            let mut names: Vec<&String> = a.keys().chain(b.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let absent = &Value::Null;
                parameters(&path, a.get(name).unwrap_or(absent), b.get(name).unwrap_or(absent), changes);
            }
        }
        _ if old == new => {}
        _ => changes.push(format!("parameter `{path}` changed {} → {}", told(old), told(new))),
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

/// Which files of a source changed.
fn files(cache: &Cache, old: &store::Digest, new: &store::Digest) -> Option<String> {
    let by_path = |entries: Vec<Entry>| -> BTreeMap<String, String> {
        entries.into_iter().map(|entry| (entry.path, entry.digest)).collect()
    };
    let (old, new) = (by_path(cache.entries_of(old)?), by_path(cache.entries_of(new)?));
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
    let more = named.len().saturating_sub(NAMED);
    named.truncate(NAMED);
    let text = named.join(", ");
    Some(if more > 0 { format!("{text} and {more} more") } else { text })
}

//! Where the keys of a training recipe come from: a YAML file, and the recipe's table laid over it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use spec::Problem;

/// Our own copy of the peer's published settings for FLUX.1: what holds when no file is named.
const DEFAULT: &str = include_str!("../../../../recipes/flux_t2i_flow.yaml");

/// Keys of the schema that Automodel used until mid 2026, and what they are called now.
const RENAMED: [(&[&str], &[&str]); 3] = [
    (&["optim", "learning_rate"], &["optimizer", "lr"]),
    (&["optim", "clip_grad"], &["clip_grad_norm", "max_norm"]),
    (&["step_scheduler", "log_every"], &["step_scheduler", "log_remote_every_steps"]),
];

/// Finds the place of a value for a message.
pub(crate) struct Origin {
    file: Option<PathBuf>,
    lines: BTreeMap<String, usize>,
    table: Value,
}

impl Origin {
    /// Adds to `problem` the field of the recipe, or the file and line, that the value at `path` was written in.
    pub(crate) fn place(&self, path: &str, problem: Problem) -> Problem {
        match &self.file {
            Some(file) if !self.in_table(path) => problem.at(file, self.line(path)),
            _ => problem.field(path),
        }
    }

    /// The file, if one was named, with the line of each of its keys by dotted path.
    pub(crate) fn written(&self) -> Option<(PathBuf, BTreeMap<String, usize>)> {
        Some((self.file.clone()?, self.lines.clone()))
    }

    /// Whether the value at `path` is the user's own, not one of our defaults.
    pub(crate) fn is_written(&self, path: &str) -> bool {
        self.file.is_some() || self.in_table(path)
    }

    fn in_table(&self, path: &str) -> bool {
        path.split('.').try_fold(&self.table, |value, key| value.get(key)).is_some()
    }

    /// Line of the value, or of the nearest block around it.
    fn line(&self, mut path: &str) -> Option<usize> {
        loop {
            if let Some(line) = self.lines.get(path) {
                return Some(*line);
            }
            path = path.rsplit_once('.')?.0;
        }
    }
}

/// A training recipe as one tree.
pub(crate) struct Merged {
    pub(crate) values: Map<String, Value>,
    pub(crate) origin: Origin,
    pub(crate) notes: Vec<String>,
}

/// Lays `table` (the recipe's `[train]`, without `config`) over the YAML file `config`, relative to `base_dir`.
pub(crate) fn merge(config: Option<&str>, table: Map<String, Value>, base_dir: &Path) -> Result<Merged, Problem> {
    let (file, text) = match config {
        None => (None, DEFAULT.to_owned()),
        Some(name) => {
            let path = base_dir.join(name);
            let text = fs_err::read_to_string(&path).map_err(|error| unreadable(&path, name, &error))?;
            (Some(path), text)
        }
    };
    let mut notes = Vec::new();
    let mut values = migrated(parse(file.as_deref(), &text)?, &mut notes);
    let table = migrated(table, &mut notes);
    // Blocks of which there is one at most: that of the table stands in for that of the file.
    for (block, other) in [("fsdp", "ddp"), ("ddp", "fsdp")] {
        if table.contains_key(block) && !table.contains_key(other) {
            values.remove(other);
        }
    }
    overlay(&mut values, &table);
    let lines = key_lines(&text);
    Ok(Merged { values, origin: Origin { file, lines, table: Value::Object(table) }, notes })
}

fn unreadable(path: &Path, name: &str, error: &std::io::Error) -> Problem {
    let problem = Problem::new(format!("cannot read the training recipe `{}`: {}", path.display(), kind(error)));
    let folder = path.parent().unwrap_or(Path::new("."));
    let names: Vec<String> = fs_err::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|file| Path::new(file).extension().is_some_and(|ext| ext == "yaml" || ext == "yml"))
        .collect();
    let problem = problem.field("config");
    match spec::suggest::nearest(name, names.iter().map(String::as_str)) {
        Some(near) => problem.help(format!("did you mean `{near}`?")),
        None => problem.help("`config` is a path relative to the folder of the recipe"),
    }
}

fn kind(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file".to_owned(),
        std::io::ErrorKind::InvalidData => "it is not UTF-8 text".to_owned(),
        kind => kind.to_string(),
    }
}

fn parse(file: Option<&Path>, text: &str) -> Result<Map<String, Value>, Problem> {
    let place = |problem: Problem, line| match file {
        Some(file) => problem.at(file, line),
        None => problem,
    };
    let value: serde_yaml::Value = serde_yaml::from_str(text).map_err(|error| {
        let line = error.location().map(|location| location.line());
        place(Problem::new(format!("the training recipe is not valid YAML: {error}")), line)
    })?;
    match to_json(value) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(Value::Null) => Ok(Map::new()),
        Ok(_) => Err(place(Problem::new("the training recipe is not a mapping of keys to values"), Some(1))),
        Err(detail) => Err(place(Problem::new(format!("the training recipe cannot be used: {detail}")), None)),
    }
}

fn to_json(value: serde_yaml::Value) -> Result<Value, String> {
    use serde_yaml::Value as Yaml;
    Ok(match value {
        Yaml::Null => Value::Null,
        Yaml::Bool(flag) => flag.into(),
        Yaml::String(text) => text.into(),
        Yaml::Number(n) => match (n.as_u64(), n.as_i64(), n.as_f64()) {
            (Some(n), _, _) => n.into(),
            (_, Some(n), _) => n.into(),
            (_, _, Some(x)) if x.is_finite() => x.into(),
            _ => return Err(format!("the number `{n}` is not finite")),
        },
        Yaml::Sequence(items) => items.into_iter().map(to_json).collect::<Result<_, _>>()?,
        Yaml::Mapping(map) => {
            let mut object = Map::new();
            for (key, value) in map {
                let Yaml::String(key) = key else { return Err(format!("the key `{key:?}` is not a text")) };
                object.insert(key, to_json(value)?);
            }
            Value::Object(object)
        }
        Yaml::Tagged(tagged) => return Err(format!("the tag `{}` is not supported", tagged.tag)),
    })
}

/// Moves keys of the old schema to where they are now.
fn migrated(mut map: Map<String, Value>, notes: &mut Vec<String>) -> Map<String, Value> {
    for (old, new) in RENAMED {
        if let Some(value) = map.get_mut(old[0]).and_then(Value::as_object_mut).and_then(|block| block.remove(old[1])) {
            notes.push(format!("{}: old name, read as `{}`", old.join("."), new.join(".")));
            nested(&mut map, new[0]).entry(new[1]).or_insert(value);
        }
    }
    let Some(Value::Object(optim)) = map.get_mut("optim") else { return map };
    let mut optim = std::mem::take(optim);
    map.remove("optim");
    if let Some(Value::Object(options)) = optim.remove("optimizer") {
        notes.push("optim.optimizer: old name, read as `optimizer`".to_owned());
        let optimizer = nested(&mut map, "optimizer");
        for (key, value) in options {
            optimizer.entry(key).or_insert(value);
        }
    }
    if !optim.is_empty() {
        map.insert("optim".to_owned(), Value::Object(optim));
    }
    map
}

fn nested<'m>(map: &'m mut Map<String, Value>, key: &str) -> &'m mut Map<String, Value> {
    let value = map.entry(key).or_insert_with(|| Value::Object(Map::new()));
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(object) => object,
        _ => unreachable!("made an object above"),
    }
}

/// Tables merge key by key; anything else replaces.
fn overlay(under: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (key, value) in over {
        match (under.get_mut(key), value) {
            (Some(Value::Object(under)), Value::Object(over)) => overlay(under, over),
            _ => {
                under.insert(key.clone(), value.clone());
            }
        }
    }
}

/// Line (from 1) of each key of the block mappings in `text`, by dotted path.
fn key_lines(text: &str) -> BTreeMap<String, usize> {
    let mut lines = BTreeMap::new();
    let mut open: Vec<(usize, String)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let body = line.trim_start();
        let Some((key, _)) = body.split_once(':') else { continue };
        if body.starts_with(['#', '-']) {
            continue;
        }
        let key = key.trim().trim_matches(['"', '\'']);
        let indent = line.len() - body.len();
        while open.last().is_some_and(|(outer, _)| *outer >= indent) {
            open.pop();
        }
        let path = open.iter().map(|(_, key)| key.as_str()).chain([key]).collect::<Vec<_>>().join(".");
        lines.entry(path).or_insert(index + 1);
        open.push((indent, key.to_owned()));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_line() {
        let lines = key_lines("# a: comment\nmodel:\n  mode: x\n\n  inner:\n    deep: 1\nseed: 3\n");
        let found: Vec<_> = ["model.mode", "model.inner.deep", "seed"].map(|path| lines[path]).into();
        assert_eq!(found, [3, 6, 7]);
    }

    #[test]
    fn the_table_overrides_key_by_key() {
        let json = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap();
        let mut under = json(r#"{"a": {"x": 1, "y": 2}, "b": [1, 2]}"#);
        overlay(&mut under, &json(r#"{"a": {"y": 3}, "b": [4]}"#));
        assert_eq!(under, json(r#"{"a": {"x": 1, "y": 3}, "b": [4]}"#));
    }
}

//! The recipe: one complete run, as a user wrote it. Knows no stage's parameters, only their tables and their places.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::mistake::{Mistake, Mistakes, Origin};
use crate::text::{Place, Places, parse_document, parse_value};
use crate::{Bound, Graph, Problem, suggest};

/// Keys beside the stages' tables.
const TOP_LEVEL: &[&str] = &["name", "device", "threads", "bench"];

/// A parsed recipe with `--set` overrides applied.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// File it was read from, as the user named it.
    pub path: PathBuf,
    /// Its folder, absolute; relative paths in the recipe start here.
    pub base_dir: PathBuf,
    /// Names the run's folders.
    pub name: String,
    /// `cpu`, `cuda` or `cuda:N` for every stage that does not name its own.
    pub device: Option<String>,
    /// CPU threads for every stage that does not name its own.
    pub threads: Option<u64>,
    /// Stage → its table.
    pub stages: BTreeMap<String, Map<String, Value>>,
    /// What a run must reach, by name: the `[bench.NAME]` tables. No stage sees them.
    pub bounds: BTreeMap<String, Bound>,
    /// The `--set` arguments, as written.
    pub overrides: Vec<String>,
    places: Places,
    origin: Origin,
}

impl Recipe {
    /// Reads a recipe file and applies overrides of the form `a.b.c=value`.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Self, Mistakes> {
        let text = fs_err::read(path).map_err(|error| {
            Mistake::new(format!("cannot read the recipe `{}`: {}", path.display(), cause(&error)))
                .help("name a recipe file, such as `recipes/tarot.toml`")
        })?;
        let text = String::from_utf8(text).map_err(|error| {
            let good = error.utf8_error().valid_up_to();
            let line = error.as_bytes()[..good].split(|byte| *byte == b'\n').count();
            Mistake::new(format!("the recipe `{}` is not UTF-8: line {line} has an invalid byte", path.display()))
                .help("save the file as UTF-8")
        })?;
        let base_dir = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let base_dir = fs_err::canonicalize(base_dir).map_err(|error| Mistake::new(error.to_string()))?;
        Self::parse(path, &base_dir, text.strip_prefix('\u{feff}').unwrap_or(&text), overrides)
    }

    /// Parses a recipe's text.
    pub fn parse(path: &Path, base_dir: &Path, text: &str, overrides: &[String]) -> Result<Self, Mistakes> {
        let origin = Origin::new(path.display().to_string(), text);
        let (mut root, mut places) = parse_document(&origin).map_err(Mistakes)?;
        let mut mistakes = Vec::new();
        for text in overrides {
            if let Err(mut found) = apply(text, &mut root, &mut places) {
                mistakes.append(&mut found);
            }
        }
        let mut recipe = Self {
            path: path.to_owned(),
            base_dir: base_dir.to_owned(),
            name: String::new(),
            device: None,
            threads: None,
            stages: BTreeMap::new(),
            bounds: BTreeMap::new(),
            overrides: overrides.to_vec(),
            places,
            origin,
        };
        mistakes.append(&mut recipe.take_top_level(root));
        if mistakes.is_empty() { Ok(recipe) } else { Err(Mistakes(mistakes)) }
    }

    fn take_top_level(&mut self, root: Map<String, Value>) -> Vec<Mistake> {
        let mut mistakes = Vec::new();
        let stem = self.path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let mut name = stem;
        for (key, value) in root {
            match (key.as_str(), value) {
                ("name", Value::String(text)) => name = text,
                ("device", Value::String(text)) => self.device = Some(text),
                ("threads", Value::Number(number)) if number.as_u64().is_some_and(|n| n > 0) => {
                    self.threads = number.as_u64();
                }
                ("name" | "device", _) => {
                    mistakes.push(self.place(Mistake::new(format!("`{key}` must be a string")), &key, "not a string"));
                }
                ("threads", _) => {
                    let mistake = Mistake::new("`threads` must be an integer > 0".to_owned());
                    mistakes.push(self.place(mistake, &key, "not a number of threads"));
                }
                ("bench", Value::Object(tables)) => {
                    for (name, table) in tables {
                        match Bound::read(&table) {
                            Ok(bound) => drop(self.bounds.insert(name, bound)),
                            Err(problem) => {
                                let mistake = Mistake::new(format!("`bench.{name}`: {}", problem.message))
                                    .help(problem.help.unwrap_or_default());
                                mistakes.push(self.place(mistake, &format!("bench.{name}"), "here"));
                            }
                        }
                    }
                }
                (_, Value::Object(table)) => {
                    self.stages.insert(key, table);
                }
                (_, _) => {
                    let mistake = Mistake::new(format!("unknown key `{key}` at the top of the recipe")).help(
                        match suggest::nearest(&key, TOP_LEVEL.iter().copied()) {
                            Some(near) => format!("did you mean `{near}`?"),
                            None => "parameters belong into a stage's table, such as `[train]`".to_owned(),
                        },
                    );
                    mistakes.push(self.place(mistake, &key, "not known here"));
                }
            }
        }
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.starts_with('.') || !name.chars().all(fits) {
            let mistake = Mistake::new(format!("the recipe's name `{name}` cannot be the name of a folder"))
                .help("use letters, digits, `-`, `_` and `.`, in `name = \"...\"`");
            mistakes.push(self.place(mistake, "name", "names the folders of the runs"));
        }
        self.name = name;
        mistakes
    }

    /// Refuses tables of stages that the graph does not have.
    pub fn check_stages(&self, graph: &Graph) -> Result<(), Mistakes> {
        let mistakes: Vec<Mistake> = self
            .stages
            .keys()
            .filter(|name| graph.node(name).is_none())
            .map(|name| {
                let mistake = Mistake::new(format!("unknown stage `{name}`"))
                    .help(suggest::help(name, graph.nodes().map(|node| node.name.as_str())));
                self.place(mistake, name, &format!("no such stage in `{}`", graph.origin_name()))
            })
            .collect();
        if mistakes.is_empty() { Ok(()) } else { Err(Mistakes(mistakes)) }
    }

    /// A stage's table with what the graph wires from other stages' tables filled in.
    pub fn table(&self, graph: &Graph, stage: &str) -> Map<String, Value> {
        let mut table = self.stages.get(stage).cloned().unwrap_or_default();
        for (parameter, path) in graph.node(stage).into_iter().flat_map(|node| &node.defaults) {
            if let (false, Some(value)) = (table.contains_key(parameter), self.value(path)) {
                table.insert(parameter.clone(), value.clone());
            }
        }
        table
    }

    /// The value at `stage.parameter…`.
    fn value(&self, path: &str) -> Option<&Value> {
        let mut parts = path.split('.');
        let table = self.stages.get(parts.next()?)?;
        let first = table.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part))
    }

    /// Gives a stage's problem its place: in the recipe, in a `--set` argument, or in the file it names.
    pub fn locate(&self, graph: &Graph, stage: &str, problem: &Problem) -> Mistake {
        if let Some(file) = &problem.file {
            return Mistake::in_file(problem, file);
        }
        let mut mistake = Mistake::new(problem.message.clone());
        mistake.help.clone_from(&problem.help);
        let Some(field) = &problem.field else {
            return self.place(mistake, stage, "in this stage");
        };
        let top = field.split(['.', '[']).next().unwrap_or(field);
        let wired = graph.node(stage).and_then(|node| node.defaults.get(top));
        let own = self.stages.get(stage).is_some_and(|table| table.contains_key(top));
        match wired {
            Some(path) if !own && self.places.contains_key(path) => self.place(
                mistake,
                &format!("{path}{}", &field[top.len()..]),
                &format!("taken from here for `{stage}`"),
            ),
            _ => self.place(mistake, &format!("{stage}.{field}"), if own { "here" } else { "in this stage" }),
        }
    }

    /// File and line where a stage's parameter was written: in its table, where the graph wires it from, or in a `--set`.
    pub fn written(&self, graph: &Graph, stage: &str, field: &str) -> Option<(String, usize)> {
        let top = field.split(['.', '[']).next().unwrap_or(field);
        let wired = graph.node(stage).and_then(|node| node.defaults.get(top));
        let own = self.places.get(&format!("{stage}.{field}"));
        let place = own.or_else(|| self.places.get(&format!("{}{}", wired?, &field[top.len()..])))?;
        let mistake = Mistake::new("").at(&place.origin, place.value.clone(), "");
        mistake.line().map(|(file, line)| (file.to_owned(), line))
    }

    /// Puts the mistake at `path`, or at the nearest table or list around it that was written.
    fn place(&self, mut mistake: Mistake, path: &str, label: &str) -> Mistake {
        let mut path = path;
        loop {
            if let Some(Place { origin, key, value }) = self.places.get(path) {
                let is_set = origin.name == "--set";
                let names_the_key = mistake.message.starts_with("unknown ");
                let header = self.origin.text.get(value.clone()).is_some_and(|text| text.starts_with('[')) && !is_set;
                let span = if names_the_key || (header && value.len() > key.len() + 64) { key } else { value };
                if is_set && mistake.help.is_none() {
                    mistake = mistake.help("the value comes from the command line");
                }
                return mistake.at(origin, span.clone(), label);
            }
            match path.rfind(['.', '[']) {
                Some(end) => path = &path[..end],
                None => return mistake,
            }
        }
    }
}

/// Applies one `a.b.c=value`.
fn apply(text: &str, root: &mut Map<String, Value>, places: &mut Places) -> Result<(), Vec<Mistake>> {
    let origin = Origin::new("--set", text);
    let usage = "write `--set stage.key=value`, such as `--set train.step_scheduler.max_steps=20`";
    let Some((key, _)) = text.split_once('=') else {
        return Err(vec![Mistake::new(format!("`--set {text}` has no `=`")).help(usage)]);
    };
    let parts: Vec<&str> = key.split('.').map(|part| part.trim().trim_matches('"')).collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(vec![Mistake::new(format!("`--set {text}` has an empty key")).help(usage)]);
    }
    let path = parts.join(".");
    let (value, found) = parse_value(&origin, key.len() + 1, 0..key.len(), &path)?;

    let mut table = root;
    for (depth, part) in parts[..parts.len() - 1].iter().enumerate() {
        let here = parts[..=depth].join(".");
        places.entry(here.clone()).or_insert_with(|| Place {
            origin: origin.clone(),
            key: 0..key.len(),
            value: 0..key.len(),
        });
        let next = table.entry((*part).to_owned()).or_insert_with(|| Value::Object(Map::new()));
        let Value::Object(next) = next else {
            let mistake = Mistake::new(format!("`{here}` is a value, not a table, in the recipe"));
            return Err(vec![mistake.at(&origin, 0..key.len(), "cannot be set inside it")]);
        };
        table = next;
    }
    table.insert(parts[parts.len() - 1].to_owned(), value);
    let inside =
        |other: &str| other.strip_prefix(&path).is_some_and(|rest| rest.starts_with(['.', '[']) || rest.is_empty());
    places.retain(|other, _| !inside(other));
    places.extend(found);
    Ok(())
}

/// The bare reason of a failed file operation, without the path that `fs_err` adds.
fn cause(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file".to_owned(),
        std::io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        std::io::ErrorKind::IsADirectory => "it is a folder".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GRAPH: &str =
        "[stage.encode]\n[stage.train]\ninputs = { captions = \"encode\" }\ndefaults = { model = \"encode.model\" }\n";
    const TEXT: &str =
        "name = \"t\"\n[encode]\nmodel = \"m\"\nsizes = [\n  1,\n  2,\n]\n[train.optimizer]\nlr = 1e-3\n";

    fn recipe(overrides: &[&str]) -> Result<Recipe, Mistakes> {
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        Recipe::parse(Path::new("t.toml"), Path::new("/base"), TEXT, &overrides)
    }

    fn graph() -> Graph {
        Graph::parse(None, GRAPH).unwrap()
    }

    fn line(recipe: &Recipe, stage: &str, field: &str, message: &str) -> String {
        let mistake = recipe.locate(&graph(), stage, &Problem::new(message).field(field));
        mistake.line().map_or_else(|| "nowhere".to_owned(), |(file, line)| format!("{file}:{line}"))
    }

    #[test]
    fn overrides_are_typed_like_the_file_and_may_make_keys() {
        let recipe = recipe(&[
            "train.optimizer.lr=3",
            "train.optimizer.betas=[0.9, 0.99]",
            "train.seed=7",
            "encode.model=black-forest-labs/FLUX.1-dev",
            "encode.flag=true",
            "encode.text=\"a = b\"",
            "generate.prompts=['x', \"y\"]",
            "device=cuda:1",
        ])
        .unwrap();
        assert_eq!(json!(recipe.stages["train"]), json!({"optimizer": {"lr": 3, "betas": [0.9, 0.99]}, "seed": 7}));
        assert_eq!(recipe.stages["encode"]["model"], "black-forest-labs/FLUX.1-dev");
        assert_eq!(
            (recipe.stages["encode"]["flag"].clone(), recipe.stages["encode"]["text"].clone()),
            (json!(true), json!("a = b"))
        );
        assert_eq!(recipe.stages["generate"]["prompts"], json!(["x", "y"]));
        assert_eq!(recipe.device.as_deref(), Some("cuda:1"));
    }

    #[test]
    fn overrides_that_cannot_be_meant_are_refused() {
        for (text, part) in [
            ("train.seed", "has no `=`"),
            ("train..seed=1", "empty key"),
            ("encode.model.x=1", "`encode.model` is a value, not a table"),
            ("train.optimizer.lr=nan", "not a finite number"),
            ("train.seed=99999999999999999999", "does not fit into 64 bits"),
        ] {
            let mistakes = recipe(&[text]).unwrap_err().to_string();
            assert!(mistakes.contains(part), "{text}: {mistakes}");
        }
    }

    #[test]
    fn problems_get_the_line_that_was_written() {
        let plain = recipe(&[]).unwrap();
        assert_eq!(line(&plain, "encode", "model", "x"), "t.toml:3");
        assert_eq!(line(&plain, "encode", "sizes[1]", "x"), "t.toml:6");
        assert_eq!(line(&plain, "train", "optimizer.lr", "x"), "t.toml:9");
        assert_eq!(line(&plain, "train", "optimizer.absent", "x"), "t.toml:8", "the table around it");
        assert_eq!(line(&plain, "train", "model", "x"), "t.toml:3", "wired from `encode.model`");
        let set = recipe(&["train.model=other", "train.optimizer.lr=3"]).unwrap();
        assert_eq!(line(&set, "train", "model", "x"), "--set:1");
        assert_eq!(line(&set, "train", "optimizer.lr", "x"), "--set:1");
        assert_eq!(line(&set, "encode", "model", "x"), "t.toml:3");
    }

    #[test]
    fn a_wired_value_is_only_a_default() {
        assert_eq!(recipe(&[]).unwrap().table(&graph(), "train")["model"], "m");
        assert_eq!(recipe(&["train.model=own"]).unwrap().table(&graph(), "train")["model"], "own");
    }

    #[test]
    fn the_top_of_a_recipe_knows_its_keys() {
        let parse = |text: &str| Recipe::parse(Path::new("t.toml"), Path::new("/"), text, &[]);
        for (text, part) in [
            ("nmae = \"x\"", "unknown key `nmae`"),
            ("name = 3", "`name` must be a string"),
            ("name = \"../x\"", "cannot be the name of a folder"),
            ("threads = 0", "`threads` must be an integer > 0"),
            ("[bench]\nx = 1", "`bench.x`: not a bound"),
            ("[bench.x]\nquery = \"select 1\"", "`bench.x`: this bound holds for every number"),
            ("bench = 1", "unknown key `bench`"),
            ("a = [", "not valid TOML"),
            ("[a]\nx = 1\nx = 2", "duplicate key"),
        ] {
            let mistakes = parse(text).unwrap_err().to_string();
            assert!(mistakes.contains(part), "{text}: {mistakes}");
        }
        assert_eq!(parse("[encode]").unwrap().name, "t", "the file's name is the default");
    }
}

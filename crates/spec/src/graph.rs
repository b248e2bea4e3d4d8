//! The graph: which stages there are, which program runs each, and what flows along the edges. Says nothing about models.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::mistake::{Mistake, Mistakes, Origin};
use crate::suggest;
use crate::text::{Places, parse_document};

/// Name of the graph's file.
pub const FILE_NAME: &str = "pipeline.toml";

/// One stage of the graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The verb.
    pub name: String,
    /// Program that runs it; `pipeline-<verb>` unless the graph says otherwise.
    pub program: String,
    /// Input name → stage that makes it.
    pub inputs: BTreeMap<String, String>,
    /// The same for inputs that are taken only from stages a recipe has; see [`Graph::restricted_to`].
    pub optional: BTreeMap<String, String>,
    /// CPU threads that it can use, if not all; a recipe and the command line may say otherwise.
    pub threads: Option<u64>,
    /// Parameter → `stage.parameter` it is taken from, unless this stage's table has its own.
    pub defaults: BTreeMap<String, String>,
}

impl Node {
    /// Every edge that leads here: (key of the graph's file, input, stage that makes it).
    fn edges(&self) -> impl Iterator<Item = (&'static str, &String, &String)> {
        let inputs = self.inputs.iter().map(|(input, from)| ("inputs", input, from));
        inputs.chain(self.optional.iter().map(|(input, from)| ("optional", input, from)))
    }
}

/// A checked graph: every edge leads to a stage, and there is no cycle.
#[derive(Debug, Clone)]
pub struct Graph {
    /// In an order in which they can run.
    nodes: Vec<Node>,
    /// File it was read from; `None` is the built-in one.
    pub path: Option<PathBuf>,
    places: Places,
    origin: Origin,
}

/// What a stage program says about its edges, for [`Graph::check_kinds`].
#[derive(Debug, Clone)]
pub struct Kinds {
    /// Input name → kind of artifact it takes.
    pub inputs: BTreeMap<String, String>,
    /// Inputs it can do without.
    pub optional: BTreeSet<String>,
    /// Kind of artifact it makes.
    pub output: String,
}

impl Graph {
    /// Finds `pipeline.toml` beside the recipe, above it, or in `current`; else takes `built_in`.
    pub fn find(base_dir: &Path, current: &Path, built_in: &str) -> Result<Self, Mistakes> {
        for folder in base_dir.ancestors().chain([current]) {
            let path = folder.join(FILE_NAME);
            if path.is_file() {
                let text = fs_err::read_to_string(&path)
                    .map_err(|error| Mistake::new(format!("cannot read the graph: {error}")))?;
                return Self::parse(Some(&path), &text);
            }
        }
        Self::parse(None, built_in)
    }

    /// Parses and checks a graph.
    pub fn parse(path: Option<&Path>, text: &str) -> Result<Self, Mistakes> {
        let name = path.map_or_else(|| format!("built-in {FILE_NAME}"), |path| path.display().to_string());
        let origin = Origin::new(name, text);
        let (root, places) = parse_document(&origin).map_err(Mistakes)?;
        let mut reader = Reader { places: &places, mistakes: Vec::new() };
        let mut nodes = reader.root(&Value::Object(root));
        // TOML tables are sorted by name; people read a graph in the order in which it was written.
        nodes.sort_by_key(|node| places.get(&format!("stage.{}", node.name)).map(|place| place.key.start));
        reader.edges(&nodes);
        if !reader.mistakes.is_empty() {
            return Err(Mistakes(reader.mistakes));
        }
        let nodes = sorted(nodes, &places)?;
        Ok(Self { nodes, path: path.map(Path::to_owned), places, origin })
    }

    /// The stages, in an order in which they can run.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> + Clone {
        self.nodes.iter()
    }

    /// The stage of that name.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// Name of the file, for messages.
    pub fn origin_name(&self) -> &str {
        &self.origin.name
    }

    /// The graph of a recipe: an optional input becomes an input if `has` its stage, and is not there otherwise.
    #[must_use]
    pub fn restricted_to(mut self, has: impl Fn(&str) -> bool) -> Self {
        for node in &mut self.nodes {
            let taken = node.optional.iter().filter(|(_, from)| has(from));
            node.inputs.extend(taken.map(|(input, from)| (input.clone(), from.clone())));
        }
        self
    }

    /// `stage` and everything it needs, directly or not.
    pub fn needed_by(&self, stage: &str) -> BTreeSet<String> {
        let mut needed = BTreeSet::new();
        let mut open = vec![stage.to_owned()];
        while let Some(name) = open.pop() {
            if needed.insert(name.clone()) {
                open.extend(self.node(&name).into_iter().flat_map(|node| node.inputs.values().cloned()));
            }
        }
        needed
    }

    /// Holds what the programs say of themselves against the edges of the stages in `described`.
    pub fn check_kinds(&self, described: &BTreeMap<String, Kinds>) -> Result<(), Mistakes> {
        let mut mistakes = Vec::new();
        let mut refuse = |path: &str, mistake: Mistake, label: &str| {
            mistakes.push(match self.places.get(path) {
                Some(place) => mistake.at(&self.origin, place.value.clone(), label),
                None => mistake,
            });
        };
        for node in &self.nodes {
            let Some(kinds) = described.get(&node.name) else { continue };
            for (input, from) in &node.inputs {
                let key = if node.optional.contains_key(input) { "optional" } else { "inputs" };
                let path = format!("stage.{}.{key}.{input}", node.name);
                match (kinds.inputs.get(input), described.get(from)) {
                    (None, _) => refuse(
                        &path,
                        Mistake::new(format!("`{}` has no input `{input}`", node.program))
                            .help(suggest::help(input, kinds.inputs.keys().map(String::as_str))),
                        "no such input",
                    ),
                    (Some(wanted), Some(made)) if *wanted != made.output => refuse(
                        &path,
                        Mistake::new(format!(
                            "`{}` takes `{wanted}` as `{input}`, but `{from}` makes `{}`",
                            node.name, made.output
                        ))
                        .help(format!("wire `{input}` to a stage that makes `{wanted}`")),
                        "the wrong kind of artifact",
                    ),
                    (Some(_), _) => {}
                }
            }
            let wired = |input: &str| node.inputs.contains_key(input) || kinds.optional.contains(input);
            for (input, kind) in kinds.inputs.iter().filter(|(input, _)| !wired(input)) {
                refuse(
                    &format!("stage.{}", node.name),
                    Mistake::new(format!(
                        "`{}` needs the input `{input}` ({kind}), which the graph does not wire",
                        node.name
                    ))
                    .help(format!("add `{input} = \"STAGE\"` to its `inputs`")),
                    "this stage",
                );
            }
        }
        if mistakes.is_empty() { Ok(()) } else { Err(Mistakes(mistakes)) }
    }
}

struct Reader<'a> {
    places: &'a Places,
    mistakes: Vec<Mistake>,
}

impl Reader<'_> {
    fn refuse(&mut self, path: &str, message: String, help: Option<String>, label: &str) {
        let mut mistake = Mistake::new(message);
        mistake.help = help;
        self.mistakes.push(match self.places.get(path) {
            Some(place) => mistake.at(&place.origin, place.value.clone(), label),
            None => mistake,
        });
    }

    fn root(&mut self, root: &Value) -> Vec<Node> {
        let known = ["stage"];
        let mut nodes = Vec::new();
        for (key, value) in root.as_object().into_iter().flatten() {
            match (key.as_str(), value.as_object()) {
                ("stage", Some(stages)) => {
                    nodes = stages.iter().map(|(name, table)| self.node(name, table)).collect();
                }
                ("stage", None) => self.refuse("stage", "`stage` must be a table of stages".to_owned(), None, "here"),
                _ => self.refuse(
                    key,
                    format!("unknown key `{key}` in the graph"),
                    Some(suggest::help(key, known)),
                    "here",
                ),
            }
        }
        if nodes.is_empty() && self.mistakes.is_empty() {
            self.refuse("", "the graph has no stages".to_owned(), Some("add `[stage.NAME]` tables".to_owned()), "");
        }
        nodes
    }

    fn node(&mut self, name: &str, table: &Value) -> Node {
        let at = format!("stage.{name}");
        let mut node = Node {
            name: name.to_owned(),
            program: format!("pipeline-{name}"),
            inputs: BTreeMap::new(),
            optional: BTreeMap::new(),
            threads: None,
            defaults: BTreeMap::new(),
        };
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if name.is_empty() || !name.chars().all(fits) {
            let help = Some("use letters, digits, `-` and `_`".to_owned());
            self.refuse(&at, format!("`{name}` cannot be the name of a stage"), help, "here");
        }
        let known = ["program", "inputs", "optional", "defaults", "threads"];
        match table.as_object() {
            None => self.refuse(&at, format!("`{at}` must be a table"), None, "not a table"),
            Some(table) => {
                for (key, value) in table {
                    let path = format!("{at}.{key}");
                    match (key.as_str(), value) {
                        ("program", Value::String(program)) if !program.is_empty() => node.program.clone_from(program),
                        ("program", _) => {
                            self.refuse(&path, format!("`{path}` must be the name of a program"), None, "here");
                        }
                        ("inputs", _) => node.inputs = self.names(&path, value),
                        ("optional", _) => node.optional = self.names(&path, value),
                        ("defaults", _) => node.defaults = self.names(&path, value),
                        ("threads", _) => match value.as_u64().filter(|threads| *threads > 0) {
                            Some(threads) => node.threads = Some(threads),
                            None => self.refuse(&path, format!("`{path}` must be an integer > 0"), None, "here"),
                        },
                        _ => self.refuse(
                            &path,
                            format!("unknown key `{key}` in `{at}`"),
                            Some(suggest::help(key, known)),
                            "here",
                        ),
                    }
                }
            }
        }
        node
    }

    fn names(&mut self, path: &str, value: &Value) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        let Some(table) = value.as_object() else {
            self.refuse(path, format!("`{path}` must be a table of names"), None, "not a table");
            return names;
        };
        for (key, value) in table {
            match value.as_str() {
                Some(name) => {
                    names.insert(key.clone(), name.to_owned());
                }
                None => self.refuse(&format!("{path}.{key}"), format!("`{path}.{key}` must be a string"), None, "here"),
            }
        }
        names
    }

    fn edges(&mut self, nodes: &[Node]) {
        let known: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
        for node in nodes {
            for (key, inputs) in [("inputs", &node.inputs), ("optional", &node.optional)] {
                for (input, from) in inputs.iter().filter(|(_, from)| !known.contains(&from.as_str())) {
                    let help = suggest::help(from, known.iter().copied());
                    let message =
                        format!("the input `{input}` of `{}` comes from `{from}`, which is no stage", node.name);
                    self.refuse(&format!("stage.{}.{key}.{input}", node.name), message, Some(help), "unknown stage");
                }
            }
            for (parameter, path) in &node.defaults {
                let at = format!("stage.{}.defaults.{parameter}", node.name);
                match path.split_once('.') {
                    Some((stage, rest)) if known.contains(&stage) && !rest.is_empty() => {}
                    Some((stage, _)) => {
                        let help = suggest::help(stage, known.iter().copied());
                        self.refuse(
                            &at,
                            format!("`{path}` names the stage `{stage}`, which there is not"),
                            Some(help),
                            "here",
                        );
                    }
                    None => {
                        let help = Some("write `stage.parameter`, such as `encode.model`".to_owned());
                        self.refuse(&at, format!("`{path}` does not name a stage's parameter"), help, "here");
                    }
                }
            }
        }
    }
}

/// Stable topological order: among stages that can run, the one written first.
fn sorted(nodes: Vec<Node>, places: &Places) -> Result<Vec<Node>, Mistakes> {
    let mut waiting = nodes;
    let mut order: Vec<Node> = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let ready = waiting
            .iter()
            .position(|node| node.edges().all(|(_, _, from)| order.iter().any(|done| done.name == *from)));
        match ready {
            Some(index) => order.push(waiting.remove(index)),
            None => return Err(cycle(&waiting, places).into()),
        }
    }
    Ok(order)
}

/// Names one cycle among nodes that all wait for each other.
fn cycle(waiting: &[Node], places: &Places) -> Mistake {
    let mut walk: Vec<(&str, String)> = Vec::new();
    let mut here = waiting.first();
    while let Some(node) = here {
        if let Some(start) = walk.iter().position(|(name, _)| *name == node.name) {
            walk.drain(..start);
            break;
        }
        let next = node.edges().find_map(|(key, input, from)| {
            let other = waiting.iter().find(|other| other.name == *from)?;
            Some((format!("stage.{}.{key}.{input}", node.name), other))
        });
        walk.push((&node.name, next.as_ref().map(|(place, _)| place.clone()).unwrap_or_default()));
        here = next.map(|(_, other)| other);
    }
    let mut names: Vec<String> = walk.iter().map(|(name, _)| format!("`{name}`")).collect();
    names.extend(names.first().cloned());
    let mistake = Mistake::new(format!("the graph has a cycle: {}", names.join(" waits for ")))
        .help("a stage's inputs may only come from stages that do not wait for it");
    let place = walk.first().and_then(|(_, edge)| places.get(edge));
    match place {
        Some(place) => mistake.at(&place.origin, place.value.clone(), "one edge of the cycle"),
        None => mistake,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(graph: &Graph) -> Vec<&str> {
        graph.nodes().map(|node| node.name.as_str()).collect()
    }

    #[test]
    fn stages_keep_their_written_order_where_edges_allow() {
        let text = "[stage.z]\n[stage.b]\ninputs = { x = \"a\" }\n[stage.m]\n[stage.a]\n";
        let graph = Graph::parse(None, text).unwrap();
        assert_eq!(names(&graph), ["z", "m", "a", "b"]);
        assert_eq!(graph.node("b").unwrap().program, "pipeline-b");
        assert_eq!(graph.needed_by("b").into_iter().collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn an_optional_input_is_taken_from_a_stage_of_the_recipe_only() {
        let text = "[stage.draw]\noptional = { weights = \"learn\" }\n[stage.learn]\n";
        let graph = Graph::parse(None, text).unwrap();
        assert_eq!(names(&graph), ["learn", "draw"]);
        let needed = |graph: Graph| graph.needed_by("draw").into_iter().collect::<Vec<_>>();
        assert_eq!(needed(graph.clone().restricted_to(|stage| stage == "learn")), ["draw", "learn"]);
        assert_eq!(needed(graph.restricted_to(|_| false)), ["draw"]);
        let unknown = Graph::parse(None, &text.replace("\"learn\"", "\"lern\"")).unwrap_err();
        assert!(unknown.to_string().contains("the input `weights` of `draw` comes from `lern`"), "{unknown}");
        let cycle = Graph::parse(None, "[stage.a]\noptional = { x = \"b\" }\n[stage.b]\ninputs = { y = \"a\" }\n");
        assert_eq!(cycle.unwrap_err().to_string(), "the graph has a cycle: `a` waits for `b` waits for `a`");
    }

    #[test]
    fn mistakes_name_the_edge_and_all_are_told() {
        let text = "[stage.a]\ninputs = { x = \"gone\" }\ndefaults = { m = \"nowhere.m\", n = \"n\" }\nprogramm = \"x\"\n[stage.c]\ninputs = 3\n";
        let mistakes = Graph::parse(Some(Path::new("g.toml")), text).unwrap_err();
        let told: Vec<String> =
            mistakes.0.iter().map(|m| format!("{}: {}", m.line().map_or(0, |(_, line)| line), m.message)).collect();
        assert_eq!(
            told,
            [
                "4: unknown key `programm` in `stage.a`",
                "6: `stage.c.inputs` must be a table of names",
                "2: the input `x` of `a` comes from `gone`, which is no stage",
                "3: `nowhere.m` names the stage `nowhere`, which there is not",
                "3: `n` does not name a stage's parameter",
            ]
        );
    }

    #[test]
    fn a_stage_that_waits_for_itself_is_a_cycle() {
        let mistakes = Graph::parse(None, "[stage.b]\n[stage.a]\ninputs = { x = \"a\", y = \"b\" }\n").unwrap_err();
        assert_eq!(mistakes.to_string(), "the graph has a cycle: `a` waits for `a`");
    }

    proptest! {
        /// Edges lead from later to earlier names of a random permutation, so there is no cycle.
        #[test]
        fn every_stage_comes_after_what_it_needs(
            order in Just((0..8usize).collect::<Vec<_>>()).prop_shuffle(),
            edges in prop::collection::btree_set((0..8usize, 0..8usize), 0..16),
        ) {
            let mut text = String::new();
            for stage in 0..8 {
                let inputs: Vec<String> = edges
                    .iter()
                    .filter(|(from, to)| *to == stage && order[*from] < order[*to])
                    .map(|(from, _)| format!("i{from} = \"s{from}\""))
                    .collect();
                text += "[stage.s";
                text += &stage.to_string();
                text += "]\ninputs = { ";
                text += &inputs.join(", ");
                text += " }\n";
            }
            let graph = Graph::parse(None, &text).unwrap();
            let position = |name: &str| graph.nodes().position(|node| node.name == name);
            prop_assert_eq!(graph.nodes().count(), 8);
            for node in graph.nodes() {
                for from in node.inputs.values() {
                    prop_assert!(position(from) < position(&node.name));
                }
            }
        }
    }
}

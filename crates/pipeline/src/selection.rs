//! Which stages of the graph a command is about: the recipe's own, what they need, and `--from --until --only`.

use std::collections::{BTreeMap, BTreeSet};

use spec::{Graph, Recipe, suggest};

use crate::error::{Error, Result};

/// What the user asked to run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Request {
    pub(crate) from: Vec<String>,
    pub(crate) until: Vec<String>,
    pub(crate) only: Vec<String>,
    /// Stages to run although they are cached; an empty list with `force_all` means every selected one.
    pub(crate) force: Vec<String>,
    pub(crate) force_all: bool,
}

/// The answer.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    /// Stages that may run.
    pub(crate) run: BTreeSet<String>,
    /// Stages that run although they are cached.
    pub(crate) force: BTreeSet<String>,
    /// `run` and all they need; what is not in `run` must be cached.
    pub(crate) all: BTreeSet<String>,
    /// Stage without a table of its own → the stage of the recipe that needs it.
    pub(crate) implied: BTreeMap<String, String>,
}

impl Selection {
    pub(crate) fn new(graph: &Graph, recipe: &Recipe, request: &Request) -> Result<Self> {
        for (option, names) in [
            ("--from", &request.from),
            ("--until", &request.until),
            ("--only", &request.only),
            ("--force", &request.force),
        ] {
            if let Some(name) = names.iter().find(|name| graph.node(name).is_none()) {
                let known = graph.nodes().map(|node| node.name.as_str());
                return Err(Error::usage(
                    format!("`{option} {name}`: there is no such stage"),
                    suggest::help(name, known),
                ));
            }
        }
        let targets: Vec<&String> = request.until.iter().chain(&request.only).chain(&request.from).collect();
        let mut whole = BTreeSet::new();
        let mut implied = BTreeMap::new();
        for stage in recipe.stages.keys().chain(targets.iter().copied()) {
            for needed in graph.needed_by(stage) {
                if !recipe.stages.contains_key(&needed) && needed != *stage {
                    implied.entry(needed.clone()).or_insert_with(|| stage.clone());
                }
                whole.insert(needed);
            }
        }
        if whole.is_empty() {
            return Err(Error::new(
                stage::Exit::Recipe,
                spec::Mistake::new(format!("the recipe `{}` has no stages", recipe.path.display()))
                    .help("add tables such as `[ingest]`, each with a stage's parameters"),
            ));
        }
        let mut run = whole;
        if !request.only.is_empty() {
            run.retain(|stage| request.only.contains(stage));
        }
        if !request.until.is_empty() {
            let before: BTreeSet<String> = request.until.iter().flat_map(|stage| graph.needed_by(stage)).collect();
            run.retain(|stage| before.contains(stage));
        }
        if !request.from.is_empty() {
            run.retain(|stage| request.from.iter().any(|from| graph.needed_by(stage).contains(from)));
        }
        if run.is_empty() {
            return Err(Error::usage(
                "`--from`, `--until` and `--only` leave no stage to run",
                "`--from A --until B` runs what lies between A and B",
            ));
        }
        if let Some(name) = request.force.iter().find(|name| !run.contains(*name)) {
            return Err(Error::usage(
                format!("`--force {name}`: the stage is not among those that may run"),
                format!("these may run: {}", run.iter().map(|s| format!("`{s}`")).collect::<Vec<_>>().join(", ")),
            ));
        }
        let force = if request.force_all { run.clone() } else { request.force.iter().cloned().collect() };
        let all = run.iter().flat_map(|stage| graph.needed_by(stage)).collect();
        Ok(Self { run, force, all, implied })
    }
}

//! A recipe, its graph and the cache, opened together; and each stage prepared: program asked, parameters checked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value};
use spec::graph::{Kinds, Node};
use spec::{Graph, Mistake, Recipe, schema};
use stage::{CheckRequest, Checked, Description, Exit, SOURCE_NAMES};
use store::{Cache, Digest};

use crate::error::{Error, Result};
use crate::exchange::Exchange;
use crate::programs::{Answer, Program, at_source};
use crate::record::RunRecord;
use crate::recorded::{Recalled, recall};
use crate::resources::Resources;
use crate::sources::{Finder, Found};

/// The graph for recipes that have none near them.
const BUILT_IN_GRAPH: &str = include_str!("../../../pipeline.toml");

/// What every command opens.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub(crate) recipe: PathBuf,
    pub(crate) overrides: Vec<String>,
    pub(crate) cache: Option<PathBuf>,
    pub(crate) runs: Option<PathBuf>,
    pub(crate) device: Option<String>,
    pub(crate) threads: Option<usize>,
    /// Stages that run at the same time at most.
    pub(crate) jobs: Option<usize>,
    pub(crate) ranks: Option<usize>,
    /// Times a stage starts again after a failure that may pass.
    pub(crate) max_restarts: usize,
    /// The fewest ranks on which it does.
    pub(crate) min_ranks: Option<usize>,
    pub(crate) update: bool,
    /// Address of the remote that artifacts are brought from and to.
    pub(crate) remote: Option<String>,
    /// Read every file again, and rebuild what is damaged however long that takes.
    pub(crate) repair: bool,
}

/// Recipe, graph and cache.
pub(crate) struct Workspace {
    pub(crate) options: Options,
    pub(crate) recipe: Recipe,
    pub(crate) graph: Graph,
    pub(crate) cache: Cache,
    pub(crate) exchange: Option<Exchange>,
    /// Folder of the links that people follow.
    pub(crate) runs: PathBuf,
    /// See [`Workspace::history`].
    history: OnceLock<Vec<RunRecord>>,
}

/// A stage that is ready to be planned.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub(crate) node: Node,
    pub(crate) program: Program,
    pub(crate) description: Description,
    /// The stage's table, without what belongs to the runner.
    pub(crate) table: Map<String, Value>,
    pub(crate) checked: Checked,
    /// Files that `checked` depends on.
    pub(crate) consulted: BTreeMap<PathBuf, Option<Digest>>,
    pub(crate) sources: Vec<Found>,
    /// Sources that are not there, and are taken to be as an earlier run found them.
    pub(crate) absent: Vec<String>,
    pub(crate) resources: Resources,
}

/// CPU threads of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// So many, because someone said so.
    Asked(usize),
    /// Its share of those that are free when it starts.
    Share,
}

/// Whether a problem that `check` found is about the recipe or about what it names.
fn exit_of(problem: &spec::Problem, checked: &Checked) -> Exit {
    if let Some(code) = checked.exit {
        return Exit::from_code(code);
    }
    let field = problem.field.as_deref().unwrap_or_default();
    let top = field.split(['.', '[']).next().unwrap_or_default();
    let named = checked.sources.iter().any(|source| source.name == top) || SOURCE_NAMES.contains(&top);
    if named && problem.file.is_none() { Exit::Input } else { Exit::Recipe }
}

/// A stage without the inputs that it says it does not use.
fn without(node: &Node, unused: &BTreeSet<String>) -> Node {
    let mut node = node.clone();
    node.inputs.retain(|input, _| !unused.contains(input));
    node
}

/// Asks all at once and answers in order: a program on libtorch takes a third of a second to start.
fn together<T: Sync, R: Send>(items: &[T], ask: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let ask = &ask;
    std::thread::scope(|scope| {
        let asked: Vec<_> = items.iter().map(|item| scope.spawn(move || ask(item))).collect();
        asked.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// The cache: as asked, else `PIPELINE_CACHE`, else `.pipeline`.
pub(crate) fn cache_folder(asked: Option<&Path>) -> PathBuf {
    let of_environment = || std::env::var_os("PIPELINE_CACHE").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    asked.map(Path::to_owned).or_else(of_environment).unwrap_or_else(|| PathBuf::from(".pipeline"))
}

impl Workspace {
    /// Records of the runs before this command, newest first, read once.
    pub(crate) fn history(&self) -> &[RunRecord] {
        self.history.get_or_init(|| self.cache.run_records(&self.recipe.name).collect())
    }

    pub(crate) fn open(options: Options) -> Result<Self> {
        let current = std::env::current_dir()?;
        let recipe = Recipe::read(&options.recipe, &options.overrides)?;
        let graph = Graph::find(&recipe.base_dir, &current, BUILT_IN_GRAPH)?;
        recipe.check_stages(&graph)?;
        let graph = graph.restricted_to(|stage| recipe.stages.contains_key(stage));
        let cache = Cache::open(&cache_folder(options.cache.as_deref()))?.hold();
        let runs = options.runs.clone().unwrap_or_else(|| PathBuf::from("runs"));
        let exchange = options.remote.as_deref().map(Exchange::open).transpose()?;
        Ok(Self { options, recipe, graph, cache, exchange, runs, history: OnceLock::new() })
    }

    /// Finds and asks the programs of `stages`, and holds their kinds against the graph's edges.
    pub(crate) fn describe(&self, stages: &BTreeSet<String>) -> Result<BTreeMap<String, (Program, Description)>> {
        let nodes: Vec<&Node> = self.graph.nodes().filter(|node| stages.contains(&node.name)).collect();
        let described: BTreeMap<_, _> = together(&nodes, |node| {
            let program = Program::find(node, self.graph.path.as_deref())?;
            let description = program.describe(&self.cache, node)?;
            Ok((node.name.clone(), (program, description)))
        })
        .into_iter()
        .collect::<Result<_>>()?;
        let kinds = described
            .iter()
            .map(|(name, (_, d))| {
                let kinds = Kinds { inputs: d.inputs.clone(), optional: d.optional.clone(), output: d.output.clone() };
                (name.clone(), kinds)
            })
            .collect();
        self.graph.check_kinds(&kinds)?;
        Ok(described)
    }

    /// Checks the parameters of all `stages` and identifies what they read; all mistakes are reported together.
    /// `implied` are stages without a table: (stage → who needs it).
    pub(crate) fn prepare(
        &self,
        stages: &BTreeSet<String>,
        implied: &BTreeMap<String, String>,
    ) -> Result<Vec<Prepared>> {
        let mut described = self.describe(stages)?;
        let mut mistakes = Vec::new();
        let mut drafts = Vec::new();
        // The first mistake that is about the recipe itself decides.
        let mut exits: Vec<Exit> = Vec::new();
        for node in self.graph.nodes() {
            let Some((program, description)) = described.remove(&node.name) else { continue };
            let mut table = self.recipe.table(&self.graph, &node.name);
            let before = mistakes.len();
            let resources = Resources::take(self, node, &description, &mut table, &mut mistakes);
            if mistakes.len() > before {
                exits.push(Exit::Recipe);
            }
            drafts.push(Prepared {
                node: node.clone(),
                program,
                description,
                table,
                checked: Checked::default(),
                consulted: BTreeMap::new(),
                sources: Vec::new(),
                absent: Vec::new(),
                resources,
            });
        }
        let answers = together(&drafts, |draft| self.check(draft));
        let mut prepared = Vec::new();
        let mut finder = Finder::new(&self.cache, &self.runs, self.options.update);
        for (draft, answer) in drafts.into_iter().zip(answers) {
            let (name, Answer { checked, consulted }) = (&draft.node.name, answer?);
            // What is wrong may be that something is not there, which need not matter.
            let recalled = if checked.problems.is_empty() { None } else { recall(self, &mut finder, &draft) };
            if let Some(Recalled { checked, consulted, found, absent }) = recalled {
                let node = without(&draft.node, &checked.unused);
                prepared.push(Prepared { node, checked, consulted, sources: found, absent, ..draft });
                continue;
            }
            let problems = &checked.problems;
            exits.extend(problems.iter().map(|problem| exit_of(problem, &checked)));
            if let (Some(needed_by), false) = (implied.get(name), problems.is_empty()) {
                mistakes.push(self.missing_input(name, needed_by, problems));
                continue;
            }
            // A value that several stages take is told once, where it stands.
            let located = problems.iter().map(|problem| self.recipe.locate(&self.graph, name, problem));
            for mistake in located {
                if !mistakes.iter().any(|m: &Mistake| m.message == mistake.message && m.line() == mistake.line()) {
                    mistakes.push(mistake);
                }
            }
            let node = without(&draft.node, &checked.unused);
            prepared.push(Prepared { node, checked, consulted, ..draft });
        }
        if !mistakes.is_empty() {
            let exit =
                exits.iter().find(|exit| **exit == Exit::Recipe).or(exits.first()).copied().unwrap_or(Exit::Recipe);
            return Err(Error { exit, mistakes, log_tail: None });
        }
        self.identify(&mut finder, &mut prepared)?;
        Ok(prepared)
    }

    /// What the stage says of its table; the schema of its description comes first, and needs no process.
    fn check(&self, stage: &Prepared) -> Result<Answer> {
        let value = Value::Object(stage.table.clone());
        let problems = schema::validate_split(&stage.description.parameters, &stage.description.settings, &value);
        if !problems.is_empty() {
            let checked = Checked { problems, exit: Some(Exit::Recipe.code()), ..Checked::default() };
            return Ok(Answer { checked, ..Answer::default() });
        }
        let inputs = stage.node.inputs.keys().cloned().collect();
        let request =
            CheckRequest { inputs, ranks: stage.resources.ranks, ..CheckRequest::new(value, &self.recipe.base_dir) };
        stage.program.check(&self.cache, &stage.node.name, &request)
    }

    /// Whether the stage can do the same on so many ranks.
    pub(crate) fn runs_on(&self, stage: &Prepared, ranks: usize) -> Result<bool> {
        let mut stage = stage.clone();
        stage.resources.ranks = ranks;
        Ok(self.check(&stage)?.checked.problems.is_empty())
    }

    fn identify(&self, finder: &mut Finder<'_>, prepared: &mut [Prepared]) -> Result<()> {
        let mut failed: Option<Error> = None;
        for stage in prepared.iter_mut().filter(|stage| stage.absent.is_empty()) {
            let found: Vec<_> = stage
                .checked
                .sources
                .iter()
                .map(|source| (source.clone(), finder.find(source, &self.recipe.base_dir)))
                .collect();
            if found.iter().any(|(_, found)| found.is_err())
                && let Some(recalled) = recall(self, finder, stage)
            {
                (stage.checked, stage.consulted) = (recalled.checked, recalled.consulted);
                (stage.sources, stage.absent) = (recalled.found, recalled.absent);
                continue;
            }
            for (source, found) in found {
                match found {
                    Ok(found) => {
                        self.cache.keep_entries(&found.identity);
                        stage.sources.push(found);
                    }
                    Err((exit, error)) => {
                        let problem = at_source(&source.name, &*error);
                        let mistake = self.recipe.locate(&self.graph, &stage.node.name, &problem);
                        match &mut failed {
                            // The same model at two stages is one mistake.
                            Some(failed) if failed.mistakes.iter().any(|m| m.message == mistake.message) => {}
                            Some(failed) => failed.mistakes.push(mistake),
                            None => failed = Some(Error::new(exit, mistake)),
                        }
                    }
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// A stage that the recipe leaves out, that another one needs, and that cannot run on its defaults.
    fn missing_input(&self, stage: &str, needed_by: &str, problems: &[spec::Problem]) -> Mistake {
        let reasons: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
        let problem = spec::Problem::new(format!(
            "`{needed_by}` needs the stage `{stage}`, which the recipe leaves out and which cannot run on its defaults: {}",
            reasons.join("; ")
        ))
        .help(format!("add a table `[{stage}]`"));
        self.recipe.locate(&self.graph, needed_by, &problem)
    }
}

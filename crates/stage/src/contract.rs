//! The words a runner and a stage program exchange: `describe`, `check` and `run`.
//!
//! Everything here is JSON on disk or on a pipe, so a stage may be written in any language. The contract knows nothing
//! of which stages exist, nor of models or tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use spec::Problem;

/// Version of the contract; a runner refuses a program that speaks another.
pub const CONTRACT: u32 = 1;

/// What `pipeline-<verb> describe` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// [`CONTRACT`].
    pub contract: u32,
    /// The verb, such as `encode`.
    pub stage: String,
    /// Step version: bumped when the same parameters and inputs would give another result. Part of every key.
    pub version: u32,
    /// One sentence for `--help` and `show`.
    pub about: String,
    /// JSON Schema of the semantic parameters: those that change the result.
    pub parameters: Value,
    /// JSON Schema of the operational settings: those that must not change it (device, threads, paths of logs).
    pub settings: Value,
    /// Input name → kind of artifact it takes.
    pub inputs: BTreeMap<String, String>,
    /// Inputs it can do without: a graph may wire them under `optional`, or not at all.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub optional: BTreeSet<String>,
    /// Kind of the artifact it makes.
    pub output: String,
    /// Table name → glob of its files inside the artifact, for SQL: Parquet, or JSON Lines (`.jsonl`) for small tables of a
    /// stage that writes no Parquet. `samples`, `rejects` and `held` have the columns of ours.
    pub tables: BTreeMap<String, String>,
    /// Globs of files that hold measurements (seconds, memory), not results: they do not count for the output digest, so a
    /// rerun that computes the same leaves everything below it cached.
    #[serde(default)]
    pub measured: Vec<String>,
    /// Whether a killed run is continued from what it left in `output` and `scratch`; otherwise both are emptied first. A
    /// stage that is continued takes every file there for damaged until it has looked: only what a stage wrote under another
    /// name and renamed is whole.
    pub resumable: bool,
    /// Devices it can use: `cpu`, `cuda`.
    pub devices: Vec<String>,
    /// Whether it answers `estimate`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub estimates: bool,
    /// Those of its devices on which one run may be several processes, started at once with the same request and, in their
    /// environment, `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as `torchrun`
    /// does. Only rank 0 reports progress; every rank reports its failure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<String>,
}

/// What `pipeline-<verb> check --request FILE` reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRequest {
    /// [`CONTRACT`].
    pub contract: u32,
    /// The recipe's table of this stage, as written, with `--set` overrides and wired defaults applied.
    pub parameters: Value,
    /// Folder of the recipe; relative paths in `parameters` start here.
    pub base_dir: PathBuf,
    /// The inputs that it will be given.
    #[serde(default)]
    pub inputs: BTreeSet<String>,
    /// Processes that it will run as. The answer's `key` must not depend on it.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ranks: usize,
}

impl CheckRequest {
    /// A question about `parameters` of a stage that is given no inputs.
    pub fn new(parameters: Value, base_dir: impl Into<PathBuf>) -> Self {
        Self { contract: CONTRACT, parameters, base_dir: base_dir.into(), inputs: BTreeSet::new(), ranks: 1 }
    }
}

/// What `check` prints: nothing is loaded, nothing is fetched beyond small configuration files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checked {
    /// The semantic parameters with every default filled in and every location left out: the stage's share of the key.
    pub key: Value,
    /// Things outside the cache that the result depends on; the runner finds their identity.
    pub sources: Vec<Source>,
    /// Files whose *contents* went into `key` (a training recipe, a prompt file): a change makes this answer stale.
    pub consulted: Vec<PathBuf>,
    /// Where values of `key` stand in those files: line (from 1) by `.`-separated path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub written: BTreeMap<PathBuf, BTreeMap<String, usize>>,
    /// One line each: settings that are accepted but have no effect, and why.
    pub notes: Vec<String>,
    /// What is wrong; empty if the stage can run.
    pub problems: Vec<Problem>,
    /// Wired inputs that the result does not depend on, with these parameters: they are neither waited for nor given.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub unused: BTreeSet<String>,
    /// Exit code that the problems call for, when it is not "the recipe is wrong" (nor, at [`SOURCE_NAMES`], "data or a model
    /// is unusable").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
}

/// Parameters that name a [`Source`] in every stage that has them: a problem at one of them is about data or a model.
pub const SOURCE_NAMES: &[&str] = &["dataset", "model"];

/// Something outside the cache that a stage reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Parameter that names it, such as `model` or `dataset`.
    pub name: String,
    /// What it is.
    pub kind: SourceKind,
    /// Local path, resolved against `base_dir`; or a Hub id `OWNER/NAME`.
    pub location: String,
    /// Asked revision on the Hub (branch, tag or commit); `None` is `main`.
    pub revision: Option<String>,
    /// Globs, relative to the root of the source, of the files that count; empty means all. One that begins with `!` takes
    /// files out.
    pub parts: Vec<String>,
}

/// Kind of a [`Source`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// A local file or folder.
    Path,
    /// A model repository of the Hub.
    HubModel,
    /// A data-set repository of the Hub.
    HubDataset,
}

/// A [`Source`] whose identity the runner has found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedSource {
    /// As asked.
    pub kind: SourceKind,
    /// As asked.
    pub location: String,
    /// Commit on the Hub that `revision` meant when it was resolved.
    pub commit: Option<String>,
    /// Globs of the files that count: those asked for, less what the runner itself keeps in the folder. What is read and not
    /// among them may change without a new key.
    pub parts: Vec<String>,
    /// Identity of the contents: equal contents, equal digest, wherever they lie.
    pub digest: String,
}

/// What `pipeline-<verb> run --request FILE` reads: one piece of work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// [`CONTRACT`].
    pub contract: u32,
    /// As in [`CheckRequest`]: semantic parameters and operational settings in one table.
    pub parameters: Value,
    /// Folder of the recipe.
    pub base_dir: PathBuf,
    /// Source name → where it is and what it was.
    pub sources: BTreeMap<String, ResolvedSource>,
    /// Input name → folder of a published artifact.
    pub inputs: BTreeMap<String, PathBuf>,
    /// Empty folder (unless the stage is resumable) in which the artifact is made.
    pub output: PathBuf,
    /// Folder for temporary files, kept between tries of the same key if the stage is resumable.
    pub scratch: PathBuf,
    /// Folders of which single items may be reused: earlier artifacts of this stage, newest first (those have a
    /// `manifest.json`, with the digest of every file; a file that is not there was damaged), then scratch folders of
    /// unfinished tries, which may vanish at any time.
    pub previous: Vec<PathBuf>,
    /// Folder of small answers that are cheap to lose, such as digests of weights; see `store::Memo`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memo: Option<PathBuf>,
    /// `cpu`, `cuda` or `cuda:N`.
    pub device: String,
    /// CPU threads this stage may use.
    pub threads: usize,
}

/// What `pipeline-<verb> estimate --request FILE` reads: what would a run have to do?
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EstimateRequest {
    /// [`CONTRACT`].
    pub contract: u32,
    /// As in [`RunRequest`].
    pub parameters: Value,
    /// As in [`RunRequest`].
    pub base_dir: PathBuf,
    /// As in [`RunRequest`].
    pub sources: BTreeMap<String, ResolvedSource>,
    /// As in [`RunRequest`]; or, if `changed` is given, what the stages before this one made the last time, as far as they have.
    pub inputs: BTreeMap<String, PathBuf>,
    /// As in [`RunRequest`].
    pub previous: Vec<PathBuf>,
    /// As in [`RunRequest`].
    pub memo: Option<PathBuf>,
    /// Source files that changed since `inputs` were made, when a stage before this one has yet to run.
    pub changed: Option<Vec<String>>,
    /// As in [`RunRequest`].
    #[serde(default = "cpu")]
    pub device: String,
    /// Processes that a run would be.
    #[serde(default = "one")]
    pub ranks: usize,
}

/// What `estimate` prints. Nothing is loaded, fetched or written; what cannot be known cheaply is left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Estimate {
    /// Kinds of items, and how many of them have to be made. `info.new` of a finished run counts them by the same names, from
    /// which the time of the next one is told.
    pub items: Vec<Items>,
    /// Size of the result.
    pub bytes: Option<u64>,
    /// Most memory that one process of a run would have in use: resident memory on a CPU, that of tensors on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Further facts for a person, one line each: `39 batches of 2 an epoch, 1 sample held back`.
    pub facts: Vec<String>,
}

/// Items of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Items {
    /// Kind, plural: `latents`.
    pub name: String,
    /// All that the result will hold.
    pub total: u64,
    /// Those that have to be made.
    pub todo: u64,
    /// Why, if it is known: "pixels of `m13.jpg` changed".
    pub because: Option<String>,
}

/// One line on a running stage's standard output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Work done so far in the current phase.
    Progress {
        /// Phase, such as `encoding pictures`.
        phase: String,
        /// Units done.
        done: u64,
        /// Units in all, when known.
        total: Option<u64>,
        /// Unit, plural: `pictures`, `steps`.
        unit: String,
        /// Short text beside the bar, such as `loss 0.412`.
        note: Option<String>,
    },
    /// Named numbers at a step.
    Metric {
        /// Step, from 0.
        step: u64,
        /// Values by name; `null` stands for a number that is not finite.
        #[serde(deserialize_with = "null_is_nan")]
        values: BTreeMap<String, f64>,
    },
    /// Something a person should know; the run goes on.
    Warning {
        /// The text.
        message: String,
    },
    /// A refused item; the row is in the artifact's `rejects` table, too.
    Rejected {
        /// Sample id or source row.
        item: String,
        /// Reason code, such as `decode`.
        reason: String,
        /// Detail for a person.
        detail: String,
    },
    /// A file a person may want to open now (a sample picture, a checkpoint).
    Output {
        /// What it is.
        label: String,
        /// Where it is.
        path: PathBuf,
    },
    /// The last line of a good run.
    Done {
        /// One sentence for a person.
        summary: String,
        /// Rows in = out + rejected + held.
        ledger: Ledger,
        /// Free-form facts for the manifest.
        info: Value,
    },
    /// The last line of a failed run.
    Failed {
        /// What went wrong.
        problem: Problem,
        /// Exit code the program ends with.
        exit: i32,
    },
}

/// Law L2 at one stage boundary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ledger {
    /// Rows the stage was given.
    #[serde(rename = "in")]
    pub taken: u64,
    /// Rows in its result.
    pub out: u64,
    /// Rows refused, each with a reason in `rejects`.
    pub rejected: u64,
    /// Rows held back by a policy that the user chose.
    pub held: u64,
}

impl Ledger {
    /// Whether every row is accounted for.
    pub fn balances(&self) -> bool {
        self.taken == self.out + self.rejected + self.held
    }
}

fn cpu() -> String {
    "cpu".to_owned()
}

fn one() -> usize {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_one(ranks: &usize) -> bool {
    *ranks == 1
}

/// JSON has no NaN: `serde_json` writes `null` for it, and this reads it back.
fn null_is_nan<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let values = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(values.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}

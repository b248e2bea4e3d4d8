//! What the runner says about a run, in plain types: this crate knows neither caches nor processes.

use std::path::PathBuf;

use serde_json::Value;

/// One run of a recipe.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Name of the recipe.
    pub recipe: String,
    /// Its text, as it is now.
    pub text: String,
    /// Number of the run, from 1.
    pub number: u64,
    /// When it began, UTC.
    pub started: String,
    /// How long it took.
    pub seconds: f64,
    /// Exit code; `None` if the runner did not live to say.
    pub exit: Option<i32>,
    /// `--set` arguments.
    pub overrides: Vec<String>,
    /// Version of the runner.
    pub version: String,
    /// In an order in which they can run.
    pub stages: Vec<Stage>,
}

/// What became of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Status {
    /// It was not part of the run, or the run ended before.
    #[default]
    NotRun,
    /// Its result was there.
    Cached,
    /// It ran.
    Made,
    /// It failed.
    Failed,
    /// It was stopped.
    Interrupted,
}

impl Status {
    /// A word for people, and a class of the style sheet.
    pub fn word(self) -> &'static str {
        match self {
            Self::NotRun => "not run",
            Self::Cached => "cached",
            Self::Made => "made",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
        }
    }

    pub(crate) fn class(self) -> &'static str {
        if self == Self::NotRun { "notrun" } else { self.word() }
    }
}

/// One stage of the run.
#[derive(Debug, Clone, Default)]
pub struct Stage {
    /// The verb.
    pub name: String,
    /// Input name and the stage it comes from.
    pub inputs: Vec<(String, String)>,
    /// What became of it.
    pub status: Status,
    /// Why it ran or did not.
    pub reason: String,
    /// How long it took in this run.
    pub seconds: f64,
    /// Device it was given.
    pub device: String,
    /// Threads it was given.
    pub threads: usize,
    /// Settings without effect.
    pub notes: Vec<String>,
    /// What a person should know.
    pub warnings: Vec<String>,
    /// What went wrong.
    pub error: Option<String>,
    /// Key that was asked for.
    pub key: String,
    /// Its result, if there is one.
    pub result: Option<Artifact>,
}

/// The result of a stage.
#[derive(Debug, Clone, Default)]
pub struct Artifact {
    /// Its folder.
    pub path: PathBuf,
    /// Paths inside.
    pub files: Vec<String>,
    /// Size.
    pub bytes: u64,
    /// Digest of what came out.
    pub digest: String,
    /// Step version of the stage.
    pub version: u32,
    /// Semantic parameters, defaults filled in.
    pub parameters: Value,
    /// The stage's own facts.
    pub info: Value,
    /// What it depended on outside the cache.
    pub sources: Vec<Source>,
    /// How long it took when it was made.
    pub seconds: f64,
    /// The stage's sentence.
    pub summary: String,
    /// Rows.
    pub ledger: Ledger,
}

/// Rows in = out + rejected + held.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ledger {
    /// Rows given.
    pub taken: u64,
    /// Rows in the result.
    pub out: u64,
    /// Rows refused.
    pub rejected: u64,
    /// Rows held back by a policy.
    pub held: u64,
}

/// Weights or data.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// Parameter that names it.
    pub name: String,
    /// Path or Hub id.
    pub location: String,
    /// Commit on the Hub.
    pub commit: Option<String>,
    /// Identity of its contents.
    pub digest: String,
}

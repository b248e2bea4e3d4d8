//! `run.json`: what ran, why, how long, with which artifacts.

use serde::{Deserialize, Serialize};
use store::{Artifact, Digest, Lookup};

use crate::recorded::Asked;
use crate::workspace::Workspace;

/// Version of the record.
pub(crate) const SCHEMA: u32 = 1;

/// One run of a recipe.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    pub(crate) schema: u32,
    pub(crate) recipe: String,
    /// `--set` arguments.
    pub(crate) overrides: Vec<String>,
    pub(crate) started: String,
    pub(crate) seconds: f64,
    /// Exit code; absent while it runs or if the runner was killed.
    pub(crate) exit: Option<i32>,
    pub(crate) stages: Vec<StageRecord>,
}

/// One stage of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StageRecord {
    pub(crate) stage: String,
    pub(crate) status: Status,
    /// Why it ran or did not.
    pub(crate) reason: String,
    pub(crate) key: Digest,
    /// Of the artifact, if there is one.
    pub(crate) digest: Option<Digest>,
    pub(crate) started: String,
    pub(crate) seconds: f64,
    pub(crate) device: String,
    pub(crate) threads: usize,
    /// Processes that shared the work.
    #[serde(default = "one")]
    pub(crate) ranks: usize,
    /// Settings without effect.
    pub(crate) notes: Vec<String>,
    pub(crate) warnings: Vec<String>,
    /// Peak of the resident memory of the stage's process.
    #[serde(default)]
    pub(crate) memory_bytes: Option<u64>,
    /// Items that it refused while running, as reported.
    pub(crate) rejected: u64,
    /// What went wrong, if it failed.
    pub(crate) error: Option<String>,
    /// What it was asked.
    #[serde(default)]
    pub(crate) asked: Option<Asked>,
}

fn one() -> usize {
    1
}

/// What became of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Cached,
    Made,
    Failed,
    Interrupted,
}

impl Status {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::Made => "made",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
        }
    }
}

/// Peak memory of a stage the last time it was measured.
pub(crate) fn last_memory(workspace: &Workspace, stage: &str) -> Option<u64> {
    let records = workspace.history().iter().flat_map(|run| &run.stages);
    records
        .filter(|record| record.stage == stage && record.status == Status::Made)
        .find_map(|record| record.memory_bytes)
}

/// The newest record of a stage in the runs before this command that left an artifact.
pub(crate) fn last_before<'w>(workspace: &'w Workspace, stage: &str) -> Option<&'w StageRecord> {
    let mut records = workspace.history().iter().flat_map(|run| &run.stages);
    records.find(|record| record.stage == stage && record.digest.is_some())
}

/// The newest record of a stage in the recipe's runs that left an artifact, with the artifact if it is still whole.
pub(crate) fn last_made(workspace: &Workspace, stage: &str) -> Option<(StageRecord, Option<Artifact>)> {
    let record = workspace
        .cache
        .run_records::<RunRecord>(&workspace.recipe.name)
        .flat_map(|run| run.stages)
        .find(|record| record.stage == stage && record.digest.is_some())?;
    let artifact = match workspace.cache.artifact(stage, &record.key) {
        Lookup::Hit(artifact) => Some(*artifact),
        Lookup::Absent | Lookup::Broken(_) => None,
    };
    Some((record, artifact))
}

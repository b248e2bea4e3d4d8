//! What a stage that is to run will cost: items, bytes, time and memory, from the stage's own estimate and from earlier runs.
//! Nothing is run, loaded or fetched.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;
use stage::{CONTRACT, Estimate, EstimateRequest, Items};
use store::{Artifact, Digest, Manifest};

use crate::clock::{size, told};
use crate::record::{last_made, last_memory};
use crate::request::previous;
use crate::workspace::{Prepared, Workspace};

/// The price of a stage, as far as it can be known.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Forecast {
    pub(crate) items: Vec<Items>,
    pub(crate) bytes: Option<u64>,
    pub(crate) seconds: Option<f64>,
    /// Peak of the memory of all processes together: as the stage tells, or as it was the last time.
    pub(crate) memory_bytes: Option<u64>,
    /// Of each process, as the stage tells.
    pub(crate) rank_memory_bytes: Option<u64>,
    /// Processes.
    pub(crate) ranks: usize,
    pub(crate) facts: Vec<String>,
}

impl Forecast {
    /// Of a stage whose inputs are `made`; of one that waits, from what it was given the last time and the source files that
    /// `changed` since.
    pub(crate) fn of(
        workspace: &Workspace,
        stage: &Prepared,
        made: &BTreeMap<String, Artifact>,
        changed: Option<Vec<String>>,
    ) -> Self {
        let (cache, name) = (&workspace.cache, &stage.node.name);
        let before = cache.manifests(name);
        let estimate = estimate(workspace, stage, made, changed).unwrap_or_default();
        let (ranks, rank_memory_bytes) = (stage.resources.ranks, estimate.memory_bytes);
        let told = rank_memory_bytes.map(|bytes| bytes * ranks as u64);
        let memory_bytes = told.or_else(|| last_memory(workspace, name));
        let bytes = estimate.bytes.or_else(|| before.first().map(Manifest::bytes));
        Self {
            seconds: seconds(&before, &estimate.items),
            bytes,
            memory_bytes,
            rank_memory_bytes,
            ranks,
            items: estimate.items,
            facts: estimate.facts,
        }
    }

    /// One line: `1 of 78 latents (pixels of `m13.jpg` changed), about 2.0 s, 3.4 MB, memory 410 MB`.
    pub(crate) fn line(&self) -> String {
        let item = |items: &Items| {
            let why = items.because.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
            format!("{} of {} {}{why}", items.todo, items.total, items.name)
        };
        let mut parts: Vec<String> = self.items.iter().map(item).collect();
        parts.extend(self.seconds.map(|seconds| format!("about {}", told(seconds))));
        parts.extend(self.bytes.map(size));
        parts.extend(match (self.rank_memory_bytes, self.memory_bytes) {
            (Some(bytes), _) if self.ranks > 1 => {
                Some(format!("memory {} on each of {} ranks", size(bytes), self.ranks))
            }
            (_, bytes) => bytes.map(|bytes| format!("memory {}", size(bytes))),
        });
        parts.join(", ")
    }
}

/// Asks the stage. One that cannot say costs nothing but the line.
fn estimate(
    workspace: &Workspace,
    stage: &Prepared,
    made: &BTreeMap<String, Artifact>,
    changed: Option<Vec<String>>,
) -> Option<Estimate> {
    if !stage.description.estimates {
        return None;
    }
    let (cache, name) = (&workspace.cache, &stage.node.name);
    let last = |from: &String| last_made(workspace, from)?.1;
    let input = |from: &String| made.get(from).cloned().or_else(|| last(from)).map(|artifact| artifact.path);
    let inputs: BTreeMap<String, PathBuf> =
        stage.node.inputs.iter().filter_map(|(name, from)| Some((name.clone(), input(from)?))).collect();
    let request = EstimateRequest {
        contract: CONTRACT,
        parameters: Value::Object(stage.table.clone()),
        base_dir: workspace.recipe.base_dir.clone(),
        sources: stage.sources.iter().map(|found| (found.name.clone(), found.resolved.clone())).collect(),
        inputs,
        previous: previous(cache, name, stage.description.version, &Digest::of_bytes(b"")),
        memo: Some(cache.memo().folder().to_owned()),
        changed,
        device: stage.resources.device.clone(),
        ranks: stage.resources.ranks,
    };
    stage.program.estimate(name, &request).ok()
}

/// Time of the last run that made something; by the items it made, if both tell how many.
fn seconds(before: &[Manifest], items: &[Items]) -> Option<f64> {
    let new = |manifest: &Manifest| -> Option<u64> {
        items.iter().map(|items| manifest.info.get("new")?.get(&items.name)?.as_u64()).sum()
    };
    let todo: u64 = items.iter().map(|items| items.todo).sum();
    if items.is_empty() {
        return before.first().map(|manifest| manifest.seconds);
    }
    let counted = before.iter().filter_map(|manifest| Some((new(manifest).filter(|new| *new > 0)?, manifest.seconds)));
    // The run with the most items says best what one costs.
    let (new, seconds) = counted.max_by_key(|(new, _)| *new)?;
    Some(seconds * todo as f64 / new as f64)
}

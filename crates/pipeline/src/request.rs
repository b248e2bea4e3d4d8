//! What a stage is asked to do, and which earlier work it is offered for reuse item by item.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;
use stage::{CONTRACT, RunRequest};
use store::{Artifact, Cache, Digest, Lookup, Staging};

use crate::workspace::{Prepared, Workspace};

/// Earlier artifacts that a stage is offered at most. Each is an index of items to read; the newest have the most in common.
const PREVIOUS: usize = 32;

/// The request of one piece of work. A forced one is offered nothing: its point is to make everything again.
pub(crate) fn new(
    workspace: &Workspace,
    stage: &Prepared,
    threads: usize,
    key: &Digest,
    made: &BTreeMap<String, Artifact>,
    staging: &Staging,
    forced: bool,
) -> RunRequest {
    let cache = &workspace.cache;
    let inputs = stage.node.inputs.iter();
    RunRequest {
        contract: CONTRACT,
        parameters: Value::Object(stage.table.clone()),
        base_dir: workspace.recipe.base_dir.clone(),
        sources: stage.sources.iter().map(|found| (found.name.clone(), found.resolved.clone())).collect(),
        inputs: inputs.filter_map(|(input, from)| Some((input.clone(), made.get(from)?.path.clone()))).collect(),
        output: staging.out.clone(),
        scratch: staging.scratch.clone(),
        previous: if forced { Vec::new() } else { previous(cache, &stage.node.name, stage.description.version, key) },
        memo: Some(cache.memo().folder().to_owned()),
        device: stage.resources.device.clone(),
        threads: (threads / stage.resources.ranks).max(1),
    }
}

/// Artifacts of the same step version, the most recently used first, then what unfinished tries left.
pub(crate) fn previous(cache: &Cache, stage: &str, version: u32, key: &Digest) -> Vec<PathBuf> {
    let manifests = cache.manifests(stage).into_iter().filter(|manifest| manifest.material.version == version);
    // Damaged files step aside when they are looked at; what is left of the artifact is good, that of `key` itself, too.
    let sound = manifests.filter(|manifest| !matches!(cache.artifact(stage, &manifest.key), Lookup::Absent));
    let mut folders: Vec<_> = sound.take(PREVIOUS).map(|found| cache.artifact_path(stage, &found.key)).collect();
    folders.extend(cache.abandoned_scratch(stage, key));
    folders
}

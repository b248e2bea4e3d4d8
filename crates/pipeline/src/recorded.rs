//! What a stage was asked and what it read when its artifact was made, so that a stage whose sources are absent still finds
//! it: after a move of the cache to another host, or beside a remote. Only what is absent is taken as recorded; what is there
//! is identified as ever.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;
use spec::Recipe;
use stage::{Checked, ResolvedSource, Source, SourceKind};
use store::{Digest, Identity, Manifest};

use crate::sources::{Finder, Found};
use crate::workspace::{Prepared, Workspace};

/// A question to a stage and where its answer came from. No path of this machine is in it, unless the recipe names one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Asked {
    /// Digest of the recipe's name, the stage, its version and its table of the recipe. The name keeps projects apart that ask
    /// the same of other data and share a remote.
    pub(crate) question: Digest,
    /// Outside things that it reads; local paths relative to the recipe.
    sources: Vec<Source>,
    /// Files whose contents are part of the answer; `None`: it was not there.
    consulted: BTreeMap<PathBuf, Option<Digest>>,
}

/// An answer of before.
pub(crate) struct Recalled {
    pub(crate) checked: Checked,
    pub(crate) consulted: BTreeMap<PathBuf, Option<Digest>>,
    pub(crate) found: Vec<Found>,
    /// What is not there.
    pub(crate) absent: Vec<String>,
}

impl Asked {
    /// What that stage is asked now.
    pub(crate) fn of(recipe: &Recipe, stage: &Prepared) -> Self {
        let below = |path: &Path| path.strip_prefix(&recipe.base_dir).unwrap_or(path).to_owned();
        let source = |source: &Source| match source.kind {
            SourceKind::Path => {
                let location = below(Path::new(&source.location)).to_string_lossy().into_owned();
                Source { location, ..source.clone() }
            }
            SourceKind::HubModel | SourceKind::HubDataset => source.clone(),
        };
        Self {
            question: question(recipe, stage),
            sources: stage.checked.sources.iter().map(source).collect(),
            consulted: stage.consulted.iter().map(|(path, digest)| (below(path), *digest)).collect(),
        }
    }

    /// Whether the files whose contents went into the answer are as they were, as far as they are there.
    fn holds(&self, base_dir: &Path) -> bool {
        self.consulted.iter().all(|(path, then)| match Digest::of_file(&base_dir.join(path)) {
            Ok(now) => *then == Some(now),
            Err(_) => true,
        })
    }
}

fn question(recipe: &Recipe, stage: &Prepared) -> Digest {
    Digest::of_json(&json!({
        "recipe": recipe.name, "stage": stage.node.name, "version": stage.description.version, "table": stage.table,
    }))
}

/// The answer of before for a stage that cannot be prepared now; `None` unless it is for want of a source.
pub(crate) fn recall(workspace: &Workspace, finder: &mut Finder<'_>, stage: &Prepared) -> Option<Recalled> {
    let (name, base_dir) = (&stage.node.name, &workspace.recipe.base_dir);
    let question = question(&workspace.recipe, stage);
    let (asked, manifest) =
        here(workspace, name, &question).or_else(|| workspace.exchange.as_ref()?.recall(name, &question))?;
    if !asked.holds(base_dir) {
        return None;
    }
    let (mut found, mut absent) = (Vec::new(), Vec::new());
    for source in &asked.sources {
        let is_there = match source.kind {
            SourceKind::Path => base_dir.join(&source.location).exists(),
            SourceKind::HubModel | SourceKind::HubDataset => true,
        };
        match finder.find(source, base_dir) {
            Ok(identified) => found.push(identified),
            // Something is there and cannot be read.
            Err(_) if is_there && source.kind == SourceKind::Path => return None,
            Err(_) => {
                let digest = *manifest.material.sources.get(&source.name)?;
                let shown = base_dir.join(&source.location).display().to_string();
                absent.push(if source.kind == SourceKind::Path { shown } else { source.location.clone() });
                found.push(as_recorded(workspace, source, base_dir, digest));
            }
        }
    }
    let unused = stage.node.inputs.keys().filter(|input| !manifest.material.inputs.contains_key(*input));
    let unused = unused.cloned().collect();
    let checked = Checked { unused, key: manifest.material.parameters, sources: asked.sources, ..Checked::default() };
    (!absent.is_empty()).then_some(Recalled { checked, consulted: asked.consulted, found, absent })
}

/// From the newest run of the recipe that asked the same.
fn here(workspace: &Workspace, stage: &str, question: &Digest) -> Option<(Asked, Manifest)> {
    let records = workspace.history().iter().flat_map(|run| &run.stages);
    let mut same = records.filter(|record| record.stage == stage && record.digest.is_some());
    same.find_map(|record| {
        let asked = record.asked.as_ref().filter(|asked| asked.question == *question)?;
        Some((asked.clone(), workspace.cache.manifest(stage, &record.key).ok()??))
    })
}

fn as_recorded(workspace: &Workspace, source: &Source, base_dir: &Path, digest: Digest) -> Found {
    let entries = workspace.cache.entries_of(&digest).unwrap_or_default();
    let location = match source.kind {
        SourceKind::Path => base_dir.join(&source.location).to_string_lossy().into_owned(),
        SourceKind::HubModel | SourceKind::HubDataset => source.location.clone(),
    };
    Found {
        name: source.name.clone(),
        resolved: ResolvedSource {
            kind: source.kind,
            location,
            commit: None,
            parts: source.parts.clone(),
            digest: digest.to_string(),
        },
        identity: Identity { digest, entries },
    }
}

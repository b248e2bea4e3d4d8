//! Identity of what lies outside the cache: local files by their contents, Hub repositories by commit and file hashes.

use std::path::{Path, PathBuf};

use hub::{Commit, Hub, Repo};
use serde_json::json;
use spec::glob::matches_any;
use stage::{Exit, ResolvedSource, Source, SourceKind};
use store::{Cache, Entry, Identity};

use crate::error::{Error, Result};

/// A source with what it is made of.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) resolved: ResolvedSource,
    pub(crate) identity: Identity,
}

/// Finds identities; connects to the Hub only when the cache cannot answer.
pub(crate) struct Finder<'a> {
    cache: &'a Cache,
    /// Ask the Hub again which commit a revision means.
    update: bool,
    hub: Option<Hub>,
}

impl<'a> Finder<'a> {
    pub(crate) fn new(cache: &'a Cache, update: bool) -> Self {
        Self { cache, update, hub: None }
    }

    /// The source's identity now. `Err` is (exit code, diagnostic), for the caller to place.
    pub(crate) fn find(
        &mut self,
        source: &Source,
        base_dir: &Path,
    ) -> std::result::Result<Found, (Exit, Box<dyn miette::Diagnostic>)> {
        let (location, commit, identity) = match source.kind {
            SourceKind::Path => {
                let path = base_dir.join(&source.location);
                let identity = self.cache.identify(&path, &source.parts).map_err(|error| {
                    let exit = if matches!(error, store::Error::Io(_)) { Exit::Io } else { Exit::Input };
                    (exit, Box::new(error) as Box<dyn miette::Diagnostic>)
                })?;
                (path.to_string_lossy().into_owned(), None, identity)
            }
            SourceKind::HubModel | SourceKind::HubDataset => {
                let (commit, identity) = self
                    .find_on_hub(source)
                    .map_err(|error| (Exit::Hub, Box::new(error) as Box<dyn miette::Diagnostic>))?;
                (source.location.clone(), Some(commit), identity)
            }
        };
        let resolved = ResolvedSource {
            kind: source.kind,
            location,
            commit,
            parts: source.parts.clone(),
            digest: identity.digest.to_string(),
        };
        Ok(Found { name: source.name.clone(), resolved, identity })
    }

    fn find_on_hub(&mut self, source: &Source) -> std::result::Result<(String, Identity), hub::Error> {
        let repo = match source.kind {
            SourceKind::HubModel => Repo::model(&source.location)?,
            SourceKind::Path | SourceKind::HubDataset => Repo::dataset(&source.location)?,
        };
        let named = json!({"kind": source.kind, "location": source.location, "revision": source.revision});
        let known: Option<String> = if self.update { None } else { self.cache.recall("hub-commits", &named) };
        let commit: Commit = if let Some(commit) = known.and_then(|known| known.parse().ok()) {
            commit
        } else {
            let commit = self.hub()?.resolve(&repo, source.revision.as_deref())?;
            self.cache.remember("hub-commits", &named, &commit.as_str());
            commit
        };
        let pinned = json!({"kind": source.kind, "location": source.location, "commit": commit.as_str()});
        let files: Vec<Entry> = if let Some(files) = self.cache.recall("hub-files", &pinned) {
            files
        } else {
            let files: Vec<Entry> = self
                .hub()?
                .files(&repo, &commit)?
                .into_iter()
                .map(|file| Entry { path: file.path, digest: file.identity })
                .collect();
            self.cache.remember("hub-files", &pinned, &files);
            files
        };
        let counted: Vec<Entry> = files.into_iter().filter(|file| matches_any(&source.parts, &file.path)).collect();
        if counted.is_empty() {
            let globs = source.parts.iter().map(|part| format!("`{part}`")).collect::<Vec<_>>().join(", ");
            return Err(hub::Error::Nothing { repo: repo.to_string(), globs, commit: commit.to_string() });
        }
        Ok((commit.to_string(), Identity::of_entries(counted)))
    }

    fn hub(&mut self) -> std::result::Result<&Hub, hub::Error> {
        if self.hub.is_none() {
            self.hub = Some(Hub::from_env()?);
        }
        // Just set.
        self.hub.as_ref().ok_or_else(|| hub::Error::Settings { message: "no connection".to_owned() })
    }
}

/// Whether the local files of a source are still what they were when they were identified.
pub(crate) fn unchanged(cache: &Cache, found: &Found) -> Result<bool> {
    if found.resolved.kind != SourceKind::Path {
        return Ok(true);
    }
    match cache.identify(&PathBuf::from(&found.resolved.location), &found.resolved.parts) {
        Ok(now) => Ok(now.digest == found.identity.digest),
        Err(store::Error::Missing { .. } | store::Error::Empty { .. }) => Ok(false),
        Err(error) => Err(Error::from(error)),
    }
}

//! Identity of what lies outside the cache: local files by their contents, Hub repositories by commit and file hashes.

use std::path::{Path, PathBuf};

use hub::{Commit, Hub, Repo};
use miette::{Diagnostic, MietteDiagnostic};
use serde_json::json;
use spec::glob::{matches_any, told};
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
    /// Folders that the runner itself writes to, absolute.
    own: Vec<PathBuf>,
    /// Ask the Hub again which commit a revision means.
    update: bool,
    hub: Option<Hub>,
}

impl<'a> Finder<'a> {
    /// `runs` is the folder of links, which need not exist yet.
    pub(crate) fn new(cache: &'a Cache, runs: &Path, update: bool) -> Self {
        let own = [cache.root(), runs].into_iter().filter_map(real).collect();
        Self { cache, own, update, hub: None }
    }

    /// The source's identity now. `Err` is (exit code, diagnostic), for the caller to place.
    pub(crate) fn find(
        &mut self,
        source: &Source,
        base_dir: &Path,
    ) -> std::result::Result<Found, (Exit, Box<dyn Diagnostic>)> {
        let mut parts = source.parts.clone();
        let (location, commit, identity) = match source.kind {
            SourceKind::Path => {
                let path = base_dir.join(&source.location);
                parts.extend(without(&path, &self.own));
                let identity = self.cache.identify(&path, &parts).map_err(unusable)?;
                (path.to_string_lossy().into_owned(), None, identity)
            }
            SourceKind::HubModel | SourceKind::HubDataset => {
                let (commit, identity) =
                    self.find_on_hub(source).map_err(|error| (Exit::Hub, Box::new(error) as Box<dyn Diagnostic>))?;
                (source.location.clone(), Some(commit), identity)
            }
        };
        let resolved =
            ResolvedSource { kind: source.kind, location, commit, parts, digest: identity.digest.to_string() };
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
            let (repo, globs) = (repo.to_string(), told(&source.parts));
            return Err(hub::Error::Nothing { repo, globs, commit: commit.to_string() });
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

/// Why a local source has no identity: what cannot be read says nothing about the source.
fn unusable(error: store::Error) -> (Exit, Box<dyn Diagnostic>) {
    let store::Error::Io(error) = error else { return (Exit::Input, Box::new(error)) };
    let help = "see to its permissions and its disk, then run again; or take it out of the folder";
    (Exit::Io, Box::new(MietteDiagnostic::new(error.to_string()).with_help(help)))
}

/// The absolute path, links followed, of what exists at least as far as its parent.
fn real(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    let whole = fs_err::canonicalize(&absolute).ok();
    whole.or_else(|| Some(fs_err::canonicalize(absolute.parent()?).ok()?.join(absolute.file_name()?)))
}

/// Globs that take out those of the runner's `own` folders that lie inside a source: results are not what they were made of.
fn without(source: &Path, own: &[PathBuf]) -> Vec<String> {
    let Some(source) = real(source) else { return Vec::new() };
    let inside = own.iter().filter_map(|folder| folder.strip_prefix(&source).ok()?.to_str());
    // A `?` matches what would be a pattern.
    inside.filter(|folder| !folder.is_empty()).map(|folder| format!("!{}/*", folder.replace('*', "?"))).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runner_writes_inside_a_source_is_no_part_of_it_wherever_it_lies() {
        let folder = tempfile::tempdir().unwrap();
        let base = fs_err::canonicalize(folder.path()).unwrap();
        fs_err::create_dir_all(base.join("set/deep")).unwrap();
        std::os::unix::fs::symlink("set", base.join("link")).unwrap();
        let own = |paths: &[&str]| paths.iter().filter_map(|path| real(&base.join(path))).collect::<Vec<_>>();
        let inside = own(&["set/deep/cache", "link/runs", "elsewhere", "set-2", "set"]);
        let expected = ["!deep/cache/*", "!runs/*"];
        assert_eq!(without(&base.join("set"), &inside), expected);
        assert_eq!(without(&base.join("link/."), &inside), expected);
        // Results may be the source of another recipe.
        assert_eq!(without(&base.join("set/deep"), &own(&["set", "set/deep"])), Vec::<String>::new());
        fs_err::create_dir_all(base.join("set/runs")).unwrap();
        assert_eq!(without(&base.join("set"), &own(&["set/runs"])), ["!runs/*"], "the same once it is there");
    }
}

//! Artifacts from and to a remote that others share, as a run goes along.
//!
//! A remote that fails is told once, and the run goes on without it; one bad artifact there is told, and made here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use remote::{Pushed, Remote};
use serde_json::json;
use spec::Mistake;
use stage::{Event, Exit};
use store::{Artifact, Cache, Digest, Lookup, Manifest};

use crate::error::{Error, Result};
use crate::progress::Reporter;
use crate::recorded::Asked;
use crate::signals::Interrupt;

/// Notes by which a stage without its sources is known; see [`crate::recorded`].
const NOTES: &str = "asked";

/// A remote, and what became known of it.
pub(crate) struct Exchange {
    address: String,
    known: Mutex<Known>,
}

struct Known {
    /// `None` once it failed.
    remote: Option<std::sync::Arc<Remote>>,
    /// Manifests that it has.
    manifests: BTreeMap<(String, Digest), Manifest>,
    /// Artifacts that could not be had from it.
    struck: BTreeSet<(String, Digest)>,
    /// What people have not been told yet.
    troubles: Vec<String>,
}

/// Reporter and interrupt of the command that transfers.
pub(crate) struct Watch<'a> {
    pub(crate) reporter: &'a Mutex<Reporter>,
    pub(crate) interrupt: &'a Interrupt,
}

impl Watch<'_> {
    pub(crate) fn reporter(&self) -> MutexGuard<'_, Reporter> {
        self.reporter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self, stage: &str, phase: &str, done: u64, total: u64) -> ControlFlow<()> {
        let (phase, unit) = (phase.to_owned(), "bytes".to_owned());
        self.reporter().event(stage, &Event::Progress { phase, done, total: Some(total), unit, note: None });
        if self.interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Exchange {
    /// Opens a remote for a run; only an address that can never work is an error.
    pub(crate) fn open(address: &str) -> Result<Self> {
        let known = Known { remote: None, manifests: BTreeMap::new(), struck: BTreeSet::new(), troubles: Vec::new() };
        let exchange = Self { address: address.trim_end_matches('/').to_owned(), known: Mutex::new(known) };
        match Remote::open(address) {
            Ok(remote) => exchange.known().remote = Some(std::sync::Arc::new(remote)),
            Err(error @ remote::Error::Folder { .. }) => exchange.fails(&error),
            Err(error) => return Err(explained(&error)),
        }
        Ok(exchange)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The remote, unless it failed.
    pub(crate) fn remote(&self) -> Option<std::sync::Arc<Remote>> {
        self.known().remote.clone()
    }

    /// What went wrong since the last question.
    pub(crate) fn troubles(&self) -> Vec<String> {
        std::mem::take(&mut self.known().troubles)
    }

    /// Notes a failure: of one artifact if the remote is fine otherwise, else of the remote.
    pub(crate) fn fails(&self, error: &remote::Error) {
        let mut known = self.known();
        let rest = match error {
            remote::Error::Damaged { .. } => "it is not used",
            remote::Error::Unsound { .. } => "the remote goes without it",
            _ => {
                known.remote = None;
                "the run goes on without the remote"
            }
        };
        known.troubles.push(format!("{error}; {rest}"));
    }

    /// What the remote has under that key.
    pub(crate) fn manifest(&self, stage: &str, key: &Digest) -> Option<Manifest> {
        let name = (stage.to_owned(), *key);
        let remote = {
            let known = self.known();
            if known.struck.contains(&name) {
                return None;
            }
            if let Some(manifest) = known.manifests.get(&name) {
                return Some(manifest.clone());
            }
            known.remote.clone()?
        };
        match remote.manifest(stage, key) {
            Ok(manifest) => {
                // That it has none may change: someone else may be making it.
                self.known().manifests.extend(manifest.clone().map(|manifest| (name, manifest)));
                manifest
            }
            Err(error) => {
                self.known().struck.insert(name);
                self.fails(&error);
                None
            }
        }
    }

    /// What was noted when an artifact came out of that question, and its manifest.
    pub(crate) fn recall(&self, stage: &str, question: &Digest) -> Option<(Asked, Manifest)> {
        match self.remote()?.recall::<(Asked, Digest)>(NOTES, question) {
            Ok(noted) => {
                let (asked, key) = noted.filter(|(asked, _)| asked.question == *question)?;
                Some((asked, self.manifest(stage, &key)?))
            }
            Err(error) => {
                self.fails(&error);
                None
            }
        }
    }

    /// Brings an artifact into the cache. `None`: it could not be had, and is not offered again.
    pub(crate) fn fetch(&self, cache: &Cache, watch: &Watch<'_>, manifest: &Manifest) -> Result<Option<Artifact>> {
        let (stage, key) = (&manifest.stage, manifest.key);
        let _lock = lock(cache, watch, stage, &key)?.0;
        if let Lookup::Hit(artifact) = cache.artifact(stage, &key) {
            return Ok(Some(*artifact));
        }
        let Some(remote) = self.remote() else { return Ok(None) };
        watch.reporter().fetches(stage, manifest.bytes(), &self.address);
        let progress = |done, total| watch.progress(stage, "fetching", done, total);
        let began = Instant::now();
        match remote.pull(cache, manifest.clone(), &progress) {
            Ok(artifact) => {
                watch.reporter().fetched(stage, began.elapsed().as_secs_f64(), &artifact);
                Ok(Some(artifact))
            }
            Err(error @ (remote::Error::Stopped { .. } | remote::Error::Store(_) | remote::Error::Io(_))) => {
                Err(explained(&error))
            }
            Err(error) => {
                self.known().struck.insert((stage.clone(), key));
                if matches!(error, remote::Error::Damaged { .. }) {
                    doubt(&remote, cache);
                }
                self.fails(&error);
                Ok(None)
            }
        }
    }

    /// Brings an artifact to the remote unless it is known to be there. One that was made anew is not: it was made because
    /// the remote had it no more, or had it damaged.
    pub(crate) fn share(&self, cache: &Cache, watch: &Watch<'_>, artifact: &Artifact, asked: &Asked) {
        let Manifest { stage, key, digest, seal, .. } = &artifact.manifest;
        let question = json!({
            "remote": self.address, "stage": stage, "key": key, "digest": digest, "question": asked.question,
        });
        let Some(remote) = self.remote() else { return };
        // The seal covers how long it took, so each making has one of its own.
        let this = seal.unwrap_or(*digest);
        if cache.recall::<Digest>("pushed", &question) == Some(this) {
            return;
        }
        match push(&remote, cache, watch, artifact, asked, false) {
            Ok(_) => cache.remember("pushed", &question, &this),
            Err(remote::Error::Stopped { .. }) => {}
            Err(error) => self.fails(&error),
        }
    }
}

/// Sends what the remote lacks of an artifact, and says so.
pub(crate) fn push(
    remote: &Remote,
    cache: &Cache,
    watch: &Watch<'_>,
    artifact: &Artifact,
    asked: &Asked,
    anew: bool,
) -> std::result::Result<Pushed, remote::Error> {
    let stage = &artifact.manifest.stage;
    let progress = |done, total| watch.progress(stage, "pushing", done, total);
    let doubted = doubt(remote, cache);
    let pushed = remote.push(cache, artifact, anew, &progress)?;
    if artifact.manifest.files.iter().any(|file| doubted.contains(&file.digest)) {
        cache.remember("doubted", &json!(remote.address()), &remote.doubted());
    }
    remote.note(NOTES, &asked.question, &(asked, artifact.manifest.key))?;
    watch.reporter().pushed(stage, pushed.files, pushed.bytes, remote.address());
    Ok(pushed)
}

/// Files that were found damaged in that remote and not put right, by this process or one before it, which all know of now:
/// one that was killed before it put them right would leave them as they are for good.
fn doubt(remote: &Remote, cache: &Cache) -> BTreeSet<Digest> {
    let question = json!(remote.address());
    let known: BTreeSet<Digest> = cache.recall("doubted", &question).unwrap_or_default();
    remote.doubt(&known);
    let doubted = remote.doubted();
    if doubted != known {
        cache.remember("doubted", &question, &doubted);
    }
    doubted
}

/// Waits for the right to make or fetch a key; also says whether it had to wait.
pub(crate) fn lock(cache: &Cache, watch: &Watch<'_>, stage: &str, key: &Digest) -> Result<(store::Lock, bool)> {
    let mut waited = false;
    loop {
        if let Some(lock) = cache.try_lock(stage, key)? {
            return Ok((lock, waited));
        }
        if !waited {
            watch.reporter().waits(stage);
            waited = true;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// The failure of a command, with its exit code.
pub(crate) fn explained(error: &remote::Error) -> Error {
    match error {
        remote::Error::Address { .. } | remote::Error::Secret { .. } => Error::from_diagnostic(Exit::Usage, error),
        remote::Error::Folder { .. } | remote::Error::Unreachable { .. } | remote::Error::Refused { .. } => {
            Error::from_diagnostic(Exit::Hub, error)
        }
        remote::Error::Damaged { .. } | remote::Error::Unsound { .. } => Error::from_diagnostic(Exit::Input, error),
        remote::Error::Stopped { .. } => Error::new(
            Exit::Interrupted,
            Mistake::new("interrupted").help(format!("{error}; run the same command to go on")),
        ),
        remote::Error::Store(store::Error::Io(io)) | remote::Error::Io(io) => {
            Error::from(std::io::Error::new(io.kind(), io.to_string()))
        }
        remote::Error::Store(_) => Error::from_diagnostic(Exit::Failed, error),
    }
}

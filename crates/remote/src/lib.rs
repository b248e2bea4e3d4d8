//! Artifacts in an object store that a team or CI shares: pushed and pulled by digest. Knows no stage and no recipe.
//!
//! ```text
//! objects/ab/abcdef…            files by BLAKE3 digest
//! artifacts/<stage>/<key>.json  manifests, written after all their files: a reader never sees half an artifact
//! notes/<kind>/<digest>.json    small answers by the digest of their question
//! ```
//!
//! Nothing that comes from there is believed: a manifest must agree with itself and with the key it was asked for, a file
//! with its digest. Credentials come from the environment only, and no message holds one.

mod address;
mod error;
mod notes;
mod pull;
mod push;
pub mod testing;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::ObjectStore;
use object_store::path::Path;
use store::Digest;
use tokio::runtime::Runtime;

pub use error::Error;
pub use push::Pushed;

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;

/// Called with bytes done and bytes in all; `Break` ends the transfer with [`Error::Stopped`].
pub type Progress<'a> = &'a (dyn Fn(u64, u64) -> ControlFlow<()> + Sync);

/// Requests under way at a time.
const PARALLEL: usize = 8;

/// A blocking client with its own runtime; not for use inside another one.
pub struct Remote {
    store: Arc<dyn ObjectStore>,
    root: Path,
    address: String,
    runtime: Runtime,
    /// Files that were found damaged there: a push replaces them.
    damaged: Mutex<BTreeSet<Digest>>,
}

impl Remote {
    /// Opens the store at `file:///folder`, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
    /// Credentials, endpoint and region come from `AWS_…`, `GOOGLE_…` or `AZURE_…` variables. Nothing is asked yet.
    pub fn open(address: &str) -> Result<Self> {
        let text = |text: std::ffi::OsString| text.into_string().ok();
        Self::open_with(address, std::env::vars_os().filter_map(|(name, value)| text(name).zip(text(value))))
    }

    /// The same with these variables instead of the environment's.
    pub fn open_with(address: &str, variables: impl Iterator<Item = (String, String)>) -> Result<Self> {
        let (store, root) = address::open(address, variables)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let address = address.trim_end_matches('/').to_owned();
        Ok(Self { store, root, address, runtime, damaged: Mutex::default() })
    }

    /// The address, as written.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Files that are damaged there or gone, as far as pulls found or [`Remote::doubt`] told, and that no push replaced since.
    pub fn doubted(&self) -> BTreeSet<Digest> {
        self.damaged().clone()
    }

    /// Has the next push that holds one of these files replace it: another process found it damaged there.
    pub fn doubt<'a>(&self, files: impl IntoIterator<Item = &'a Digest>) {
        self.damaged().extend(files);
    }

    fn damaged(&self) -> MutexGuard<'_, BTreeSet<Digest>> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn object(&self, digest: &Digest) -> Path {
        let name = digest.to_string();
        self.at(&["objects", &name[..2], &name])
    }

    fn manifest_path(&self, stage: &str, key: &Digest) -> Path {
        self.at(&["artifacts", stage, &format!("{key}.json")])
    }

    fn at(&self, parts: &[&str]) -> Path {
        parts.iter().fold(self.root.clone(), |path, part| path.join(*part))
    }

    fn failed(&self, what: &Path, error: &object_store::Error) -> Error {
        Error::of(&self.address, what.as_ref(), error)
    }

    fn harmed(&self, what: &Path, detail: impl Into<String>) -> Error {
        Error::Damaged { object: what.to_string(), remote: self.address.clone(), detail: detail.into() }
    }

    fn stopped(&self) -> Error {
        Error::Stopped { remote: self.address.clone() }
    }
}

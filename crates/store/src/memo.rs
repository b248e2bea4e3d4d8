//! Small remembered answers. Losing one costs time; a damaged one counts as lost.

use std::io::Write;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Cache, Digest, Result};

impl Cache {
    /// The answer remembered for `question`, if any.
    pub fn recall<T: DeserializeOwned>(&self, kind: &str, question: &Value) -> Option<T> {
        serde_json::from_slice(&fs_err::read(self.memo_path(kind, question)).ok()?).ok()
    }

    /// Remembers an answer.
    pub fn remember(&self, kind: &str, question: &Value, answer: &impl Serialize) -> Result<()> {
        let bytes = serde_json::to_vec(answer).map_err(std::io::Error::from)?;
        self.write_atomically(&self.memo_path(kind, question), &bytes)
    }

    pub(crate) fn memo_path(&self, kind: &str, question: &Value) -> PathBuf {
        self.root().join("memo").join(kind).join(format!("{}.json", Digest::of_json(question)))
    }

    /// Writes a whole file or nothing.
    pub(crate) fn write_atomically(&self, path: &std::path::Path, bytes: &[u8]) -> Result<()> {
        let folder = path.parent().unwrap_or(self.root());
        fs_err::create_dir_all(folder)?;
        // Readable by all, as far as the umask allows: a team may share a cache.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        let mut file = tempfile::Builder::new().permissions(mode).tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    }
}

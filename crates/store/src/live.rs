//! What running commands use. A command that holds the cache notes each artifact before it looks for it; the collector
//! reads these notes and leaves the artifacts alone. A note is a file locked by its process, so it dies with it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use crate::lock::{open, try_exclusive};
use crate::{Cache, Digest, Result};

/// Held shared while an artifact is noted and looked up, and alone while the collector decides.
const GATE: &str = "gate.lock";

/// The notes of this process.
#[derive(Debug)]
pub(crate) struct Live {
    gate: PathBuf,
    notes: Mutex<(File, BTreeSet<String>)>,
    path: PathBuf,
}

impl Live {
    /// Notes an artifact; while the answer lives, nothing is collected.
    pub(crate) fn pin(&self, stage: &str, key: &Digest) -> Option<File> {
        let gate = open(&self.gate).ok()?;
        gate.lock_shared().ok()?;
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, known) = &mut *notes;
        let note = format!("{stage} {key}");
        if !known.contains(&note) {
            writeln!(file, "{note}").ok()?;
            known.insert(note);
        }
        Some(gate)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = fs_err::remove_file(&self.path);
    }
}

impl Cache {
    /// Keeps all that is looked up or published from now on from being collected while this process lives. A cache that
    /// cannot be written is used without: nobody collects there.
    #[must_use]
    pub fn hold(mut self) -> Self {
        let folder = self.root().join("live");
        let held = fs_err::create_dir_all(&folder).and_then(|()| {
            let file = tempfile::Builder::new().prefix(&format!("{}-", std::process::id())).tempfile_in(&folder)?;
            file.as_file().lock_shared()?;
            file.keep().map_err(std::io::Error::from)
        });
        if let Ok((file, path)) = held {
            let gate = self.lock_folder().join(GATE);
            self.live = Some(Arc::new(Live { gate, notes: Mutex::new((file, BTreeSet::new())), path }));
        }
        self
    }

    /// Closes the gate, once all lookups under way are done; until the answer is dropped no artifact becomes used.
    pub(crate) fn close_gate(&self) -> Result<File> {
        let gate = open(&self.lock_folder().join(GATE))?;
        gate.lock()?;
        Ok(gate)
    }

    /// Artifacts that running commands use; notes of processes that are gone are removed. The gate must be closed.
    pub(crate) fn used(&self) -> BTreeSet<(String, Digest)> {
        let folder = self.root().join("live");
        let mut used = BTreeSet::new();
        for name in crate::cache::names(&folder) {
            let path = folder.join(&name);
            // Its owner holds a shared lock as long as it lives.
            if let Ok(Some(_)) = try_exclusive(&path) {
                let _ = fs_err::remove_file(&path);
                continue;
            }
            let text = fs_err::read_to_string(&path).unwrap_or_default();
            used.extend(text.lines().filter_map(|line| {
                let (stage, key) = line.split_once(' ')?;
                Some((stage.to_owned(), key.parse().ok()?))
            }));
        }
        used
    }
}

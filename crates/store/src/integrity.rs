//! Whether a file of an artifact still holds what was published, and what becomes of one that does not: it is healed from a
//! sound object of the same digest, or moved to `quarantine/`, never read as good.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use serde_json::json;

use crate::identity::RACY;
use crate::publish::{linking, replace_by_link, write_whole};
use crate::{Artifact, Cache, Digest, FileRecord, FileStamp, Manifest};

/// How hard to look at a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// A digest remembered for the file's state is believed.
    Stamps,
    /// The file is read to its end, unless this process did so before.
    Contents,
}

/// Digest → state of a file with these contents, as this process has seen it.
pub(crate) type Hashed = Arc<Mutex<BTreeMap<Digest, FileStamp>>>;

/// What is wrong with a file.
enum Harm {
    Missing,
    Size(u64),
    Contents,
    Unreadable(String),
}

/// Artifacts of more bytes than this are worth a short wait, so that they need not be hashed again.
const WORTH_A_WAIT: u64 = 256 << 20;

impl Cache {
    /// Whether all files are sound; else what is wrong with the first that is not. Damaged files step aside.
    pub(crate) fn check_files(&self, manifest: &Manifest, care: Care) -> Result<(), String> {
        let next = AtomicUsize::new(0);
        let harmed = Mutex::new(BTreeMap::new());
        let work = || {
            while let Some(file) = manifest.files.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(reason) = self.check_file(manifest, file, care) {
                    harmed.lock().unwrap_or_else(PoisonError::into_inner).insert(&file.path, reason);
                }
            }
        };
        let threads = match care {
            Care::Stamps => 1,
            Care::Contents => thread::available_parallelism().map_or(1, usize::from).min(manifest.files.len()),
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        let harmed = harmed.into_inner().unwrap_or_else(PoisonError::into_inner);
        let more = harmed.len().saturating_sub(1);
        match harmed.into_values().next() {
            None => Ok(()),
            Some(reason) if more == 0 => Err(reason),
            Some(reason) => Err(format!("{reason}, and {more} more")),
        }
    }

    fn check_file(&self, manifest: &Manifest, file: &FileRecord, care: Care) -> Result<(), String> {
        let path = self.artifact_path(&manifest.stage, &manifest.key).join(&file.path);
        let Err(harm) = self.judge(&path, file, care) else { return Ok(()) };
        let object = self.object_path(&file.digest);
        if object_differs(&object, &path) && self.judge(&object, file, Care::Contents).is_ok() {
            replace_by_link(&object, &path, &linking(&path));
            if self.judge(&path, file, care).is_ok() {
                return Ok(());
            }
        }
        let name = &file.path;
        let quarantined = || self.quarantine_path(&file.digest).exists().then(|| self.told(&file.digest));
        Err(match harm {
            Harm::Missing => match quarantined() {
                Some(place) => format!("`{name}` was damaged and lies in `{place}`"),
                None => format!("`{name}` is missing"),
            },
            Harm::Size(found) => {
                let aside = self.quarantine(manifest, file, &path);
                format!("`{name}` has {found} bytes instead of {}{aside}", file.bytes)
            }
            Harm::Contents => {
                let aside = self.quarantine(manifest, file, &path);
                format!("the contents of `{name}` are not those that were published{aside}")
            }
            Harm::Unreadable(error) => format!("`{name}` cannot be read: {error}"),
        })
    }

    pub(crate) fn has_object(&self, file: &FileRecord) -> bool {
        self.judge(&self.object_path(&file.digest), file, Care::Stamps).is_ok()
    }

    fn judge(&self, path: &Path, file: &FileRecord, care: Care) -> Result<(), Harm> {
        let stamp = match FileStamp::of(path) {
            Ok(stamp) => stamp,
            Err(_) if !path.exists() => return Err(Harm::Missing),
            Err(error) => return Err(Harm::Unreadable(error.to_string())),
        };
        if stamp.size != file.bytes {
            return Err(Harm::Size(stamp.size));
        }
        let question = json!(file.digest);
        let mut known = Vec::new();
        if care == Care::Stamps {
            known = self.recall::<Vec<FileStamp>>("sound", &question).unwrap_or_default();
            if known.contains(&stamp) && stamp.settled(self.memo.written("sound", &question)) {
                return Ok(());
            }
        } else if self.seen(&file.digest, &stamp) {
            return Ok(());
        }
        let found = Digest::of_file(path).map_err(|error| Harm::Unreadable(error.to_string()))?;
        if found != file.digest {
            return Err(Harm::Contents);
        }
        self.note_sound(&file.digest, stamp, known);
        Ok(())
    }

    /// Whether this process knows the contents of that very file. Another name for it changes its ctime, nothing else.
    fn seen(&self, digest: &Digest, stamp: &FileStamp) -> bool {
        let hashed = self.hashed.lock().unwrap_or_else(PoisonError::into_inner);
        hashed.get(digest).is_some_and(|seen| FileStamp { ctime: stamp.ctime, ..*seen } == *stamp)
    }

    fn note_sound(&self, digest: &Digest, stamp: FileStamp, mut known: Vec<FileStamp>) {
        // A file system without hard links has one copy of an object for each artifact that holds it.
        const COPIES: usize = 16;
        known.retain(|other| (other.dev, other.ino) != (stamp.dev, stamp.ino));
        known.insert(0, stamp);
        known.truncate(COPIES);
        self.remember("sound", &json!(digest), &known);
        self.hashed.lock().unwrap_or_else(PoisonError::into_inner).insert(*digest, stamp);
    }

    /// Remembers the files of an artifact that was hashed while it was published.
    pub(crate) fn note_published(&self, artifact: &Artifact) {
        if artifact.manifest.bytes() > WORTH_A_WAIT {
            // The last link was made just now; a stamp is believed only once it is older than the clock's step.
            thread::sleep(RACY + RACY / 4);
        }
        for file in &artifact.manifest.files {
            if let Ok(stamp) = FileStamp::of(&artifact.path.join(&file.path)) {
                self.note_sound(&file.digest, stamp, Vec::new());
            }
        }
    }

    fn quarantine_path(&self, digest: &Digest) -> PathBuf {
        self.root().join("quarantine").join(digest.to_string())
    }

    fn told(&self, digest: &Digest) -> String {
        self.quarantine_path(digest).display().to_string()
    }

    /// Moves a damaged file out of its artifact and its object, and says where it is now. On a cache that cannot be written
    /// it stays, and is found again.
    fn quarantine(&self, manifest: &Manifest, file: &FileRecord, path: &Path) -> String {
        let (object, aside) = (self.object_path(&file.digest), self.quarantine_path(&file.digest));
        if !object_differs(&object, path) {
            let _ = fs_err::remove_file(&object);
        }
        let moved = fs_err::create_dir_all(self.root().join("quarantine")).and_then(|()| fs_err::rename(path, &aside));
        if moved.is_err() {
            return String::new();
        }
        // Renaming one name of a file over another of the same file does nothing.
        let _ = fs_err::remove_file(path);
        let note = json!({"stage": manifest.stage, "key": manifest.key, "path": file.path, "digest": file.digest,
            "bytes": file.bytes, "found": Digest::of_file(&aside).ok()});
        let _ = write_whole(&aside.with_extension("json"), format!("{note:#}\n").as_bytes(), false);
        format!("; it was moved to `{}`", self.told(&file.digest))
    }
}

/// Whether the object is there and is another file than `path`.
fn object_differs(object: &Path, path: &Path) -> bool {
    let inode = |path: &Path| fs_err::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    let object = inode(object);
    object.is_some() && object != inode(path)
}

#[cfg(test)]
mod tests;

//! Advisory locks (`flock`): one maker per artifact, and the gate between those who look up and the one who collects.
//!
//! The kernel releases a lock when its process ends, however it ends, so no lock is ever stale. On NFS, Linux turns `flock`
//! into byte-range locks of the server (NFS v4, or v3 with lockd), which hold across hosts; a mount with `local_lock=flock`
//! or `nolock` would break that promise and must not hold a shared cache.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::{Cache, Digest, Result};

/// Exclusive right to make one artifact; given up when dropped or when the process dies.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// The lock as an empty standard input. A process that is started with it holds the lock, too: if its starter is killed,
    /// nobody else begins in the same work folder before it has ended as well.
    pub fn as_stdin(&self) -> Result<Stdio> {
        Ok(Stdio::from(self.file.try_clone()?))
    }
}

impl Cache {
    /// Takes the right to make that artifact; `None` if another process has it.
    pub fn try_lock(&self, stage: &str, key: &Digest) -> Result<Option<Lock>> {
        let path = self.lock_folder().join(format!("{stage}-{key}.lock"));
        Ok(try_exclusive(&path)?.map(|file| Lock { file }))
    }

    pub(crate) fn lock_folder(&self) -> PathBuf {
        self.root().join("locks")
    }
}

/// The file at `path`, locked for us alone; `None` if another process has it.
pub(crate) fn try_exclusive(path: &Path) -> Result<Option<File>> {
    loop {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) if is_at(&file, path) => return Ok(Some(file)),
            // Collected between the opening and the lock.
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
    }
}

/// Opens the file of a lock, making it if need be.
pub(crate) fn open(path: &Path) -> Result<File> {
    if let Some(folder) = path.parent() {
        fs_err::create_dir_all(folder)?;
    }
    Ok(fs_err::OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?.into_parts().0)
}

/// Whether `path` still is that file.
fn is_at(file: &File, path: &Path) -> bool {
    let same = |a: std::fs::Metadata, b: std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().ok().zip(fs_err::metadata(path).ok()).is_some_and(|(a, b)| same(a, b))
}

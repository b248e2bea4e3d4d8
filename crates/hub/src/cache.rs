//! The cache on disk, laid out as `huggingface_hub` does (`refs/`, `blobs/`, `snapshots/`, `.locks/`), so both share it.
//! Two things are added, beside them: the file list of a commit (`listings/`), so that a commit is listed once and also
//! offline, and which state of a blob was hashed (`checked/`).

use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Commit, Repo};

/// A file of a repository at a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteFile {
    /// Path inside the repository, with `/`.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Identity of the contents: SHA-256 (64 hex digits) of a large file, git blob id (40) of a small one.
    pub identity: String,
    /// Whether the Hub keeps it in Xet storage, which `hf-hub` reads faster than plain HTTP does.
    #[serde(default)]
    pub(crate) xet: bool,
}

impl RemoteFile {
    /// Whether path and identity are safe to make file names of.
    pub(crate) fn is_safe(&self) -> bool {
        let inside = Path::new(&self.path).components().all(|part| matches!(part, Component::Normal(_)));
        let plain = !self.identity.is_empty() && self.identity.bytes().all(|b| b.is_ascii_alphanumeric());
        inside && plain && !self.path.is_empty() && !self.path.contains(['\\', '\0'])
    }
}

/// Paths of one repository in the cache.
pub(crate) struct Layout {
    root: PathBuf,
    locks: PathBuf,
}

impl Layout {
    pub(crate) fn new(cache: &Path, repo: &Repo) -> Self {
        let folder = repo.folder();
        Self { root: cache.join(&folder), locks: cache.join(".locks").join(folder) }
    }

    pub(crate) fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.root.join("snapshots").join(commit.as_str())
    }

    pub(crate) fn blob(&self, identity: &str) -> PathBuf {
        self.root.join("blobs").join(identity)
    }

    /// What a blob was when it was hashed last; see [`crate::sound`].
    pub(crate) fn checked(&self, identity: &str) -> PathBuf {
        self.root.join("checked").join(identity)
    }

    /// Lock file of a blob; also taken by `huggingface_hub`.
    pub(crate) fn lock(&self, identity: &str) -> PathBuf {
        self.locks.join(format!("{identity}.lock"))
    }

    pub(crate) fn read_ref(&self, revision: &str) -> io::Result<Option<Commit>> {
        match fs_err::read_to_string(self.root.join("refs").join(revision)) {
            Ok(text) => Ok(text.trim().parse().ok()),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory | ErrorKind::NotADirectory) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn write_ref(&self, revision: &str, commit: &Commit) -> io::Result<()> {
        if self.read_ref(revision)?.as_ref() == Some(commit) {
            return Ok(());
        }
        replace(&self.root.join("refs").join(revision), commit.as_str().as_bytes())
    }

    fn listing(&self, commit: &Commit) -> PathBuf {
        self.root.join("listings").join(format!("{commit}.json"))
    }

    /// The stored list of a commit; `None` if it was not stored or is damaged.
    pub(crate) fn read_listing(&self, commit: &Commit) -> Option<Vec<RemoteFile>> {
        let bytes = fs_err::read(self.listing(commit)).ok()?;
        let files: Vec<RemoteFile> = serde_json::from_slice(&bytes).ok()?;
        let sorted = files.is_sorted_by(|a, b| a.path < b.path);
        (sorted && files.iter().all(RemoteFile::is_safe)).then_some(files)
    }

    pub(crate) fn write_listing(&self, commit: &Commit, files: &[RemoteFile]) -> io::Result<()> {
        replace(&self.listing(commit), &serde_json::to_vec(files)?)
    }

    /// What lies in a snapshot folder, for caches that Python filled. Blob names are identities.
    pub(crate) fn walk_snapshot(&self, commit: &Commit) -> io::Result<Vec<RemoteFile>> {
        let root = self.snapshot(commit);
        let mut files = Vec::new();
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            let entries = match fs_err::read_dir(&folder) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                other => other?,
            };
            for entry in entries {
                let path = entry?.path();
                // Follows the link into `blobs`; a dangling one is a file that is not there.
                let Ok(meta) = fs_err::metadata(&path) else { continue };
                if meta.is_dir() {
                    folders.push(path);
                    continue;
                }
                let blob = fs_err::canonicalize(&path)?;
                let identity = blob.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let inside = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
                files.push(RemoteFile { path: inside, size: meta.len(), identity, xet: false });
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// Puts a blob at its place in the snapshot.
    pub(crate) fn link(&self, commit: &Commit, file: &RemoteFile) -> io::Result<PathBuf> {
        let pointer = self.snapshot(commit).join(&file.path);
        let up = "../".repeat(2 + file.path.split('/').count() - 1);
        let target = PathBuf::from(format!("{up}blobs/{}", file.identity));
        if fs_err::read_link(&pointer).is_ok_and(|old| old == target) {
            return Ok(pointer);
        }
        create_parent(&pointer)?;
        match fs_err::remove_file(&pointer) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        match fs_err::os::unix::fs::symlink(&target, &pointer) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => Ok(pointer), // another process linked the same blob meanwhile
        }
    }
}

pub(crate) fn create_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs_err::create_dir_all)
}

/// Writes a file whole or not at all.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    create_parent(path)?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    fs_err::write(&temporary, bytes)?;
    fs_err::rename(&temporary, path)
}

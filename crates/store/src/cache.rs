//! The folder that holds everything: where things lie, whether an artifact is there, and who may make it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::integrity::{Care, Hashed};
use crate::live::Live;
use crate::publish::write_whole;
use crate::{Digest, Error, Manifest, Memo, Result};

/// Version of the layout.
pub(crate) const FORMAT: &str = "1";
/// Name of an artifact's manifest.
pub(crate) const MANIFEST: &str = "manifest.json";

/// A cache folder.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
    pub(crate) memo: Memo,
    /// Files that this process has read to their end, or written.
    pub(crate) hashed: Hashed,
    /// Keeps what was looked up from being collected; see [`Cache::hold`].
    pub(crate) live: Option<Arc<Live>>,
}

/// A published artifact.
#[derive(Debug, Clone)]
pub struct Artifact {
    /// Its folder.
    pub path: PathBuf,
    /// What it says of itself.
    pub manifest: Manifest,
}

/// Answer to "is it there?".
#[derive(Debug, Clone)]
pub enum Lookup {
    /// Whole: every file has the contents that were published.
    Hit(Box<Artifact>),
    /// Never made, or removed.
    Absent,
    /// There, but not to be used: the reason.
    Broken(String),
}

/// Folders of work in progress.
#[derive(Debug, Clone)]
pub struct Staging {
    /// Becomes the artifact.
    pub out: PathBuf,
    /// Temporary files, kept between tries.
    pub scratch: PathBuf,
}

impl Staging {
    /// Notes how the work came out, before it is published: from then on its files are shared with others, and nobody may go on
    /// from them.
    pub fn note_end(&self, end: &impl Serialize) -> Result<()> {
        write_whole(&self.end_path(), &serde_json::to_vec(end).map_err(std::io::Error::from)?, true)
    }

    /// What was noted by a try that came no further.
    pub fn end<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&fs_err::read(self.end_path()).ok()?).ok()
    }

    /// Forgets what was noted: what came out cannot be published.
    pub fn forget_end(&self) {
        // If it is still there, the next try says the same once more.
        let _ = fs_err::remove_file(self.end_path());
    }

    fn end_path(&self) -> PathBuf {
        self.out.with_file_name("end.json")
    }
}

impl Cache {
    /// Opens a cache, making the folder if needed.
    pub fn open(root: &Path) -> Result<Self> {
        fs_err::create_dir_all(root)?;
        let root = fs_err::canonicalize(root)?;
        let memo = Memo::at(&root.join("memo"));
        let cache = Self { root, memo, hashed: Hashed::default(), live: None };
        let format = cache.root.join("format");
        match fs_err::read_to_string(&format) {
            Ok(found) if found.trim() == FORMAT => {}
            Ok(found) => return Err(Error::Format { path: cache.root, found: found.trim().to_owned() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // See https://bford.info/cachedir/: keeps back-up programs out.
                let tag = "Signature: 8a477f597d28d172789f06886806bc55\n";
                write_whole(&cache.root.join("CACHEDIR.TAG"), tag.as_bytes(), false)?;
                write_whole(&cache.root.join(".gitignore"), b"*\n", false)?;
                write_whole(&format, FORMAT.as_bytes(), true)?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(cache)
    }

    /// The folder, absolute.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the artifact of that key lies or would lie.
    pub fn artifact_path(&self, stage: &str, key: &Digest) -> PathBuf {
        self.root.join("artifacts").join(stage).join(key.to_string())
    }

    /// The artifact of that key, if it is whole. A file is hashed once per state of it, as told by (device, inode, size,
    /// mtime, ctime); damage that leaves all of these as they were is found by [`Cache::verify`].
    pub fn artifact(&self, stage: &str, key: &Digest) -> Lookup {
        self.look(stage, key, Care::Stamps)
    }

    /// The same, every file read to its end unless this process did so before.
    pub fn verify(&self, stage: &str, key: &Digest) -> Lookup {
        self.look(stage, key, Care::Contents)
    }

    fn look(&self, stage: &str, key: &Digest, care: Care) -> Lookup {
        let _held = self.live.as_ref().map(|live| live.pin(stage, key));
        match self.manifest(stage, key) {
            Ok(Some(manifest)) => match self.check_files(&manifest, care) {
                Ok(()) => Lookup::Hit(Box::new(Artifact { path: self.artifact_path(stage, key), manifest })),
                Err(reason) => Lookup::Broken(reason),
            },
            Ok(None) => Lookup::Absent,
            Err(reason) => Lookup::Broken(reason),
        }
    }

    /// The manifest of that key, whatever became of the files.
    pub fn manifest(&self, stage: &str, key: &Digest) -> std::result::Result<Option<Manifest>, String> {
        let path = self.artifact_path(stage, key);
        let bytes = match fs_err::read(path.join(MANIFEST)) {
            Ok(bytes) => bytes,
            Err(_) if !path.exists() => return Ok(None),
            Err(_) => return Err("its manifest is missing".to_owned()),
        };
        Manifest::read(&bytes, stage, key).map(Some)
    }

    /// Manifests of a stage, newest first.
    pub fn manifests(&self, stage: &str) -> Vec<Manifest> {
        let Ok(folder) = fs_err::read_dir(self.root.join("artifacts").join(stage)) else { return Vec::new() };
        let mut found: Vec<_> = folder
            .flatten()
            .filter_map(|entry| {
                let key: Digest = entry.file_name().to_str()?.parse().ok()?;
                let written = fs_err::metadata(entry.path().join(MANIFEST)).ok()?.modified().ok()?;
                Some((written, self.manifest(stage, &key).ok()??))
            })
            .collect();
        found.sort_by(|(a, m), (b, n)| b.cmp(a).then_with(|| m.key.cmp(&n.key)));
        found.into_iter().map(|(_, manifest)| manifest).collect()
    }

    /// Stages that have artifacts, sorted.
    pub fn stages(&self) -> Vec<String> {
        names(&self.root.join("artifacts"))
    }

    /// Keys of a stage's artifacts, whole or not, sorted.
    pub fn keys(&self, stage: &str) -> Vec<Digest> {
        names(&self.root.join("artifacts").join(stage)).iter().filter_map(|name| name.parse().ok()).collect()
    }

    /// Keys of a stage for which there is a work folder, sorted.
    pub fn keys_in_work(&self, stage: &str) -> Vec<Digest> {
        names(&self.root.join("work").join(stage)).iter().filter_map(|name| name.parse().ok()).collect()
    }

    /// The small answers remembered beside the artifacts.
    pub fn memo(&self) -> &Memo {
        &self.memo
    }

    /// See [`Memo::recall`].
    pub fn recall<T: DeserializeOwned>(&self, kind: &str, question: &Value) -> Option<T> {
        self.memo.recall(kind, question)
    }

    /// See [`Memo::remember`].
    pub fn remember(&self, kind: &str, question: &Value, answer: &impl Serialize) {
        self.memo.remember(kind, question, answer);
    }

    /// Prepares the work folders; without `keep`, what an earlier try left is removed.
    pub fn stage_work(&self, stage: &str, key: &Digest, keep: bool) -> Result<Staging> {
        let work = self.work_path(stage, key);
        let staging = Staging { out: work.join("out"), scratch: work.join("scratch") };
        if !keep {
            remove_tree(&work)?;
        }
        fs_err::create_dir_all(&staging.out)?;
        fs_err::create_dir_all(&staging.scratch)?;
        Ok(staging)
    }

    /// Removes what a try left, unless a later one can go on from it.
    pub fn abandon_work(&self, stage: &str, key: &Digest, keep: bool) -> Result<()> {
        if !keep {
            remove_tree(&self.work_path(stage, key))?;
        }
        Ok(())
    }

    /// Scratch folders that unfinished tries of other keys of the stage left, the newest first.
    pub fn abandoned_scratch(&self, stage: &str, key: &Digest) -> Vec<PathBuf> {
        let folder = self.root.join("work").join(stage);
        let mut found: Vec<_> = names(&folder)
            .into_iter()
            .filter(|name| *name != key.to_string())
            .map(|name| folder.join(name).join("scratch"))
            .filter_map(|scratch| Some((fs_err::metadata(&scratch).ok()?.modified().ok()?, scratch)))
            .collect();
        found.sort_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, scratch)| scratch).collect()
    }

    /// Folders to bring the artifact of that key together from elsewhere, apart from those of a try to make it: `out` is
    /// emptied, `scratch` keeps what came before.
    pub fn stage_fetch(&self, stage: &str, key: &Digest) -> Result<Staging> {
        let work = self.work_path(stage, key);
        let staging = Staging { out: work.join("fetched"), scratch: work.join("parts") };
        remove_tree(&staging.out)?;
        fs_err::create_dir_all(&staging.out)?;
        fs_err::create_dir_all(&staging.scratch)?;
        Ok(staging)
    }

    pub(crate) fn work_path(&self, stage: &str, key: &Digest) -> PathBuf {
        self.root.join("work").join(stage).join(key.to_string())
    }
}

/// Names in a folder, sorted; none if it cannot be read.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs_err::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Removes a folder that may not be there.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    match fs_err::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

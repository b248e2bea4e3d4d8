//! The folder that holds everything: where things lie, whether an artifact is there, and who may make it.

use std::fs::TryLockError;
use std::path::{Path, PathBuf};

use crate::{Digest, Error, Manifest, Result};

/// Version of the layout.
pub(crate) const FORMAT: &str = "1";
/// Name of an artifact's manifest.
pub(crate) const MANIFEST: &str = "manifest.json";

/// A cache folder.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
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
    /// Whole, as far as sizes tell.
    Hit(Box<Artifact>),
    /// Never made, or removed.
    Absent,
    /// There, but not to be used: the reason.
    Broken(String),
}

/// Exclusive right to make one artifact; given up when dropped or when the process dies.
#[derive(Debug)]
pub struct Lock {
    _file: std::fs::File,
}

/// Folders of work in progress.
#[derive(Debug, Clone)]
pub struct Staging {
    /// Becomes the artifact.
    pub out: PathBuf,
    /// Temporary files, kept between tries.
    pub scratch: PathBuf,
}

impl Cache {
    /// Opens a cache, making the folder if needed.
    pub fn open(root: &Path) -> Result<Self> {
        fs_err::create_dir_all(root)?;
        let root = fs_err::canonicalize(root)?;
        let cache = Self { root };
        let format = cache.root.join("format");
        match fs_err::read_to_string(&format) {
            Ok(found) if found.trim() == FORMAT => {}
            Ok(found) => return Err(Error::Format { path: cache.root, found: found.trim().to_owned() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // See https://bford.info/cachedir/: keeps back-up programs out.
                let tag = "Signature: 8a477f597d28d172789f06886806bc55\n";
                cache.write_atomically(&cache.root.join("CACHEDIR.TAG"), tag.as_bytes())?;
                cache.write_atomically(&cache.root.join(".gitignore"), b"*\n")?;
                cache.write_atomically(&format, FORMAT.as_bytes())?;
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

    /// The artifact of that key, if it is whole.
    pub fn artifact(&self, stage: &str, key: &Digest) -> Lookup {
        let path = self.artifact_path(stage, key);
        let manifest = match self.manifest(stage, key) {
            Ok(Some(manifest)) => manifest,
            Ok(None) => return Lookup::Absent,
            Err(reason) => return Lookup::Broken(reason),
        };
        for file in &manifest.files {
            match fs_err::metadata(path.join(&file.path)) {
                Ok(meta) if meta.len() == file.bytes => {}
                Ok(meta) => {
                    return Lookup::Broken(format!(
                        "`{}` has {} bytes instead of {}",
                        file.path,
                        meta.len(),
                        file.bytes
                    ));
                }
                Err(_) => return Lookup::Broken(format!("`{}` is missing", file.path)),
            }
        }
        Lookup::Hit(Box::new(Artifact { path, manifest }))
    }

    /// The manifest of that key, whatever became of the files.
    pub fn manifest(&self, stage: &str, key: &Digest) -> std::result::Result<Option<Manifest>, String> {
        let path = self.artifact_path(stage, key);
        let bytes = match fs_err::read(path.join(MANIFEST)) {
            Ok(bytes) => bytes,
            Err(_) if !path.exists() => return Ok(None),
            Err(_) => return Err("its manifest is missing".to_owned()),
        };
        let manifest: Manifest =
            serde_json::from_slice(&bytes).map_err(|error| format!("its manifest cannot be read: {error}"))?;
        let asked = manifest.material.key() == *key && manifest.key == *key && manifest.stage == stage;
        let whole = Manifest::digest_of(&manifest.files) == manifest.digest;
        if asked && whole { Ok(Some(manifest)) } else { Err("its manifest contradicts itself".to_owned()) }
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

    /// Takes the right to make that artifact; `None` if another process has it.
    pub fn try_lock(&self, stage: &str, key: &Digest) -> Result<Option<Lock>> {
        let folder = self.root.join("locks");
        fs_err::create_dir_all(&folder)?;
        let path = folder.join(format!("{stage}-{key}.lock"));
        let file = fs_err::OpenOptions::new().create(true).truncate(false).write(true).open(&path)?.into_parts().0;
        match file.try_lock() {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error.into()),
        }
    }

    /// Prepares the work folders. Without `keep`, what an earlier try left in `out` is removed; `scratch` always stays.
    pub fn stage_work(&self, stage: &str, key: &Digest, keep: bool) -> Result<Staging> {
        let work = self.work_path(stage, key);
        let staging = Staging { out: work.join("out"), scratch: work.join("scratch") };
        if !keep {
            remove_tree(&staging.out)?;
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

    pub(crate) fn work_path(&self, stage: &str, key: &Digest) -> PathBuf {
        self.root.join("work").join(stage).join(key.to_string())
    }
}

/// Removes a folder that may not be there.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    match fs_err::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

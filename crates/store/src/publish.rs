//! From a work folder to an artifact: hash, link, manifest last, one rename.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::Value;
use spec::glob::matches_any;

use crate::cache::{MANIFEST, remove_tree};
use crate::{
    Artifact, Cache, Digest, Error, FileRecord, InputRecord, Lookup, Manifest, Material, Result, SCHEMA, SourceRecord,
    Staging,
};

/// What the maker says about finished work.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Kind of artifact.
    pub kind: String,
    /// What was asked.
    pub material: Material,
    /// See [`Manifest::sources`].
    pub sources: BTreeMap<String, SourceRecord>,
    /// See [`Manifest::inputs`].
    pub inputs: BTreeMap<String, InputRecord>,
    /// Globs of files with measurements; see [`FileRecord::measured`].
    pub measured: Vec<String>,
    /// See [`Manifest::ledger`].
    pub ledger: Value,
    /// See [`Manifest::info`].
    pub info: Value,
    /// See [`Manifest::summary`].
    pub summary: String,
    /// See [`Manifest::warnings`].
    pub warnings: Vec<String>,
    /// See [`Manifest::seconds`].
    pub seconds: f64,
}

impl Cache {
    /// Publishes `staging.out`; the caller holds the lock of the key. Until the last rename nothing is visible.
    ///
    /// If the same key was published before (a forced run) and the same bytes came out, the older artifact stays.
    pub fn publish(&self, staging: &Staging, finished: Finished) -> Result<Artifact> {
        let mut files = self.take_in(&staging.out)?;
        for file in &mut files {
            file.measured = !finished.measured.is_empty() && matches_any(&finished.measured, &file.path);
        }
        let stage = finished.material.stage.clone();
        let key = finished.material.key();
        let manifest = Manifest {
            schema: SCHEMA,
            stage: stage.clone(),
            kind: finished.kind,
            key,
            digest: Manifest::digest_of(&files),
            material: finished.material,
            files,
            sources: finished.sources,
            inputs: finished.inputs,
            ledger: finished.ledger,
            info: finished.info,
            summary: finished.summary,
            warnings: finished.warnings,
            seconds: finished.seconds,
            seal: None,
        }
        .sealed();
        let target = self.artifact_path(&stage, &key);
        let _held = self.live.as_ref().map(|live| live.pin(&stage, &key));
        let kept = match self.artifact(&stage, &key) {
            Lookup::Hit(old) if old.manifest.digest == manifest.digest => Some(*old),
            Lookup::Hit(_) | Lookup::Absent | Lookup::Broken(_) => None,
        };
        let artifact = match kept {
            Some(old) => old,
            None => self.place(&staging.out, target, manifest)?,
        };
        remove_tree(&self.work_path(&stage, &key))?;
        self.note_published(&artifact);
        Ok(artifact)
    }

    /// Publishes what was made elsewhere: the files in `staging.out` must be those of the manifest. The caller holds the
    /// lock of the key.
    pub fn adopt(&self, staging: &Staging, manifest: Manifest) -> Result<Artifact> {
        let found = self.take_in(&staging.out)?;
        let known = |file: &FileRecord| (file.path.clone(), (file.bytes, file.digest));
        let asked: BTreeMap<_, _> = manifest.files.iter().map(known).collect();
        let found: BTreeMap<_, _> = found.iter().map(known).collect();
        let mut paths = asked.keys().chain(found.keys());
        if let Some(path) = paths.find(|path| asked.get(*path) != found.get(*path)) {
            return Err(Error::Unpublishable { path: path.clone(), what: "not what its manifest says".to_owned() });
        }
        let (stage, key) = (manifest.stage.clone(), manifest.key);
        let _held = self.live.as_ref().map(|live| live.pin(&stage, &key));
        let artifact = self.place(&staging.out, self.artifact_path(&stage, &key), manifest)?;
        remove_tree(&self.work_path(&stage, &key))?;
        self.note_published(&artifact);
        Ok(artifact)
    }

    /// A sound object with the contents of a file, if there is one.
    pub fn object(&self, file: &FileRecord) -> Option<PathBuf> {
        self.has_object(file).then(|| self.object_path(&file.digest))
    }

    /// From a folder whose files are taken in to an artifact.
    fn place(&self, out: &Path, target: PathBuf, manifest: Manifest) -> Result<Artifact> {
        let text = serde_json::to_vec_pretty(&manifest).map_err(std::io::Error::from)?;
        // Beside `out`, so that a crash leaves nothing there that the next try would take for a result.
        let beside = out.with_file_name(MANIFEST);
        write_whole(&beside, &text, true)?;
        fs_err::rename(&beside, out.join(MANIFEST))?;
        sync_folder(out)?;
        self.move_into_place(out, &target, &self.work_path(&manifest.stage, &manifest.key).join("replaced"))?;
        Ok(Artifact { path: target, manifest })
    }

    fn move_into_place(&self, from: &Path, target: &Path, aside: &Path) -> Result<()> {
        let parent = target.parent().unwrap_or(self.root());
        fs_err::create_dir_all(parent)?;
        if target.exists() {
            // A broken or forced-over artifact steps aside first; a crash in between leaves "absent", which is safe.
            remove_tree(aside)?;
            fs_err::rename(target, aside)?;
            fs_err::rename(from, target)?;
        } else {
            fs_err::rename(from, target)?;
        }
        sync_folder(parent)
    }

    /// Hashes the files of a folder, makes each and the object of its digest one file, and makes sure that nobody else has
    /// a hand on them: links to outside become files of our own.
    fn take_in(&self, out: &Path) -> Result<Vec<FileRecord>> {
        let mut paths = Vec::new();
        list(out, "", &mut paths)?;
        // Where names are tried before they are given: a crash must leave none in `out`.
        let beside = out.with_file_name("taking");
        let mut same: BTreeMap<(u64, u64), Vec<String>> = BTreeMap::new();
        // Files of others that nobody will change in place.
        let mut shared = BTreeSet::new();
        for path in paths {
            let full = out.join(&path);
            let is_link = fs_err::symlink_metadata(&full)?.is_symlink();
            let is_shared = is_link && own(&fs_err::canonicalize(&full)?, &full, &beside)?;
            let meta = fs_err::metadata(&full)?;
            if is_shared {
                shared.insert((meta.dev(), meta.ino()));
            }
            same.entry((meta.dev(), meta.ino())).or_default().push(path);
        }
        let mut files = Vec::new();
        for (inode, paths) in &mut same {
            // A hash of one is a hash of all, as with weights that many checkpoints share.
            paths.sort();
            let first = out.join(&paths[0]);
            let meta = fs_err::metadata(&first)?;
            let others = meta.nlink() > paths.len() as u64;
            if others && is_writable(&meta) && !shared.contains(inode) {
                own(&first, &first, &beside)?;
            }
            if !shared.contains(inode) {
                // Shared by hard links from now on, so nobody should write to it by mistake.
                let mut permissions = meta.permissions();
                permissions.set_mode(permissions.mode() & !0o222);
                fs_err::set_permissions(&first, permissions)?;
            }
            let (bytes, digest) = self.keep_object(&first, &beside)?;
            for path in paths.drain(..) {
                let full = out.join(&path);
                if full != first {
                    replace_by_link(&first, &full, &beside);
                }
                files.push(FileRecord { path, bytes, digest, measured: false });
            }
        }
        files.sort();
        Ok(files)
    }

    /// Hashes a file of our own and makes it and the object of that digest one.
    fn keep_object(&self, path: &Path, beside: &Path) -> Result<(u64, Digest)> {
        let digest = Digest::of_file(path)?;
        let file = fs_err::File::open(path)?;
        file.sync_all()?;
        let meta = file.metadata()?;
        let object = self.object_path(&digest);
        if let Some(folder) = object.parent() {
            fs_err::create_dir_all(folder)?;
        }
        match fs_err::metadata(&object) {
            Ok(known) if (known.dev(), known.ino()) == (meta.dev(), meta.ino()) => {}
            Ok(known) if known.len() == meta.len() && Digest::of_file(&object)? == digest => {
                replace_by_link(&object, path, beside);
            }
            // No such object, or a damaged one: the fresh file takes its place.
            _ => replace_by_link(path, &object, &linking(&object)),
        }
        Ok((meta.len(), digest))
    }

    pub(crate) fn object_path(&self, digest: &Digest) -> PathBuf {
        let name = digest.to_string();
        self.root().join("objects").join(&name[..2]).join(name)
    }
}

fn is_writable(meta: &std::fs::Metadata) -> bool {
    meta.permissions().mode() & 0o222 != 0
}

/// Puts the contents of `real` at `path`, by way of `beside`. `true`: as the same file, since nobody will change it in place (it is
/// not writable, or a blob of the Hub's cache); `false`: as a copy.
fn own(real: &Path, path: &Path, beside: &Path) -> Result<bool> {
    // What a crash left there may be another's file.
    let _ = fs_err::remove_file(beside);
    let blob = real.parent().and_then(Path::file_name).is_some_and(|folder| folder == "blobs");
    let shared = (blob || !is_writable(&fs_err::metadata(real)?)) && fs_err::hard_link(real, beside).is_ok();
    if !shared {
        fs_err::copy(real, beside)?;
    }
    fs_err::rename(beside, path)?;
    Ok(shared)
}

/// A name of this process beside that of a file.
pub(crate) fn linking(to: &Path) -> PathBuf {
    let name = format!("{}.linking-{}", to.file_name().unwrap_or_default().to_string_lossy(), std::process::id());
    to.with_file_name(name)
}

/// Makes `to` a hard link of `from`, by way of `beside`. Objects only save space: a file system without links keeps two files.
pub(crate) fn replace_by_link(from: &Path, to: &Path, beside: &Path) {
    let _ = fs_err::remove_file(beside);
    if fs_err::hard_link(from, beside).is_ok() {
        // Nothing is lost if the rename fails: both files stay as they are. Where both names already were one file it
        // succeeds and does nothing (POSIX), so the extra name is removed in any case.
        let _ = fs_err::rename(beside, to);
        let _ = fs_err::remove_file(beside);
    }
}

/// Writes a whole file or nothing; `durable` survives a power failure.
pub(crate) fn write_whole(path: &Path, bytes: &[u8], durable: bool) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs_err::create_dir_all(folder)?;
    // Readable by all, as far as the umask allows: a team may share a cache.
    let mode = PermissionsExt::from_mode(0o644);
    let mut file = tempfile::Builder::new().permissions(mode).tempfile_in(folder)?;
    file.write_all(bytes)?;
    if durable {
        file.as_file().sync_all()?;
    }
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

fn sync_folder(path: &Path) -> Result<()> {
    Ok(fs_err::File::open(path)?.sync_all()?)
}

/// Files below `folder`, as paths with `/`. Anything but files, folders and links to files is refused.
fn list(folder: &Path, prefix: &str, paths: &mut Vec<String>) -> Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| Error::Name { path: path.clone() })?;
        let relative = format!("{prefix}{name}");
        let refuse = |what: &str| Error::Unpublishable { path: relative.clone(), what: what.to_owned() };
        let meta = fs_err::symlink_metadata(&path)?;
        if meta.is_dir() {
            list(&path, &format!("{relative}/"), paths)?;
        } else if meta.is_file() {
            // The manifest that a crash left just before the last rename is not part of the result.
            if relative != MANIFEST {
                paths.push(relative);
            }
        } else if meta.is_symlink() {
            match fs_err::metadata(&path) {
                Ok(target) if target.is_file() => paths.push(relative),
                Ok(_) => return Err(refuse("a link to a folder")),
                Err(_) => return Err(refuse("a link to nothing")),
            }
        } else {
            return Err(refuse("neither a file nor a folder"));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;

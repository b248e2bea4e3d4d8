//! From the remote into a cache: in parts, in order, resumed after a cut, each file held against its digest.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use bytes::Bytes;
use futures::StreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use store::{Artifact, Cache, Digest, FileRecord, Manifest};

use crate::{PARALLEL, Progress, Remote, Result};

/// Bytes of one request. A cut costs at most those that are under way.
const PART: u64 = 2 << 20;
/// A manifest or note of more bytes is none of ours.
const LARGEST: u64 = 256 << 20;

/// A file on its way.
struct Coming<'a> {
    record: &'a FileRecord,
    object: Path,
    path: PathBuf,
    /// Bytes that an earlier try left.
    from: u64,
}

impl Remote {
    /// The manifest of an artifact, if the remote has it.
    pub fn manifest(&self, stage: &str, key: &Digest) -> Result<Option<Manifest>> {
        let path = self.manifest_path(stage, key);
        match self.read_small(&path)? {
            None => Ok(None),
            Some(bytes) => Manifest::read(&bytes, stage, key).map(Some).map_err(|reason| self.harmed(&path, reason)),
        }
    }

    /// Brings an artifact into the cache; the caller holds the lock of its key. Files that the cache has are not fetched.
    /// What a cut or a kill left is kept in the cache and gone on with.
    pub fn pull(&self, cache: &Cache, manifest: Manifest, progress: Progress<'_>) -> Result<Artifact> {
        let staging = cache.stage_fetch(&manifest.stage, &manifest.key)?;
        let mut from: BTreeMap<Digest, PathBuf> = BTreeMap::new();
        let mut coming = Vec::new();
        for record in &manifest.files {
            if from.contains_key(&record.digest) {
                continue;
            }
            let path = if let Some(object) = cache.object(record) {
                object
            } else {
                let path = staging.scratch.join(record.digest.to_string());
                coming.push(self.coming(record, path.clone())?);
                path
            };
            from.insert(record.digest, path);
        }
        let total = coming.iter().map(|file| file.record.bytes).sum();
        self.fetch(&coming, total, progress)?;
        for file in &coming {
            self.check(file, progress)?;
            // The cache copies a file that someone may write to by another name, and takes this one as it is.
            let mut permissions = fs_err::metadata(&file.path)?.permissions();
            permissions.set_readonly(true);
            fs_err::set_permissions(&file.path, permissions)?;
        }
        for record in &manifest.files {
            let target = staging.out.join(&record.path);
            if let Some(folder) = target.parent() {
                fs_err::create_dir_all(folder)?;
            }
            let source = &from[&record.digest];
            fs_err::hard_link(source, &target).or_else(|_| fs_err::copy(source, &target).map(|_| ()))?;
        }
        Ok(cache.adopt(&staging, manifest)?)
    }

    fn coming<'a>(&self, record: &'a FileRecord, path: PathBuf) -> Result<Coming<'a>> {
        let mut from = fs_err::metadata(&path).map_or(0, |left| left.len());
        if from > record.bytes {
            fs_err::remove_file(&path)?;
            from = 0;
        }
        // A whole one may not be written to any more.
        if from < record.bytes || !path.exists() {
            fs_err::OpenOptions::new().create(true).append(true).open(&path)?;
        }
        Ok(Coming { record, object: self.object(&record.digest), path, from })
    }

    /// Appends what is missing. Several requests are under way, and their answers are written in order, so that a file
    /// that was cut off is always a beginning of itself.
    fn fetch(&self, files: &[Coming<'_>], total: u64, progress: Progress<'_>) -> Result<()> {
        let parts = files.iter().flat_map(|file| {
            let starts = (file.from..file.record.bytes).step_by(PART as usize);
            starts.map(move |start| (file, start..(start + PART).min(file.record.bytes)))
        });
        let mut done: u64 = files.iter().map(|file| file.from).sum();
        let mut open: Option<(&Digest, File)> = None;
        self.runtime.block_on(async {
            let ask = |(file, range): (&Coming<'_>, std::ops::Range<u64>)| {
                let (store, object) = (self.store.clone(), file.object.clone());
                let digest = file.record.digest;
                async move { (digest, range.clone(), store.get_range(&object, range).await) }
            };
            let files: BTreeMap<&Digest, &Coming<'_>> = files.iter().map(|file| (&file.record.digest, file)).collect();
            let mut answers = futures::stream::iter(parts.map(ask)).buffered(PARALLEL);
            while let Some((digest, range, answer)) = answers.next().await {
                let (digest, file) = files.get_key_value(&digest).expect("a part of a file that was asked for");
                let bytes = match answer {
                    Ok(bytes) if bytes.len() as u64 == range.end - range.start => bytes,
                    Ok(bytes) => {
                        let detail = format!("it ends {} bytes after {}", bytes.len(), range.start);
                        return Err(self.found_damaged(file, &detail));
                    }
                    Err(error) => return Err(self.not_had(file, &error).await),
                };
                if open.as_ref().is_none_or(|(of, _)| of != digest) {
                    let opened = fs_err::OpenOptions::new().append(true).open(&file.path)?;
                    open = Some((digest, opened.into_file()));
                }
                if let Some((_, file)) = &mut open {
                    file.write_all(&bytes)?;
                }
                done += bytes.len() as u64;
                if progress(done, total).is_break() {
                    return Err(self.stopped());
                }
            }
            Ok(())
        })
    }

    /// Holds a file against its digest. One that was gone on with gets a second chance from its beginning: the part that
    /// was there may have been hurt.
    fn check(&self, file: &Coming<'_>, progress: Progress<'_>) -> Result<()> {
        if Digest::of_file(&file.path)? == file.record.digest {
            return Ok(());
        }
        fs_err::remove_file(&file.path)?;
        if file.from > 0 {
            let again = self.coming(file.record, file.path.clone())?;
            self.fetch(std::slice::from_ref(&again), file.record.bytes, progress)?;
            return self.check(&again, progress);
        }
        Err(self.found_damaged(file, "its contents are not those of its digest"))
    }

    fn found_damaged(&self, file: &Coming<'_>, detail: &str) -> crate::Error {
        self.damaged().insert(file.record.digest);
        self.harmed(&file.object, format!("{detail}; it is `{}` of an artifact", file.record.path))
    }

    /// Why a part of a file could not be had: an object that is gone or of another size is damage, all else the network.
    async fn not_had(&self, file: &Coming<'_>, error: &object_store::Error) -> crate::Error {
        match self.store.head(&file.object).await {
            Err(object_store::Error::NotFound { .. }) => self.found_damaged(file, "it is gone"),
            Ok(meta) if meta.size != file.record.bytes => {
                self.found_damaged(file, &format!("it has {} bytes instead of {}", meta.size, file.record.bytes))
            }
            Ok(_) | Err(_) => self.failed(&file.object, error),
        }
    }

    /// A whole small object; `None` if it is not there.
    pub(crate) fn read_small(&self, path: &Path) -> Result<Option<Bytes>> {
        self.runtime.block_on(async {
            let found = match self.store.get(path).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(None),
                found => found.map_err(|error| self.failed(path, &error))?,
            };
            if found.meta.size > LARGEST {
                return Err(self.harmed(path, format!("it has {} bytes", found.meta.size)));
            }
            found.bytes().await.map(Some).map_err(|error| self.failed(path, &error))
        })
    }
}

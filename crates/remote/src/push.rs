//! From a cache to the remote: the files that it lacks, then the manifest.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload, WriteMultipart};
use store::{Artifact, Cache, Digest, Lookup};

use crate::{Error, PARALLEL, Progress, Remote, Result};

/// Bytes of one request; S3 takes no less than 5 MiB.
const PART: u64 = 8 << 20;
/// Parts of one upload at most, as S3 has it.
const MOST_PARTS: u64 = 10_000;
/// Parts of one file under way at a time.
const PARTS_UNDER_WAY: usize = 4;

/// What was sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Files that the remote lacked.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// A file to send.
struct Going {
    object: Path,
    path: PathBuf,
    bytes: u64,
}

impl Remote {
    /// Brings an artifact to the remote, which then has all of it. Files are read and held against their digests first;
    /// with `anew`, those that the remote has are sent, too.
    pub fn push(&self, cache: &Cache, artifact: &Artifact, anew: bool, progress: Progress<'_>) -> Result<Pushed> {
        let manifest = &artifact.manifest;
        match cache.verify(&manifest.stage, &manifest.key) {
            Lookup::Hit(_) => {}
            Lookup::Absent => return Err(unsound(artifact, "it was removed".to_owned())),
            Lookup::Broken(reason) => return Err(unsound(artifact, reason)),
        }
        let files: BTreeMap<Digest, Going> = (manifest.files.iter())
            .map(|file| {
                let (object, path) = (self.object(&file.digest), artifact.path.join(&file.path));
                (file.digest, Going { object, path, bytes: file.bytes })
            })
            .collect();
        let sent = self.runtime.block_on(async {
            let lacking: Vec<Option<Going>> = futures::stream::iter(files)
                .map(|(digest, file)| async move {
                    Ok::<_, Error>(if anew || self.lacks(&digest, &file).await? { Some(file) } else { None })
                })
                .buffer_unordered(PARALLEL)
                .try_collect()
                .await?;
            let mut lacking: Vec<Going> = lacking.into_iter().flatten().collect();
            // Small ones first: a push that is cut then leaves the fewest to do, whatever their digests are.
            lacking.sort_by_key(|file| file.bytes);
            let sent = Pushed { files: lacking.len(), bytes: lacking.iter().map(|file| file.bytes).sum() };
            let done = AtomicU64::new(0);
            let meter = |bytes: u64| {
                let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                if progress(done, sent.bytes).is_break() { Err(self.stopped()) } else { Ok(()) }
            };
            let meter = &meter;
            futures::stream::iter(&lacking)
                .map(|file| self.send(file, meter))
                .buffer_unordered(PARALLEL / PARTS_UNDER_WAY)
                .try_collect::<Vec<()>>()
                .await?;
            Ok::<_, Error>(sent)
        })?;
        let text = serde_json::to_vec_pretty(manifest).map_err(std::io::Error::from)?;
        let path = self.manifest_path(&manifest.stage, &manifest.key);
        if anew || self.read_small(&path)?.is_none_or(|there| there != text) {
            let put = self.store.put(&path, PutPayload::from(text));
            self.runtime.block_on(put).map_err(|error| self.failed(&path, &error))?;
        }
        self.damaged().retain(|digest| manifest.files.iter().all(|file| file.digest != *digest));
        Ok(sent)
    }

    async fn lacks(&self, digest: &Digest, file: &Going) -> Result<bool> {
        if self.damaged().contains(digest) {
            return Ok(true);
        }
        match self.store.head(&file.object).await {
            Ok(meta) => Ok(meta.size != file.bytes),
            Err(object_store::Error::NotFound { .. }) => Ok(true),
            Err(error) => Err(self.failed(&file.object, &error)),
        }
    }

    /// Sends one file; it appears there whole or not at all.
    async fn send(&self, file: &Going, meter: &(impl Fn(u64) -> Result<()> + Sync)) -> Result<()> {
        let failed = |error: object_store::Error| self.failed(&file.object, &error);
        if file.bytes <= PART {
            let bytes = fs_err::read(&file.path)?;
            self.store.put(&file.object, PutPayload::from(bytes)).await.map_err(failed)?;
            return meter(file.bytes);
        }
        let part = PART.max(file.bytes.div_ceil(MOST_PARTS)) as usize;
        let upload = self.store.put_multipart(&file.object).await.map_err(failed)?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, part);
        match self.send_parts(file, part, &mut upload, meter).await {
            Ok(()) => upload.finish().await.map(|_| ()).map_err(failed),
            Err(error) => {
                // What is left of a try costs the remote's owner money; that it could not be removed changes no result.
                let _ = upload.abort().await;
                Err(error)
            }
        }
    }

    async fn send_parts(
        &self,
        file: &Going,
        part: usize,
        upload: &mut WriteMultipart,
        meter: &(impl Fn(u64) -> Result<()> + Sync),
    ) -> Result<()> {
        let mut source = fs_err::File::open(&file.path)?;
        loop {
            upload.wait_for_capacity(PARTS_UNDER_WAY).await.map_err(|error| self.failed(&file.object, &error))?;
            let mut bytes = Vec::with_capacity(part);
            source.by_ref().take(part as u64).read_to_end(&mut bytes)?;
            if bytes.is_empty() {
                return Ok(());
            }
            let sent = bytes.len() as u64;
            upload.put(bytes.into());
            meter(sent)?;
        }
    }
}

fn unsound(artifact: &Artifact, reason: String) -> Error {
    Error::Unsound { stage: artifact.manifest.stage.clone(), reason }
}

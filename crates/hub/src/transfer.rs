//! Bytes from the Hub to the cache: resumed after a cut, verified before they count, also those that were there.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use hf_hub::{HFClient, HFError};
use sha1::Digest as _;

use crate::cache::{RemoteFile, create_parent};
use crate::hub::with_repo;
use crate::listing::refused;
use crate::retry::{Failure, chain, classify};
use crate::sound::{self, Found};
use crate::{Commit, Error, Hub, Repo};

/// Called with bytes done and bytes in all; `Break` ends the transfer with [`Error::Stopped`].
pub type Progress<'a> = &'a (dyn Fn(u64, u64) -> ControlFlow<()> + Sync);

/// A [`Progress`] that says nothing and goes on.
pub fn quiet(_done: u64, _total: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Files fetched at a time.
const PARALLEL: usize = 4;
/// How often a caller may stop the reading of files that are there.
const ASKED_EACH: Duration = Duration::from_millis(200);

/// Tells those who still look into files, when the answer was given before they have finished: it is an error.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Counts bytes of several files for one [`Progress`].
struct Meter<'a> {
    done: AtomicU64,
    total: u64,
    progress: Progress<'a>,
}

impl Meter<'_> {
    fn add(&self, bytes: u64) -> ControlFlow<()> {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        (self.progress)(done.min(self.total), self.total)
    }

    fn take_back(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Hub {
    /// Makes all of `files` present in the snapshot folder of `commit`.
    pub(crate) fn transfer(
        &self,
        repo: &Repo,
        commit: &Commit,
        files: &[&RemoteFile],
        progress: Progress<'_>,
    ) -> Result<(), Error> {
        let meter = Meter { done: AtomicU64::new(0), total: files.iter().map(|file| file.size).sum(), progress };
        let missing = self.runtime.block_on(self.lacking(repo, commit, files, &meter))?;
        if missing.is_empty() {
            return Ok(());
        }
        let client = self.client()?;
        let meter = &meter;
        self.runtime.block_on(async {
            futures::stream::iter(missing)
                .map(|file| self.fetch_file(client, repo, commit, file, meter))
                .buffer_unordered(PARALLEL)
                .try_collect::<Vec<()>>()
                .await
        })?;
        Ok(())
    }

    /// Which of `files` are not there, or not as the Hub states; the others are put at their places.
    async fn lacking<'f>(
        &self,
        repo: &Repo,
        commit: &Commit,
        files: &[&'f RemoteFile],
        meter: &Meter<'_>,
    ) -> Result<Vec<&'f RemoteFile>, Error> {
        let layout = self.layout(repo);
        let over = Over(Arc::new(AtomicBool::new(false)));
        let look = |file: &'f RemoteFile| {
            let (blob, record) = (layout.blob(&file.identity), layout.checked(&file.identity));
            let plain = layout.snapshot(commit).join(&file.path);
            let (asked, stop) = (file.clone(), Arc::clone(&over.0));
            let looked = tokio::task::spawn_blocking(move || match sound::look(&blob, &record, &asked, &stop)? {
                // A cache without links, as on file systems that have none.
                Found::Nothing => Ok((sound::look(&plain, &record, &asked, &stop)?, false)),
                found => Ok::<_, Error>((found, true)),
            });
            async move { (file, looked.await) }
        };
        let mut looks = futures::stream::iter(files.iter().copied()).map(look).buffered(PARALLEL);
        let mut missing = Vec::new();
        loop {
            let Ok(looked) = tokio::time::timeout(ASKED_EACH, looks.next()).await else {
                if meter.add(0).is_break() {
                    return Err(Error::Stopped { repo: repo.to_string() });
                }
                continue;
            };
            let Some((file, found)) = looked else { return Ok(missing) };
            match found.map_err(std::io::Error::other)?? {
                (Found::Sound, is_blob) => {
                    if is_blob {
                        layout.link(commit, file)?;
                    }
                    if meter.add(file.size).is_break() {
                        return Err(Error::Stopped { repo: repo.to_string() });
                    }
                }
                (Found::Nothing, _) if self.options.offline => {
                    return Err(self.not_cached(repo, format!("`{}`", file.path)));
                }
                (Found::Damaged(hash), _) if self.options.offline => {
                    let detail = format!("its content hash is {hash}, the Hub states {}", file.identity);
                    let cache = self.options.cache.clone();
                    return Err(Error::Rotten { repo: repo.to_string(), path: file.path.clone(), detail, cache });
                }
                (Found::Nothing | Found::Damaged(_), _) => missing.push(file),
            }
        }
    }

    async fn fetch_file(
        &self,
        client: &HFClient,
        repo: &Repo,
        commit: &Commit,
        file: &RemoteFile,
        meter: &Meter<'_>,
    ) -> Result<(), Error> {
        let layout = self.layout(repo);
        let blob = layout.blob(&file.identity);
        let _lock = lock(layout.lock(&file.identity)).await?;
        let record = layout.checked(&file.identity);
        let never = AtomicBool::new(false);
        if sound::look(&blob, &record, file, &never)? == Found::Sound {
            let _ = meter.add(file.size); // another process fetched it while this one waited
            layout.link(commit, file)?;
            return Ok(());
        }
        let mut partial = Partial::open(PathBuf::from(format!("{}.incomplete", blob.display())), file.size)?;
        let _ = meter.add(partial.length);
        let mut before = None;
        let hash = loop {
            self.fill(client, repo, commit, file, &mut partial, meter).await?;
            match content_hash(&partial.path, file, &never)? {
                Some(found) if !found.eq_ignore_ascii_case(&file.identity) => {
                    // Mirrors make up git ids; that the same bytes came twice is as good there.
                    if before.as_ref() == Some(&found) && file.identity.len() == 40 {
                        break Some(found);
                    }
                    if before.is_some() {
                        fs_err::remove_file(&partial.path)?;
                        let detail = format!("its content hash is {found}, the Hub states {}", file.identity);
                        return Err(Error::Damaged { repo: repo.to_string(), path: file.path.clone(), detail });
                    }
                    // Once more from the start: the kept part may be of another version, or hurt by a crash.
                    before = Some(found);
                    meter.take_back(partial.length);
                    partial.restart()?;
                }
                found => break found,
            }
        };
        partial.file.sync_all()?;
        fs_err::rename(&partial.path, &blob)?;
        if let Some(hash) = hash {
            sound::note(&blob, &record, hash);
        }
        layout.link(commit, file)?;
        Ok(())
    }

    /// Reads until the partial file has its full length, going on where a cut connection left it.
    async fn fill(
        &self,
        client: &HFClient,
        repo: &Repo,
        commit: &Commit,
        file: &RemoteFile,
        partial: &mut Partial,
        meter: &Meter<'_>,
    ) -> Result<(), Error> {
        let mut failures = 0;
        while partial.length < file.size {
            let before = partial.length;
            let Some(failure) = self.read_on(client, repo, commit, file, partial, meter).await? else { continue };
            failures = if partial.length > before { 1 } else { failures + 1 };
            self.pause(failure, failures, repo, &format!("`{}`", file.path)).await?;
            if (meter.progress)(meter.done.load(Ordering::Relaxed).min(meter.total), meter.total).is_break() {
                return Err(Error::Stopped { repo: repo.to_string() });
            }
        }
        Ok(())
    }

    /// One request; a failure that may pass is returned, not raised.
    async fn read_on(
        &self,
        client: &HFClient,
        repo: &Repo,
        commit: &Commit,
        file: &RemoteFile,
        partial: &mut Partial,
        meter: &Meter<'_>,
    ) -> Result<Option<Failure>, Error> {
        let passing = |detail: &str| Some(Failure::Passing { detail: detail.to_owned(), wait: None });
        let range = (partial.length > 0).then_some(partial.length..file.size);
        let resuming = range.is_some();
        let request = self.open_stream(client, repo, commit, file, range);
        let mut stream = match tokio::time::timeout(self.options.silence, request).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(failure)) => return Ok(Some(failure)),
            Err(_) => return Ok(passing("no answer in time")),
        };
        loop {
            let chunk = match tokio::time::timeout(self.options.silence, stream.next()).await {
                Ok(Some(Ok(chunk))) => chunk,
                Ok(Some(Err(failure))) => return Ok(Some(failure)),
                Ok(None) if partial.length < file.size => return Ok(passing("the connection was cut")),
                Ok(None) => return Ok(None),
                Err(_) => return Ok(passing("the connection fell silent")),
            };
            if partial.length + chunk.len() as u64 > file.size {
                // More than is missing: the server ignored the range, or the file is not what the list says.
                meter.take_back(partial.length);
                partial.restart()?;
                if resuming {
                    return Ok(passing("the server ignored the range"));
                }
                let detail = format!("more than the {} bytes that the Hub states", file.size);
                return Err(Error::Damaged { repo: repo.to_string(), path: file.path.clone(), detail });
            }
            partial.file.write_all(&chunk)?;
            partial.length += chunk.len() as u64;
            if meter.add(chunk.len() as u64).is_break() {
                return Err(Error::Stopped { repo: repo.to_string() });
            }
        }
    }
}

impl Hub {
    /// The bytes of a file, or of a range of it.
    async fn open_stream(
        &self,
        client: &HFClient,
        repo: &Repo,
        commit: &Commit,
        file: &RemoteFile,
        range: Option<Range<u64>>,
    ) -> Result<BoxStream<'static, Result<Vec<u8>, Failure>>, Failure> {
        if file.xet {
            let sort = {
                let (repo, commit, path) = (repo.clone(), commit.clone(), file.path.clone());
                move |error: HFError| classify(&error, &repo, commit.as_str(), Some(&path))
            };
            let opened = with_repo!(client, repo, |handle| {
                let request = handle.download_file_stream().filename(&*file.path).revision(commit.as_str());
                request.maybe_range(range).send().await
            });
            let (_, stream) = opened.map_err(&sort)?;
            return Ok(stream.map(move |chunk| chunk.map(Vec::from).map_err(&sort)).boxed());
        }
        let plain = self.plain();
        let address = address(client.endpoint(), repo, commit, &file.path)
            .ok_or_else(|| Failure::Final(Error::Settings { message: "HF_ENDPOINT is not an address".to_owned() }))?;
        let mut request = plain.get(address);
        if let Some(token) = &self.options.token {
            request = request.bearer_auth(token);
        }
        if let Some(range) = range {
            request = request.header(reqwest::header::RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        }
        let passing = |error: reqwest::Error| Failure::Passing { detail: chain(&error), wait: None };
        let answer = request.send().await.map_err(passing)?;
        if !answer.status().is_success() {
            return Err(refused(answer.status().as_u16(), answer.headers(), repo, commit, Some(&file.path)));
        }
        Ok(answer.bytes_stream().map(move |chunk| chunk.map(Vec::from).map_err(passing)).boxed())
    }
}

/// A file on its way.
struct Partial {
    path: PathBuf,
    file: File,
    length: u64,
}

impl Partial {
    fn open(path: PathBuf, size: u64) -> Result<Self, Error> {
        create_parent(&path)?;
        let file = fs_err::OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
        let mut file = file.into_file();
        let mut length = file.seek(SeekFrom::End(0))?;
        if length > size {
            file.set_len(0)?;
            length = file.seek(SeekFrom::Start(0))?;
        }
        Ok(Self { path, file, length })
    }

    fn restart(&mut self) -> Result<(), Error> {
        self.file.set_len(0)?;
        self.length = self.file.seek(SeekFrom::Start(0))?;
        Ok(())
    }
}

/// Address of a file, its name percent-encoded segment by segment.
fn address(endpoint: &str, repo: &Repo, commit: &Commit, path: &str) -> Option<reqwest::Url> {
    let prefix = match repo {
        Repo::Model { .. } => "",
        Repo::Dataset { .. } => "datasets/",
    };
    let mut url = reqwest::Url::parse(&format!("{endpoint}/{prefix}{}/resolve/{commit}", repo.id())).ok()?;
    url.path_segments_mut().ok()?.extend(path.split('/'));
    Some(url)
}

async fn lock(path: PathBuf) -> Result<File, Error> {
    let locked = tokio::task::spawn_blocking(move || {
        create_parent(&path)?;
        let file = fs_err::File::create(&path)?.into_file();
        file.lock()?;
        Ok::<_, std::io::Error>(file)
    });
    locked.await.map_err(std::io::Error::other)?.map_err(Error::Cache)
}

/// The hash that the file's identity is of: SHA-256 of a large file, git's blob id of a small one; `None` if of neither.
/// Once it is told to stop, it fails.
pub(crate) fn content_hash(path: &Path, file: &RemoteFile, stop: &AtomicBool) -> Result<Option<String>, Error> {
    match file.identity.len() {
        64 => {
            let mut hasher = sha2::Sha256::default();
            read_through(path, stop, |bytes| sha2::Digest::update(&mut hasher, bytes))?;
            Ok(Some(hex(&sha2::Digest::finalize(hasher))))
        }
        40 => {
            let mut hasher = sha1::Sha1::default();
            hasher.update(format!("blob {}\0", file.size));
            read_through(path, stop, |bytes| hasher.update(bytes))?;
            Ok(Some(hex(&hasher.finalize())))
        }
        _ => Ok(None),
    }
}

fn read_through(path: &Path, stop: &AtomicBool, mut take: impl FnMut(&[u8])) -> Result<(), Error> {
    let mut file = fs_err::File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(()),
            _ if stop.load(Ordering::Relaxed) => {
                return Err(std::io::Error::from(std::io::ErrorKind::Interrupted).into());
            }
            n => take(&buffer[..n]),
        }
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

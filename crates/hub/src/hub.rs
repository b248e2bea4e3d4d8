//! The client: which commit a revision means, and which files a commit has.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use hf_hub::HFClient;
use spec::glob::matches_any;
use tokio::runtime::Runtime;

use crate::cache::{Layout, RemoteFile};
use crate::listing::list;
use crate::retry::{Failure, classify, wait};
use crate::{Commit, Error, Progress, Repo};

/// Settings, usually from the environment.
#[derive(Clone)]
pub struct Options {
    /// Base address; `None` is the public Hub.
    pub endpoint: Option<String>,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Access token.
    pub token: Option<String>,
    /// Use nothing but the cache.
    pub offline: bool,
    /// Tries of each request, without progress in between.
    pub attempts: u32,
    /// Wait after the first failure; it doubles with each further one.
    pub base_delay: Duration,
    /// A connection that is silent for so long counts as cut.
    pub silence: Duration,
}

impl Options {
    /// `HF_ENDPOINT`; `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`; `HF_TOKEN`, else the file
    /// `HF_TOKEN_PATH`, else `HF_HOME/token`; `HF_HUB_OFFLINE`; `HF_HUB_DOWNLOAD_TIMEOUT` in seconds (default 60).
    pub fn from_env() -> Result<Self, Error> {
        Self::from_lookup(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let in_user_home = || PathBuf::from(get("HOME").unwrap_or_else(|| "/tmp".to_owned())).join(".cache");
        let general = || get("XDG_CACHE_HOME").map_or_else(in_user_home, PathBuf::from).join("huggingface");
        let home = get("HF_HOME").map_or_else(general, PathBuf::from);
        let cache = get("HF_HUB_CACHE").or_else(|| get("HUGGINGFACE_HUB_CACHE")).map(PathBuf::from);
        let flag = |name: &str| {
            get(name).is_some_and(|v| matches!(v.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
        };
        let from_file = |path: PathBuf| fs_err::read_to_string(path).ok();
        let token = get("HF_TOKEN").or_else(|| {
            if flag("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
                return None;
            }
            get("HF_TOKEN_PATH").map(PathBuf::from).and_then(from_file).or_else(|| from_file(home.join("token")))
        });
        let silence = match get("HF_HUB_DOWNLOAD_TIMEOUT") {
            None => Duration::from_mins(1),
            Some(text) => text.trim().parse().map(Duration::from_secs).map_err(|_| Error::Settings {
                message: format!("HF_HUB_DOWNLOAD_TIMEOUT is `{text}`, which is not a number of seconds"),
            })?,
        };
        Ok(Self {
            endpoint: get("HF_ENDPOINT"),
            cache: cache.unwrap_or_else(|| home.join("hub")),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            offline: flag("HF_HUB_OFFLINE"),
            attempts: 6,
            base_delay: Duration::from_millis(200),
            silence,
        })
    }
}

/// A blocking client with its own runtime; not for use inside another one.
pub struct Hub {
    pub(crate) options: Options,
    pub(crate) runtime: Runtime,
    client: OnceLock<HFClient>,
    plain: OnceLock<reqwest::Client>,
}

/// What is sent where: `hf-hub` has a type for each kind of repository.
macro_rules! with_repo {
    ($client:expr, $repo:expr, |$handle:ident| $body:expr) => {
        match $repo {
            Repo::Model { owner, name } => {
                let $handle = $client.model(owner, name);
                $body
            }
            Repo::Dataset { owner, name } => {
                let $handle = $client.dataset(owner, name);
                $body
            }
        }
    };
}
pub(crate) use with_repo;

impl Hub {
    /// A client with the settings of the environment; connects to nothing yet.
    pub fn from_env() -> Result<Self, Error> {
        Self::new(Options::from_env()?)
    }

    /// A client with given settings; connects to nothing yet.
    pub fn new(options: Options) -> Result<Self, Error> {
        if options.token.as_deref().is_some_and(|token| token.bytes().any(|b| !b.is_ascii_graphic())) {
            let message = "the Hub token holds a character that no token has (a space, a line break, …)".to_owned();
            return Err(Error::Settings { message });
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        Ok(Self { options, runtime, client: OnceLock::new(), plain: OnceLock::new() })
    }

    /// Folder of the cache.
    pub fn cache(&self) -> &Path {
        &self.options.cache
    }

    /// The commit that a revision (a branch, tag or commit; `None` is `main`) means now; offline, what it meant last.
    pub fn resolve(&self, repo: &Repo, revision: Option<&str>) -> Result<Commit, Error> {
        let revision = revision.unwrap_or("main");
        if let Ok(commit) = revision.parse() {
            return Ok(commit);
        }
        let missing = || Error::Revision { repo: repo.to_string(), revision: revision.to_owned() };
        if revision.is_empty()
            || revision.starts_with('/')
            || revision.split('/').any(|part| matches!(part, "" | "." | ".."))
        {
            return Err(missing());
        }
        let layout = self.layout(repo);
        if self.options.offline {
            return layout.read_ref(revision)?.ok_or_else(|| self.not_cached(repo, format!("revision `{revision}`")));
        }
        let client = self.client()?;
        let sha = self.ask(repo, "the commit", async || {
            let answer = with_repo!(client, repo, |handle| {
                handle.info().revision(revision.to_owned()).send().await.map(|info| info.sha)
            });
            answer.map_err(|error| classify(&error, repo, revision, None))
        })?;
        let commit = sha.as_deref().unwrap_or_default().parse().map_err(|_| Error::Answer {
            repo: repo.to_string(),
            detail: format!("no commit for revision `{revision}`"),
        })?;
        layout.write_ref(revision, &commit)?;
        Ok(commit)
    }

    /// All files of a commit, by path. Offline: as listed earlier, else those that the cache holds.
    pub fn files(&self, repo: &Repo, commit: &Commit) -> Result<Vec<RemoteFile>, Error> {
        let layout = self.layout(repo);
        if let Some(files) = layout.read_listing(commit) {
            return Ok(files);
        }
        if self.options.offline {
            let files = layout.walk_snapshot(commit)?;
            return if files.is_empty() { Err(self.not_cached(repo, format!("revision {commit}"))) } else { Ok(files) };
        }
        let endpoint = self.client()?.endpoint().to_owned();
        let token = self.options.token.as_deref();
        let plain = self.plain();
        let files = self.ask(repo, "the list of files", async || list(plain, &endpoint, token, repo, commit).await)?;
        layout.write_listing(commit, &files)?;
        Ok(files)
    }

    /// One file, from the cache or fetched into it (resumed, and verified by size and content hash).
    pub fn fetch(&self, repo: &Repo, commit: &Commit, path: &str, progress: Progress<'_>) -> Result<PathBuf, Error> {
        let mut paths = self.fetch_all(repo, commit, &[path], progress)?;
        Ok(paths.remove(0))
    }

    /// Several files, some at a time, as by [`Hub::fetch`]; their places in the order asked for.
    pub fn fetch_all<P: AsRef<str>>(
        &self,
        repo: &Repo,
        commit: &Commit,
        paths: &[P],
        progress: Progress<'_>,
    ) -> Result<Vec<PathBuf>, Error> {
        let files = self.files(repo, commit)?;
        let find =
            |path: &str| {
                files.binary_search_by(|file| file.path.as_str().cmp(path)).map(|at| &files[at]).map_err(|_| {
                    Error::File { repo: repo.to_string(), path: path.to_owned(), commit: commit.to_string() }
                })
            };
        let wanted = paths.iter().map(|path| find(path.as_ref())).collect::<Result<Vec<_>, _>>()?;
        self.transfer(repo, commit, &wanted, progress)?;
        let root = self.layout(repo).snapshot(commit);
        Ok(paths.iter().map(|path| root.join(path.as_ref())).collect())
    }

    /// The folder that holds all files matching the globs (all files, if there are none), fetched as by [`Hub::fetch`].
    pub fn snapshot<G: AsRef<str>>(
        &self,
        repo: &Repo,
        commit: &Commit,
        globs: &[G],
        progress: Progress<'_>,
    ) -> Result<PathBuf, Error> {
        let files = self.files(repo, commit)?;
        let wanted: Vec<&RemoteFile> = files.iter().filter(|file| matches_any(globs, &file.path)).collect();
        if wanted.is_empty() {
            let globs: Vec<String> = globs.iter().map(|glob| format!("`{}`", glob.as_ref())).collect();
            return Err(Error::Nothing { repo: repo.to_string(), globs: globs.join(", "), commit: commit.to_string() });
        }
        self.transfer(repo, commit, &wanted, progress)?;
        Ok(self.layout(repo).snapshot(commit))
    }

    pub(crate) fn layout(&self, repo: &Repo) -> Layout {
        Layout::new(&self.options.cache, repo)
    }

    pub(crate) fn not_cached(&self, repo: &Repo, what: String) -> Error {
        Error::Offline { what, repo: repo.to_string(), cache: self.options.cache.clone() }
    }

    /// The connection, made on first use: it loads certificates, which a fully cached run need not wait for.
    pub(crate) fn client(&self) -> Result<&HFClient, Error> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        // Retries happen here, not there, so that waits that servers ask for and cut bodies are handled alike.
        let mut builder = HFClient::builder().cache_dir(&self.options.cache).retry_max_attempts(0);
        if let Some(endpoint) = &self.options.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(token) = &self.options.token {
            builder = builder.token(token);
        }
        let client = builder.build().map_err(|error| Error::Settings {
            message: format!("HF_ENDPOINT or HF_TOKEN cannot be used: {}", self.redact(error.to_string())),
        })?;
        Ok(self.client.get_or_init(|| client))
    }

    /// For plain HTTP; `hf-hub` shows its own to nobody.
    pub(crate) fn plain(&self) -> &reqwest::Client {
        self.plain.get_or_init(reqwest::Client::new)
    }

    /// One question, asked again while it fails for reasons that pass.
    fn ask<T>(&self, repo: &Repo, what: &str, question: impl AsyncFn() -> Result<T, Failure>) -> Result<T, Error> {
        self.runtime.block_on(async {
            let mut failures = 0;
            loop {
                let failure = match tokio::time::timeout(self.options.silence, question()).await {
                    Ok(Ok(answer)) => return Ok(answer),
                    Ok(Err(failure)) => failure,
                    Err(_) => Failure::Passing { detail: "no answer in time".to_owned(), wait: None },
                };
                failures += 1;
                self.pause(failure, failures, repo, what).await?;
            }
        })
    }

    /// Waits before the next try, or gives up.
    pub(crate) async fn pause(&self, failure: Failure, failures: u32, repo: &Repo, what: &str) -> Result<(), Error> {
        match failure {
            Failure::Final(Error::Refused { repo, detail }) => {
                Err(Error::Refused { repo, detail: self.redact(detail) })
            }
            Failure::Final(error) => Err(error),
            Failure::Passing { wait: asked, .. } if failures < self.options.attempts => {
                tokio::time::sleep(wait(self.options.base_delay, failures, asked)).await;
                Ok(())
            }
            Failure::Passing { detail, .. } => Err(Error::Network {
                what: what.to_owned(),
                repo: repo.to_string(),
                attempts: failures,
                detail: self.redact(detail),
            }),
        }
    }

    fn redact(&self, text: String) -> String {
        match &self.options.token {
            Some(token) => text.replace(token.as_str(), "(token)"),
            None => text,
        }
    }
}

/// The folder of a model or data set at a commit, with at least the files matching `parts`, by the environment's settings.
pub fn local_folder<G: AsRef<str>>(
    repo: &Repo,
    commit: &str,
    parts: &[G],
    progress: Progress<'_>,
) -> Result<PathBuf, Error> {
    Hub::from_env()?.snapshot(repo, &commit.parse()?, parts, progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_read_as_python_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("my-token");
        fs_err::write(&file, " hf_from_file\n").unwrap();
        let read = |pairs: &[(&str, &str)]| {
            let pairs: Vec<_> = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            Options::from_lookup(move |name| pairs.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone())).unwrap()
        };
        assert_eq!(read(&[("HOME", "/h")]).cache, Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(read(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).cache, Path::new("/x/huggingface/hub"));
        assert_eq!(read(&[("HF_HOME", "/a")]).cache, Path::new("/a/hub"));
        assert_eq!(read(&[("HF_HOME", "/a"), ("HF_HUB_CACHE", "/b")]).cache, Path::new("/b"));
        let path = file.to_str().unwrap();
        assert_eq!(read(&[("HF_TOKEN_PATH", path)]).token.as_deref(), Some("hf_from_file"));
        assert_eq!(read(&[("HF_TOKEN_PATH", path), ("HF_TOKEN", "hf_x")]).token.as_deref(), Some("hf_x"));
        assert!(read(&[("HF_HUB_OFFLINE", "1")]).offline && read(&[("HF_HUB_OFFLINE", "true")]).offline);
        assert!(!read(&[("HF_HUB_OFFLINE", "0")]).offline);
    }
}

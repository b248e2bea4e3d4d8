//! Why something could not be had from the Hub. No message ever holds a token.

use std::path::PathBuf;

use miette::Diagnostic;
use thiserror::Error;

/// Why something could not be had from the Hub.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// Not an id of a repository.
    #[error("`{id}` is not a Hub id")]
    #[diagnostic(code(hub::id), help("write `OWNER/NAME`, with letters, digits, `-`, `_` and `.`"))]
    Id {
        /// As written.
        id: String,
    },
    /// Not a commit.
    #[error("`{text}` is not a commit (40 hexadecimal digits)")]
    #[diagnostic(code(hub::commit))]
    Commit {
        /// As given.
        text: String,
    },
    /// A setting in the environment that cannot be used.
    #[error("{message}")]
    #[diagnostic(code(hub::settings))]
    Settings {
        /// What is wrong.
        message: String,
    },
    /// There is no such repository, or it is private.
    #[error("the Hub has no {repo}")]
    #[diagnostic(
        code(hub::not_found),
        help(
            "check the spelling and whether it is a model or a data set; if it is private, set HF_TOKEN to a token that may read it"
        )
    )]
    NotFound {
        /// The repository.
        repo: String,
    },
    /// The repository has no such revision.
    #[error("{repo} has no revision `{revision}`")]
    #[diagnostic(code(hub::revision), help("name a branch, a tag or a commit"))]
    Revision {
        /// The repository.
        repo: String,
        /// As asked.
        revision: String,
    },
    /// The repository has no such file.
    #[error("{repo} has no file `{path}` at revision {commit}")]
    #[diagnostic(code(hub::file))]
    File {
        /// The repository.
        repo: String,
        /// As asked.
        path: String,
        /// The commit.
        commit: String,
    },
    /// No file of the repository matches what is needed.
    #[error("{repo} has no files matching {globs} at revision {commit}")]
    #[diagnostic(code(hub::nothing))]
    Nothing {
        /// The repository.
        repo: String,
        /// The globs.
        globs: String,
        /// The commit.
        commit: String,
    },
    /// The repository is there, but its terms were not accepted, or the token may not read it.
    #[error("access to {repo} is refused{detail}")]
    #[diagnostic(
        code(hub::refused),
        help(
            "accept its license on its page of the Hub, then set HF_TOKEN to a token of that account (or `hf auth login`)"
        )
    )]
    Refused {
        /// The repository.
        repo: String,
        /// What the Hub said, with a colon before it; may be empty.
        detail: String,
    },
    /// Offline, and not in the cache.
    #[error("{what} of {repo} is not in the cache `{}`, and HF_HUB_OFFLINE is set", cache.display())]
    #[diagnostic(
        code(hub::offline),
        help("unset HF_HUB_OFFLINE once to fetch it, or point HF_HOME at a cache that has it")
    )]
    Offline {
        /// What is missing, such as `revision `main``.
        what: String,
        /// The repository.
        repo: String,
        /// Folder of the cache.
        cache: PathBuf,
    },
    /// The Hub could not be reached or kept failing.
    #[error("cannot fetch {what} of {repo} after {attempts} attempts: {detail}")]
    #[diagnostic(
        code(hub::network),
        help(
            "check the network and HF_ENDPOINT, then run again: what was fetched is kept; HF_HUB_OFFLINE=1 uses the cache only"
        )
    )]
    Network {
        /// What was asked.
        what: String,
        /// The repository.
        repo: String,
        /// How often it was tried.
        attempts: u32,
        /// The last failure.
        detail: String,
    },
    /// What came is not what the Hub says the file is.
    #[error("`{path}` of {repo} arrives damaged: {detail}")]
    #[diagnostic(
        code(hub::damaged),
        help("run again; if it stays so, a proxy between here and the Hub may alter files")
    )]
    Damaged {
        /// The repository.
        repo: String,
        /// The file.
        path: String,
        /// Expected and found.
        detail: String,
    },
    /// What the cache holds is not what the Hub says the file is, and it may not be fetched again.
    #[error("`{path}` of {repo} is damaged in the cache `{}`: {detail}", cache.display())]
    #[diagnostic(
        code(hub::rotten),
        help("unset HF_HUB_OFFLINE once to fetch it again, or point HF_HOME at a cache that has it whole")
    )]
    Rotten {
        /// The repository.
        repo: String,
        /// The file.
        path: String,
        /// Expected and found.
        detail: String,
        /// Folder of the cache.
        cache: PathBuf,
    },
    /// The Hub's answer makes no sense.
    #[error("the Hub's answer about {repo} cannot be used: {detail}")]
    #[diagnostic(code(hub::answer))]
    Answer {
        /// The repository.
        repo: String,
        /// What is wrong.
        detail: String,
    },
    /// The caller asked to stop.
    #[error("stopped while fetching {repo}; what was fetched is kept")]
    #[diagnostic(code(hub::stopped))]
    Stopped {
        /// The repository.
        repo: String,
    },
    /// The cache on disk cannot be read or written.
    #[error("the Hub cache cannot be used")]
    #[diagnostic(code(hub::cache), help("check free space and permissions of HF_HOME"))]
    Cache(#[from] std::io::Error),
}

//! Which failures pass, how long to wait, and what to call those that do not.

use std::time::Duration;

use hf_hub::HFError;

use crate::{Error, Repo};

/// Longest wait a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_mins(5);

/// One failed try.
pub(crate) enum Failure {
    /// May pass: a server error, too many requests (with the wait it asked for), a cut connection.
    Passing { detail: String, wait: Option<Duration> },
    /// Will not pass.
    Final(Error),
}

/// Seen from outside: doubling waits from `base`, unless the server asked for one.
pub(crate) fn wait(base: Duration, failures: u32, asked: Option<Duration>) -> Duration {
    asked.unwrap_or_else(|| base.saturating_mul(1 << failures.saturating_sub(1).min(10))).min(LONGEST_WAIT)
}

/// Sorts an error of `hf-hub`. `revision` and `path` are what was asked for, if anything.
pub(crate) fn classify(error: &HFError, repo: &Repo, revision: &str, path: Option<&str>) -> Failure {
    let context = match error {
        HFError::RateLimited { retry_after, .. } => {
            return Failure::Passing { detail: "too many requests (429)".to_owned(), wait: *retry_after };
        }
        HFError::Http { context } | HFError::AuthRequired { context } | HFError::Forbidden { context } => {
            Some(&**context)
        }
        HFError::RepoNotFound { context, .. }
        | HFError::RevisionNotFound { context, .. }
        | HFError::EntryNotFound { context, .. } => context.as_deref(),
        HFError::Request { source, .. } if source.is_builder() => {
            return Failure::Final(Error::Settings {
                message: format!("HF_ENDPOINT cannot be used: {}", chain(source)),
            });
        }
        HFError::Request { source, .. } => return Failure::Passing { detail: chain(source), wait: None },
        HFError::Xet { source, .. } => return Failure::Passing { detail: chain(source.as_ref()), wait: None },
        HFError::Io(source) => return Failure::Passing { detail: source.to_string(), wait: None },
        other => return Failure::Final(Error::Answer { repo: repo.to_string(), detail: chain(other) }),
    };
    let Some(context) = context else {
        return Failure::Final(Error::NotFound { repo: repo.to_string() });
    };
    let code = context.error_code.as_deref().unwrap_or_default();
    let message = context.server_message.as_deref().unwrap_or_default();
    by_status(Status { number: context.status.as_u16(), code, message, wait: None }, repo, revision, path)
}

/// What a failing answer says.
#[derive(Clone, Copy)]
pub(crate) struct Status<'a> {
    /// HTTP status.
    pub(crate) number: u16,
    /// `X-Error-Code`, or empty.
    pub(crate) code: &'a str,
    /// `X-Error-Message`, or empty.
    pub(crate) message: &'a str,
    /// `Retry-After`.
    pub(crate) wait: Option<Duration>,
}

/// Sorts a failing answer.
pub(crate) fn by_status(answer: Status<'_>, repo: &Repo, revision: &str, path: Option<&str>) -> Failure {
    let Status { number: status, code, message, wait } = answer;
    let repo = repo.to_string();
    match (status, code) {
        (429, _) => Failure::Passing { detail: "too many requests (429)".to_owned(), wait },
        (408 | 500..=599, _) => Failure::Passing { detail: format!("server error {status}"), wait },
        (401 | 403 | 404, "RepoNotFound") => Failure::Final(Error::NotFound { repo }),
        (404, "RevisionNotFound") => Failure::Final(Error::Revision { repo, revision: revision.to_owned() }),
        // Without a token the Hub answers 401 for what does not exist, too.
        (401, "") if !message.starts_with("Invalid credentials") => Failure::Final(Error::NotFound { repo }),
        (401 | 403, _) => {
            let detail = if message.is_empty() { String::new() } else { format!(": {message}") };
            Failure::Final(Error::Refused { repo, detail })
        }
        (404, _) => Failure::Final(match path {
            Some(path) => Error::File { repo, path: path.to_owned(), commit: revision.to_owned() },
            None => Error::NotFound { repo },
        }),
        _ => Failure::Final(Error::Answer { repo, detail: format!("status {status} {message}") }),
    }
}

/// An error with its causes. URLs are left out: a signed one is a secret for as long as it is valid.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        let text = text.split(" for url (").next().unwrap_or_default().to_owned();
        if parts.last() != Some(&text) {
            parts.push(text);
        }
        next = error.source();
    }
    parts.join(": ")
}

//! Why something could not be had from, or brought to, a remote. No message holds a credential.

use std::path::PathBuf;

use miette::Diagnostic;
use thiserror::Error;

/// Why something could not be had from, or brought to, a remote.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// Not an address of a store.
    #[error("{what}")]
    #[diagnostic(
        code(remote::address),
        help("write `file:///folder`, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`")
    )]
    Address {
        /// What is wrong.
        what: String,
    },
    /// An address with a user, a password or a query.
    #[error("{what}: a user, a password, a query or a fragment")]
    #[diagnostic(
        code(remote::secret),
        help(
            "credentials come from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_SAS_KEY, …"
        )
    )]
    Secret {
        /// What is wrong, without the address itself.
        what: String,
    },
    /// The folder of a `file://` address is not there: an absent mount must not become a second store.
    #[error("the folder `{}` does not exist", folder.display())]
    #[diagnostic(code(remote::folder), help("mount it, or make it"))]
    Folder {
        /// The folder.
        folder: PathBuf,
    },
    /// It does not answer, or not in a way that makes sense.
    #[error("the remote `{remote}` cannot be used: {detail}")]
    #[diagnostic(
        code(remote::unreachable),
        help(
            "check the network and the address; a server of your own is named by AWS_ENDPOINT_URL, with AWS_ALLOW_HTTP=true unless it speaks HTTPS; what was transferred is kept"
        )
    )]
    Unreachable {
        /// The address.
        remote: String,
        /// What happened.
        detail: String,
    },
    /// It answers, and does not let us.
    #[error("the remote `{remote}` refuses access to `{object}`")]
    #[diagnostic(
        code(remote::refused),
        help(
            "check the credentials in the environment (AWS_ACCESS_KEY_ID, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME, …) and what they may do"
        )
    )]
    Refused {
        /// The address.
        remote: String,
        /// What was asked for.
        object: String,
    },
    /// What lies there is not what it should be.
    #[error("`{object}` in the remote `{remote}` is damaged: {detail}")]
    #[diagnostic(
        code(remote::damaged),
        help("`pipeline push RECIPE --repair` from a cache that is sound writes it anew")
    )]
    Damaged {
        /// Path inside the remote.
        object: String,
        /// The address.
        remote: String,
        /// What is wrong.
        detail: String,
    },
    /// The artifact to be pushed is not sound.
    #[error("the artifact of `{stage}` is not pushed: {reason}")]
    #[diagnostic(code(remote::unsound), help("run with `--repair` first"))]
    Unsound {
        /// The stage.
        stage: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The caller asked to stop.
    #[error("stopped in the middle of a transfer; what came from `{remote}` is kept")]
    #[diagnostic(code(remote::stopped))]
    Stopped {
        /// The address.
        remote: String,
    },
    /// The local cache cannot be read or written.
    #[error("{0}")]
    #[diagnostic(code(remote::store))]
    Store(#[from] store::Error),
    /// A file operation failed; the message names the path.
    #[error("{0}")]
    #[diagnostic(code(remote::io))]
    Io(#[from] std::io::Error),
}

impl Error {
    /// Sorts a failure of the store.
    pub(crate) fn of(remote: &str, object: &str, error: &object_store::Error) -> Self {
        let remote = remote.to_owned();
        match error {
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Self::Refused { remote, object: object.to_owned() }
            }
            object_store::Error::NotFound { .. } => {
                Self::Unreachable { remote, detail: "there is no such bucket, container or folder".to_owned() }
            }
            other => Self::Unreachable { remote, detail: chain(other) },
        }
    }
}

/// An error with its causes, each once. Queries of URLs are left out: a signed one is a secret for as long as it is valid.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut message = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = without_queries(&error.to_string());
        if !message.contains(&text) {
            if !message.is_empty() {
                message.push_str(": ");
            }
            message.push_str(&text);
        }
        next = error.source();
    }
    message
}

fn without_queries(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('?') {
        out.push_str(&rest[..at]);
        let end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`' | ')' | '<' | '>');
        rest = &rest[at + 1..];
        rest = rest.find(end).map_or("", |end| &rest[end..]);
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signed_address_loses_its_signature() {
        let text = "GET https://a.example/box/x?sv=1&sig=hidden failed (https://b.example/?q=hidden) twice";
        assert_eq!(without_queries(text), "GET https://a.example/box/x failed (https://b.example/) twice");
    }

    #[test]
    fn a_refusal_repeats_nothing_of_the_answer() {
        let source = "<Error><AWSAccessKeyId>hidden</AWSAccessKeyId></Error>".into();
        let error = object_store::Error::PermissionDenied { path: "x".to_owned(), source };
        assert!(!Error::of("s3://b", "x", &error).to_string().contains("hidden"));
    }
}

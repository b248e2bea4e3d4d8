//! The list of files of a commit. Asked for directly: `hf-hub` 1.0 drops the SHA-256 of large files from this answer
//! (it expects the field `sha256`, the Hub sends `oid`), and that hash is what files are verified by.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderMap, LINK, RETRY_AFTER};
use serde::Deserialize;

use crate::cache::RemoteFile;
use crate::retry::{Failure, Status, by_status, chain};
use crate::transfer::hex;
use crate::{Commit, Error, Repo};

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<Large>,
    #[serde(rename = "xetHash")]
    xet_hash: Option<String>,
}

#[derive(Deserialize)]
struct Large {
    #[serde(alias = "sha256")]
    oid: String,
    size: Option<u64>,
}

/// Fetches all pages of the list.
pub(crate) async fn list(
    client: &reqwest::Client,
    endpoint: &str,
    token: Option<&str>,
    repo: &Repo,
    commit: &Commit,
) -> Result<Vec<RemoteFile>, Failure> {
    let kind = match repo {
        Repo::Model { .. } => "models",
        Repo::Dataset { .. } => "datasets",
    };
    let first = format!("{endpoint}/api/{kind}/{}/tree/{commit}?recursive=true", repo.id());
    let unusable = |detail: String| Failure::Final(Error::Answer { repo: repo.to_string(), detail });
    let first = Url::parse(&first).map_err(|error| unusable(error.to_string()))?;
    let origin = first.origin();
    let mut next = Some(first);
    let mut entries: Vec<Entry> = Vec::new();
    while let Some(url) = next.take() {
        let mut request = client.get(url.clone());
        if let Some(token) = token.filter(|_| url.origin() == origin) {
            request = request.bearer_auth(token);
        }
        let passing = |error: reqwest::Error| Failure::Passing { detail: chain(&error), wait: None };
        let answer = request.send().await.map_err(passing)?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        if !status.is_success() {
            return Err(refused(status.as_u16(), &headers, repo, commit, None));
        }
        let body = answer.bytes().await.map_err(passing)?;
        let page: Vec<Entry> = serde_json::from_slice(&body).map_err(|error| unusable(error.to_string()))?;
        entries.extend(page);
        next = next_page(&headers).and_then(|link| url.join(&link).ok());
    }
    let mut files: Vec<RemoteFile> =
        entries.into_iter().filter(|entry| entry.kind == "file").map(remote_file).collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    name_by_place(&mut files, commit);
    match files.iter().find(|file| !file.is_safe()) {
        Some(file) => Err(unusable(format!("the file name {:?} is not one", file.path))),
        None => Ok(files),
    }
}

/// Sorts a failing answer by its status and headers.
pub(crate) fn refused(status: u16, headers: &HeaderMap, repo: &Repo, commit: &Commit, path: Option<&str>) -> Failure {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let wait = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let answer = Status {
        number: status,
        code: text("x-error-code"),
        message: text("x-error-message"),
        wait: wait.map(Duration::from_secs),
    };
    by_status(answer, repo, commit.as_str(), path)
}

fn remote_file(entry: Entry) -> RemoteFile {
    let xet = entry.xet_hash.is_some();
    match entry.lfs {
        Some(lfs) => RemoteFile { path: entry.path, size: lfs.size.unwrap_or(entry.size), identity: lfs.oid, xet },
        None => RemoteFile { path: entry.path, size: entry.size, identity: entry.oid, xet },
    }
}

/// Mirrors and stand-ins may state no usable content hash, or the same one for different files. Then a file is identified
/// by where it lies: a commit never changes.
fn name_by_place(files: &mut [RemoteFile], commit: &Commit) {
    let mut sizes: BTreeMap<&str, u64> = BTreeMap::new();
    let contradiction = files.iter().any(|file| *sizes.entry(&file.identity).or_insert(file.size) != file.size);
    for file in files {
        let usable = matches!(file.identity.len(), 40 | 64) && file.identity.bytes().all(|b| b.is_ascii_hexdigit());
        if contradiction || !usable {
            let digest = <sha2::Sha256 as sha2::Digest>::digest(format!("{commit}/{}", file.path));
            file.identity = format!("at{}", hex(&digest));
        }
    }
}

/// Target of `Link: <URL>; rel="next"`.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get(LINK)?.to_str().ok()?;
    links.split(',').find_map(|link| {
        let (url, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        rest.contains("rel=\"next\"").then(|| url.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_hashes_never_make_two_files_one() {
        let commit: Commit = "0123456789abcdef0123456789abcdef01234567".parse().unwrap();
        let file = |path: &str, size, identity: &str| RemoteFile {
            path: path.into(),
            size,
            identity: identity.into(),
            xet: false,
        };
        let mut short = vec![file("a", 1, "ab"), file("b", 1, "ab")];
        name_by_place(&mut short, &commit);
        assert_ne!(short[0].identity, short[1].identity);
        let same = "a".repeat(40);
        let mut contradicting = vec![file("a", 1, &same), file("b", 2, &same)];
        name_by_place(&mut contradicting, &commit);
        assert_ne!(contradicting[0].identity, contradicting[1].identity);
        let mut honest = vec![file("a", 1, &same), file("b", 1, &same)];
        name_by_place(&mut honest, &commit);
        assert!(honest.iter().all(|file| file.identity == same), "equal files share one blob");
    }
}

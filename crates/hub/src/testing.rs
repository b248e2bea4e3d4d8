//! A Hub on the loopback for tests, well-behaved or not. It serves folders as repositories over plain HTTP/1.1: repository
//! information, file lists, and files with ranges. Knows no uploads and no Xet.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::json;
use sha1::Digest as _;

use crate::transfer::hex;

/// How the Hub misbehaves.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Every n-th request (from 1) is answered with this status.
    pub every: Option<(usize, u16)>,
    /// The first n requests are answered with this status.
    pub first: Option<(usize, u16)>,
    /// `Retry-After`, in seconds, of failing answers.
    pub retry_after: Option<u64>,
    /// Connections for files are cut after so many bytes of the body.
    pub cut_after: Option<usize>,
    /// Connections for JSON answers are cut in the middle, for the first n of them.
    pub cut_answers: usize,
    /// Ranges are ignored: the whole file is sent.
    pub no_ranges: bool,
    /// The first n file bodies have a flipped bit.
    pub flip: usize,
    /// Wait before each answer.
    pub delay: Duration,
    /// Requests without this token are refused with 401.
    pub token: Option<String>,
    /// Every repository is gated: files are refused with 403.
    pub gated: bool,
}

/// A running Hub; it ends with the process.
pub struct Loopback {
    address: String,
    state: Arc<Mutex<State>>,
}

struct State {
    /// `datasets/OWNER/NAME` or `models/OWNER/NAME` → its folder.
    repos: BTreeMap<String, PathBuf>,
    faults: Faults,
    /// Method, path and range of each request.
    log: Vec<String>,
}

impl Loopback {
    /// Starts one that has no repositories.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on the loopback");
        let address = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
        let state = Arc::new(Mutex::new(State { repos: BTreeMap::new(), faults: Faults::default(), log: Vec::new() }));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                // A client that hangs up is no matter of the server's.
                thread::spawn(move || drop(serve(&stream, &state)));
            }
        });
        Self { address, state }
    }

    /// Value for `HF_ENDPOINT`.
    pub fn endpoint(&self) -> &str {
        &self.address
    }

    /// Serves a folder as the data set `OWNER/NAME`; it is read anew at each request.
    #[must_use]
    pub fn dataset(self, id: &str, folder: &Path) -> Self {
        self.lock().repos.insert(format!("datasets/{id}"), folder.to_owned());
        self
    }

    /// Serves a folder as the model `OWNER/NAME`; it is read anew at each request.
    #[must_use]
    pub fn model(self, id: &str, folder: &Path) -> Self {
        self.lock().repos.insert(format!("models/{id}"), folder.to_owned());
        self
    }

    /// Misbehaves from now on.
    pub fn misbehave(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// `METHOD PATH[ RANGE]` of every request so far.
    pub fn requests(&self) -> Vec<String> {
        self.lock().log.clone()
    }

    /// Forgets the requests so far.
    pub fn forget(&self) {
        self.lock().log.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One file as the Hub sees it. Files above this many bytes are "large": they have a SHA-256.
const LARGE: usize = 1024;

struct Served {
    bytes: Vec<u8>,
    oid: String,
    sha256: Option<String>,
}

impl Served {
    fn etag(&self) -> &str {
        self.sha256.as_deref().unwrap_or(&self.oid)
    }
}

fn read_repo(root: &Path) -> io::Result<BTreeMap<String, Served>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let bytes = fs_err::read(&path)?;
            let oid = sha1::Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(&bytes).finalize();
            let sha256 = (bytes.len() > LARGE).then(|| hex(&<sha2::Sha256 as sha2::Digest>::digest(&bytes)));
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            files.insert(name, Served { bytes, oid: hex(&oid), sha256 });
        }
    }
    Ok(files)
}

/// Equal contents, equal commit; any change gives another one.
fn commit_of(files: &BTreeMap<String, Served>) -> String {
    let mut hasher = sha1::Sha1::new();
    for (name, file) in files {
        hasher.update(format!("{name}\0{}\0", file.etag()));
    }
    hex(&hasher.finalize())
}

struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
}

impl Answer {
    fn json(value: &serde_json::Value) -> Self {
        Self {
            status: 200,
            headers: "Content-Type: application/json\r\n".to_owned(),
            body: value.to_string().into_bytes(),
        }
    }

    fn error(status: u16, code: &str, message: &str) -> Self {
        let code = if code.is_empty() { String::new() } else { format!("X-Error-Code: {code}\r\n") };
        let body = json!({ "error": message }).to_string().into_bytes();
        Self { status, headers: format!("{code}X-Error-Message: {message}\r\n"), body }
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or_default().to_owned());
    let (mut range, mut length, mut token) = (None, 0, None);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((name, value)) = header.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => range = parse_range(value),
            "content-length" => length = value.parse().unwrap_or(0),
            "authorization" => token = value.strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    reader.by_ref().take(length).read_to_end(&mut Vec::new())?;

    let (faults, count, repos) = {
        let mut state = lock(state);
        let range = range.map_or(String::new(), |(from, _)| format!(" {from}-"));
        state.log.push(format!("{method} {path}{range}"));
        (state.faults.clone(), state.log.len(), state.repos.clone())
    };
    thread::sleep(faults.delay);
    let failing = faults.every.filter(|(n, _)| count % n == 0).or(faults.first.filter(|(n, _)| count <= *n));
    let mut answer = match failing {
        Some((_, status)) => {
            let after = faults.retry_after.map_or(String::new(), |s| format!("Retry-After: {s}\r\n"));
            Answer { status, headers: after, body: b"{}".to_vec() }
        }
        None if faults.token.is_some() && token != faults.token => {
            Answer::error(401, "RepoNotFound", "Repository not found or private")
        }
        None => answer(&repos, &path, range, &faults)?,
    };

    let is_file = path.contains("/resolve/");
    let length = answer.body.len();
    let mut cut = None;
    if method != "HEAD" && answer.status < 300 {
        if is_file {
            cut = faults.cut_after.filter(|limit| *limit < length);
            if faults.flip > 0 && length > 0 {
                lock(state).faults.flip -= 1;
                answer.body[length / 2] ^= 1;
            }
        } else if faults.cut_answers > 0 {
            lock(state).faults.cut_answers -= 1;
            cut = Some(length / 2);
        }
    }
    let mut stream = stream;
    let Answer { status, headers, body } = answer;
    write!(stream, "HTTP/1.1 {status} Status\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n")?;
    if method != "HEAD" {
        stream.write_all(&body[..cut.unwrap_or(length)])?;
    }
    stream.flush()?;
    stream.shutdown(std::net::Shutdown::Both)
}

fn parse_range(value: &str) -> Option<(usize, Option<usize>)> {
    let (from, to) = value.strip_prefix("bytes=")?.split_once('-')?;
    Some((from.parse().ok()?, to.parse().ok()))
}

fn answer(
    repos: &BTreeMap<String, PathBuf>,
    path: &str,
    range: Option<(usize, Option<usize>)>,
    faults: &Faults,
) -> io::Result<Answer> {
    let path = decode_percent(path.split('?').next().unwrap_or_default());
    let path = path.trim_start_matches('/');
    let no_repo = || Answer::error(401, "RepoNotFound", "Repository not found");
    let no_revision = || Answer::error(404, "RevisionNotFound", "Invalid rev id");
    // Models have no prefix before `/resolve/`.
    let key = |rest: &str| if rest.starts_with("datasets/") { rest.to_owned() } else { format!("models/{rest}") };

    if let Some((repo, rest)) = path.split_once("/resolve/") {
        let Some(root) = repos.get(&key(repo)) else { return Ok(no_repo()) };
        if faults.gated {
            return Ok(Answer::error(403, "GatedRepo", "Access to this resource is restricted"));
        }
        let files = read_repo(root)?;
        let commit = commit_of(&files);
        let Some((revision, name)) = rest.split_once('/') else { return Ok(no_revision()) };
        if revision != "main" && revision != commit {
            return Ok(no_revision());
        }
        let Some(file) = files.get(name) else {
            return Ok(Answer::error(404, "EntryNotFound", "Entry not found"));
        };
        let headers = format!("ETag: \"{}\"\r\nX-Repo-Commit: {commit}\r\nAccept-Ranges: bytes\r\n", file.etag());
        let total = file.bytes.len();
        return Ok(match range.filter(|(from, _)| !faults.no_ranges && *from < total) {
            Some((from, to)) => {
                let to = to.unwrap_or(total - 1).min(total - 1);
                let headers = format!("{headers}Content-Range: bytes {from}-{to}/{total}\r\n");
                Answer { status: 206, headers, body: file.bytes[from..=to].to_vec() }
            }
            None => Answer { status: 200, headers, body: file.bytes.clone() },
        });
    }

    let Some(rest) = path.strip_prefix("api/") else { return Ok(no_repo()) };
    let (repo, verb, revision) = match (rest.split_once("/tree/"), rest.split_once("/revision/")) {
        (Some((repo, revision)), _) => (repo, "tree", revision),
        (None, Some((repo, revision))) => (repo, "info", revision),
        (None, None) => (rest, "info", "main"),
    };
    let Some(root) = repos.get(repo) else { return Ok(no_repo()) };
    let files = read_repo(root)?;
    let commit = commit_of(&files);
    if revision != "main" && revision != commit {
        return Ok(no_revision());
    }
    Ok(if verb == "tree" {
        let entries = files.iter().map(|(path, file)| match &file.sha256 {
            None => json!({ "type": "file", "path": path, "size": file.bytes.len(), "oid": file.oid }),
            Some(sha256) => json!({
                "type": "file", "path": path, "size": file.bytes.len(), "oid": "f".repeat(40),
                "lfs": { "oid": sha256, "size": file.bytes.len(), "pointerSize": 130 },
            }),
        });
        Answer::json(&entries.collect())
    } else {
        let id = repo.split_once('/').map_or(repo, |(_, id)| id);
        let siblings: Vec<_> = files.keys().map(|name| json!({ "rfilename": name })).collect();
        Answer::json(&json!({
            "id": id, "_id": "1", "sha": commit, "private": false, "gated": false, "siblings": siblings,
        }))
    })
}

fn decode_percent(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let code = if first == b'%' { tail.get(..2).and_then(|code| std::str::from_utf8(code).ok()) } else { None };
        let decoded = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        bytes.push(decoded.unwrap_or(first));
        rest = if decoded.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

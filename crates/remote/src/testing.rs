//! For tests: a real S3-compatible server on the loopback, and a line to it that can be cut.
//!
//! The server is moto, installed from PyPI once and kept. Where PyPI cannot be reached the tests that need it say that they
//! are skipped; with the variable `CI` set they fail instead.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// The pinned packages; the name of the folder changes with them.
const PACKAGES: &str = include_str!("s3-server.txt");

/// Runs the server until whoever started it is gone: then its standard input ends.
const PROGRAM: &str = "\
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.server import main
main(['-H', '127.0.0.1', '-p', '0'])
";

/// A running server; it ends with this process.
#[derive(Debug)]
pub struct S3 {
    /// Its standard input is kept open.
    _child: Child,
    port: u16,
}

impl S3 {
    /// Starts a server whose packages lie in `folder`, installing them if need be; `None` where that cannot be done.
    #[expect(clippy::print_stderr, reason = "a skipped test says so")]
    pub fn start(folder: &Path) -> Option<Self> {
        match installed(folder).and_then(|packages| Self::launch(&packages)) {
            Ok(server) => Some(server),
            Err(error) if std::env::var_os("CI").is_some() => panic!("no S3-compatible server: {error}"),
            Err(error) => {
                eprintln!("skipped: no S3-compatible server: {error}");
                None
            }
        }
    }

    fn launch(packages: &Path) -> io::Result<Self> {
        let mut server = Command::new("python3");
        server.args(["-c", PROGRAM]).env("PYTHONPATH", packages);
        let mut child = server.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(child.stderr.take().ok_or_else(|| io::Error::other("no pipe"))?);
        let mut line = String::new();
        while said.read_line(&mut line)? > 0 {
            let port = line.trim().rsplit_once("http://127.0.0.1:").and_then(|(_, port)| port.parse().ok());
            if let Some(port) = port {
                thread::spawn(move || io::copy(&mut said, &mut io::sink()));
                return Ok(Self { _child: child, port });
            }
            line.clear();
        }
        let _ = child.kill();
        Err(io::Error::other(format!("the server ended: {}", child.wait()?)))
    }

    /// Port on the loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Makes a bucket.
    pub fn make_bucket(&self, name: &str) {
        self.ask("PUT", &format!("/{name}"), b"");
    }

    /// Writes an object over what is there.
    pub fn put(&self, path: &str, bytes: &[u8]) {
        self.ask("PUT", path, bytes);
    }

    /// An object's bytes.
    pub fn get(&self, path: &str) -> Vec<u8> {
        self.ask("GET", path, b"")
    }

    /// Removes an object.
    pub fn delete(&self, path: &str) {
        self.ask("DELETE", path, b"");
    }

    /// Paths of a bucket's objects, sorted.
    pub fn list(&self, bucket: &str) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.ask("GET", &format!("/{bucket}?list-type=2"), b"")).into_owned();
        let keys = text.split("<Key>").skip(1).filter_map(|rest| Some(rest.split_once("</Key>")?.0.to_owned()));
        keys.collect()
    }

    /// Panics unless the server is content.
    fn ask(&self, verb: &str, path: &str, body: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server listens");
        let head = format!(
            "{verb} {path} HTTP/1.0\r\nHost: 127.0.0.1:{}\r\nContent-Type: application/octet-stream\r\nContent-Length: {}\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0\r\n\r\n",
            self.port,
            body.len()
        );
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).expect("a request");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        let at = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8_lossy(&answer[..at]).into_owned();
        let status = head.split_whitespace().nth(1).unwrap_or_default();
        assert!(status.starts_with('2'), "{verb} {path}: {head}");
        answer.split_off(at + 4)
    }
}

/// Where the packages are; one process installs them, the others wait.
fn installed(folder: &Path) -> io::Result<std::path::PathBuf> {
    fs_err::create_dir_all(folder)?;
    let name = format!("s3-server-{}", store::Digest::of_bytes(PACKAGES.as_bytes()).short());
    let packages = folder.join(&name);
    let lock = fs_err::File::create(folder.join(format!("{name}.lock")))?;
    lock.file().lock()?;
    if packages.exists() {
        return Ok(packages);
    }
    let part = folder.join(format!("{name}.part"));
    let list = folder.join(format!("{name}.txt"));
    fs_err::write(&list, PACKAGES)?;
    let _ = fs_err::remove_dir_all(&part);
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]);
    let done = pip.args(["--only-binary=:all:", "--target"]).arg(&part).arg("-r").arg(&list).output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        return Err(io::Error::other(said.lines().last().unwrap_or("pip failed").to_owned()));
    }
    fs_err::rename(&part, &packages)?;
    Ok(packages)
}

/// A line to a server that can be cut, and that counts what comes back over it.
#[derive(Debug)]
pub struct Line {
    port: u16,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    target: u16,
    /// Bytes that may still come back; negative is cut, and [`UNCUT`] is never.
    left: AtomicI64,
    came: AtomicU64,
}

const UNCUT: i64 = i64::MAX / 2;

impl Line {
    /// A line to a port on the loopback.
    pub fn to(target: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(State { target, left: AtomicI64::new(UNCUT), came: AtomicU64::new(0) });
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                thread::spawn(move || state.serve(&client));
            }
        });
        Self { port, state }
    }

    /// Port on the loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Cuts the line once so many more bytes came back; it stays cut until [`Line::heal`].
    pub fn cut_after(&self, bytes: u64) {
        self.state.left.store(bytes as i64, Ordering::SeqCst);
    }

    /// Lets everything through again.
    pub fn heal(&self) {
        self.state.left.store(UNCUT, Ordering::SeqCst);
    }

    /// Bytes that came back so far.
    pub fn came(&self) -> u64 {
        self.state.came.load(Ordering::SeqCst)
    }
}

impl State {
    fn serve(&self, client: &TcpStream) {
        if self.left.load(Ordering::SeqCst) < 0 {
            return;
        }
        let Ok(server) = TcpStream::connect(("127.0.0.1", self.target)) else { return };
        let (Ok(mut up), Ok(mut from)) = (server.try_clone(), client.try_clone()) else { return };
        thread::spawn(move || {
            let _ = io::copy(&mut from, &mut up);
            let _ = up.shutdown(Shutdown::Write);
        });
        let (mut server, mut client) = (&server, client);
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n) = server.read(&mut buffer) {
            let left = self.left.fetch_sub(n as i64, Ordering::SeqCst);
            if n == 0 || left < n as i64 || client.write_all(&buffer[..n]).is_err() {
                break;
            }
            self.came.fetch_add(n as u64, Ordering::SeqCst);
        }
        // Both ends learn of it at once.
        let _ = client.shutdown(Shutdown::Both);
        let _ = server.shutdown(Shutdown::Both);
        thread::sleep(Duration::from_millis(1));
    }
}

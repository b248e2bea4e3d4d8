//! The processes of one run: one, or several ranks that find each other as `torchrun`'s do. Knows nothing of what they say.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::error::Result;
use crate::signals;
use crate::spawn::Start;

/// After a rank has failed, the others get this long to notice, to say what they saw and to end by themselves.
const GRACE: Duration = Duration::from_secs(10);

/// How often a process is looked at.
const WATCH: Duration = Duration::from_millis(100);

/// Processes of one run, in one process group.
pub(crate) struct Team {
    children: Vec<Child>,
    /// Peak of each one's resident memory, as last seen.
    memory: Vec<Option<u64>>,
    lines: Receiver<Heard>,
    _meeting: Option<Meeting>,
}

/// How a rank ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    pub(crate) status: ExitStatus,
    /// Ranks that ended before it.
    pub(crate) order: usize,
    /// It outlived a failed one for too long.
    pub(crate) ended_by_us: bool,
}

/// A line of a rank, or the end of its standard output.
type Heard = (usize, Option<Vec<u8>>);

/// Start of a rank's lines in the log that all of them share.
pub(crate) fn tag(rank: usize, ranks: usize) -> Vec<u8> {
    if ranks == 1 { Vec::new() } else { format!("[rank {rank}] ").into_bytes() }
}

impl Team {
    /// Starts all ranks. The inner error is that of a program that cannot be started.
    pub(crate) fn start(start: &Start<'_>, log: &fs_err::File) -> Result<std::io::Result<Self>> {
        let (send, lines) = mpsc::channel();
        let meeting = if start.ranks > 1 { Some(Meeting::new()?) } else { None };
        let port = meeting.as_ref().map_or(0, |meeting| meeting.port);
        let memory = vec![None; start.ranks];
        let mut team = Self { children: Vec::new(), memory, lines, _meeting: meeting };
        for rank in 0..start.ranks {
            let mut command = Command::new(start.program);
            command
                .args(["run", "--request"])
                .arg(start.request_file)
                .stdin(start.lock.as_stdin()?)
                .stdout(Stdio::piped());
            // Its own group: a terminal's ctrl-C comes to the runner alone, which passes it on once.
            command.process_group(team.children.first().map_or(0, |first| first.id() as i32));
            for name in spec::VARIABLES.into_iter().chain(spec::OF_LAUNCHERS) {
                command.env_remove(name);
            }
            if start.ranks == 1 {
                command.stderr(Stdio::from(log.try_clone()?.into_parts().0));
            } else {
                let (place, size) = (rank.to_string(), start.ranks.to_string());
                let values = [&place, &size, &place, &size, "127.0.0.1", &port.to_string()];
                command.envs(spec::VARIABLES.into_iter().zip(values)).stderr(Stdio::piped());
            }
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => {
                    team.kill();
                    return Ok(Err(error));
                }
            };
            if let Some(stdout) = child.stdout.take() {
                let send = send.clone();
                thread::Builder::new().name("events".to_owned()).spawn(move || hear(rank, stdout, &send))?;
            }
            if let Some(stderr) = child.stderr.take() {
                let (tag, log) = (tag(rank, start.ranks), log.try_clone()?);
                thread::Builder::new().name("log".to_owned()).spawn(move || {
                    for line in BufReader::new(stderr).split(b'\n').map_while(std::result::Result::ok) {
                        // A log that cannot be written stops nobody.
                        let _ = (&log).write_all(&[tag.as_slice(), &line, b"\n"].concat());
                    }
                })?;
            }
            team.children.push(child);
        }
        Ok(Ok(team))
    }

    /// Number of the process group.
    pub(crate) fn group(&self) -> u32 {
        self.children.first().map_or(0, Child::id)
    }

    /// Peak of the resident memory of all of them together, as far as it was seen.
    pub(crate) fn memory(&self) -> Option<u64> {
        self.memory.iter().copied().sum()
    }

    /// Feeds each line of each rank to `on_line` until all are gone; how they ended, by rank.
    pub(crate) fn listen(&mut self, mut on_line: impl FnMut(usize, &[u8])) -> Result<Vec<End>> {
        let mut ends: Vec<Option<End>> = vec![None; self.children.len()];
        // Ranks by the time of their end: whoever closes its output is about to.
        let mut order: Vec<usize> = Vec::new();
        let (mut failed, mut killed): (Option<Instant>, bool) = (None, false);
        let mut watched: Option<Instant> = None;
        while ends.iter().any(Option::is_none) {
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok((rank, Some(line))) => on_line(rank, &line),
                Ok((rank, None)) => order.push(rank),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => thread::sleep(Duration::from_millis(5)),
            }
            if watched.is_none_or(|at| at.elapsed() >= WATCH) {
                watched = Some(Instant::now());
                for (child, memory) in self.children.iter().zip(&mut self.memory) {
                    *memory = peak_memory(child.id()).or(*memory);
                }
            }
            let gone: Vec<bool> = ends.iter().map(Option::is_some).collect();
            for (rank, child) in self.children.iter_mut().enumerate().filter(|(rank, _)| !gone[*rank]) {
                // A process that the stage left behind may hold the pipe open: the end counts, not the pipe.
                if let Some(status) = child.try_wait()? {
                    if !order.contains(&rank) {
                        order.push(rank);
                    }
                    let place = order.iter().position(|other| *other == rank).unwrap_or(order.len());
                    ends[rank] = Some(End { status, order: place, ended_by_us: killed });
                    failed = failed.or_else(|| (!status.success()).then(Instant::now));
                }
            }
            if !killed && failed.is_some_and(|at| at.elapsed() > GRACE) {
                self.kill();
                killed = true;
            }
        }
        // What they said last may still be on its way.
        while let Ok((rank, line)) = self.lines.recv_timeout(Duration::from_millis(100)) {
            if let Some(line) = &line {
                on_line(rank, line);
            }
        }
        Ok(ends.into_iter().flatten().collect())
    }

    fn kill(&mut self) {
        if !self.children.is_empty() {
            signals::send("KILL", self.group());
        }
    }
}

fn hear(rank: usize, stdout: impl std::io::Read, send: &Sender<Heard>) {
    let lines = BufReader::new(stdout).split(b'\n').map_while(std::result::Result::ok).filter(|line| !line.is_empty());
    // Nobody listens any more once the run is judged.
    for line in lines.map(Some).chain([None]) {
        if send.send((rank, line)).is_err() {
            return;
        }
    }
}

/// Peak of a living process's resident memory, as Linux tells.
fn peak_memory(id: u32) -> Option<u64> {
    let text = fs_err::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// A port at which the ranks can meet: held, but not listened at, so that nobody gets it before the first rank does.
struct Meeting {
    port: u16,
    _held: Socket,
}

impl Meeting {
    fn new() -> std::io::Result<Self> {
        let held = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // The first rank asks for the same: then both may have it, as long as one of them does not listen.
        held.set_reuse_address(true)?;
        held.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
        let port = held.local_addr()?.as_socket().map_or(0, |address| address.port());
        Ok(Self { port, _held: held })
    }
}

//! A throw-away folder and the real programs run in it. The only place of this package that starts processes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Root of the workspace.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace exists")
}

/// Built program `name`, beside this test's own executable.
pub(crate) fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let path = test.ancestors().nth(2).expect("target/<profile>/deps/<test>").join(name);
    assert!(path.exists(), "`{}` is not built: run `cargo build --workspace --bins` first", path.display());
    path
}

/// A folder with all that is in it, once more.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    fs_err::create_dir_all(to).expect("a folder");
    for entry in fs_err::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            fs_err::copy(entry.path(), target).expect("a copy");
        }
    }
}

/// What a finished program left.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    /// Both streams, for searching.
    pub(crate) fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Fails with everything printed unless the exit code is `code`.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Fails unless each of `parts` was printed, and nothing that looks like a panic.
    #[track_caller]
    pub(crate) fn says(self, parts: &[&str]) -> Self {
        let text = unwrapped(&self.text());
        for part in parts {
            assert!(text.contains(part), "`{part}` is not in:\n{}", self.text());
        }
        assert!(!text.contains("panicked at"), "a user's mistake panicked:\n{}", self.text());
        self
    }
}

/// Text with the line breaks and gutters of error reports undone.
fn unwrapped(text: &str) -> String {
    text.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A folder of its own for one test.
pub(crate) struct Sandbox {
    dir: tempfile::TempDir,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(relative)
    }

    /// Writes a text file, making its folders.
    pub(crate) fn write(&self, relative: &str, text: &str) -> PathBuf {
        let path = self.path(relative);
        fs_err::create_dir_all(path.parent().expect("has a parent")).expect("folders");
        fs_err::write(&path, text).expect("a written file");
        path
    }

    /// `pipeline ARGS` in this folder, not yet started, without the environment of the caller's Hub.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program("pipeline"));
        command
            .args(args)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .env("NO_COLOR", "1")
            .env("HF_HOME", self.path("hf"));
        for name in ["PIPELINE_CACHE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_CACHE"] {
            command.env_remove(name);
        }
        command
    }

    /// Runs `pipeline ARGS` to its end, where neither it nor any process that it starts may hold more than so many MiB of writable
    /// memory of its own.
    pub(crate) fn limited(&self, mib: u64, args: &[&str]) -> Finished {
        let plain = self.command(args);
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -d {}; exec \"$@\"", mib << 10), "sh"]);
        command.arg(plain.get_program()).args(plain.get_args());
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        finish(&mut command)
    }

    /// Runs `pipeline ARGS` to its end.
    pub(crate) fn pipeline(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args))
    }
}

/// Runs a command to its end.
pub(crate) fn finish(command: &mut Command) -> Finished {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// SIGKILL to a process and its children.
pub(crate) fn kill_tree(pid: u32) {
    signal_tree(pid, "KILL");
}

/// A signal, by its name, to a process and its children.
pub(crate) fn signal_tree(pid: u32, name: &str) {
    let below = children(pid);
    for id in std::iter::once(pid.to_string()).chain(below) {
        signal(&id, name);
    }
}

/// A signal, by its name, to a process, which may have ended.
pub(crate) fn signal(pid: &str, name: &str) {
    finish(Command::new("kill").args(["-s", name, pid]));
}

/// Processes that a process started: a runner has a thread for each stage that it starts.
pub(crate) fn children(pid: u32) -> Vec<String> {
    let threads = fs_err::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.map(|thread| fs_err::read_to_string(thread.path().join("children")).unwrap_or_default());
    lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

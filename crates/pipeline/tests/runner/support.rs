//! A throw-away folder with a graph, a recipe and fake stages, and the runner run in it.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const GRAPH: &str = r#"
[stage.dig]
program = "bin/pipeline-dig"
[stage.smelt]
program = "bin/pipeline-smelt"
inputs = { ore = "dig" }
[stage.forge]
program = "bin/pipeline-forge"
inputs = { metal = "smelt" }
defaults = { text = "dig.text" }
"#;

const RECIPE: &str = r#"name = "sword"

[dig]
text = "iron"
source = "mine"

[smelt]
amount = 2

[forge]
text = "blade"
"#;

pub(crate) struct Forge {
    folder: tempfile::TempDir,
}

pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Forge {
    pub(crate) fn new() -> Self {
        let forge = Self { folder: tempfile::tempdir().unwrap() };
        forge.write("pipeline.toml", GRAPH);
        forge.write("sword.toml", RECIPE);
        forge.write("mine/a.txt", "rock");
        for stage in ["dig", "smelt", "forge", "assay"] {
            let path = forge.write(&format!("bin/pipeline-{stage}"), include_str!("fake_stage.py"));
            fs_err::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        forge
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, text).unwrap();
        path
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs_err::read_to_string(self.path(name)).unwrap()
    }

    /// Replaces text in a file.
    pub(crate) fn edit(&self, name: &str, from: &str, to: &str) {
        let text = self.read(name);
        assert!(text.contains(from), "{from} is not in {name}");
        self.write(name, &text.replace(from, to));
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pipeline"));
        command.args(args).current_dir(self.path("")).stdin(Stdio::null()).env("FAKE_LOG", self.path("calls"));
        command.env("NO_COLOR", "1").env_remove("PIPELINE_CACHE").env_remove("PIPELINE_REMOTE");
        command
    }

    pub(crate) fn start(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    pub(crate) fn finish(&self, child: Child) -> Said {
        let output = child.wait_with_output().unwrap();
        let clean = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            text.replace(&format!("{}/", self.path("").display().to_string().trim_end_matches('/')), "")
        };
        Said { code: output.status.code().unwrap_or(-1), out: clean(&output.stdout), err: clean(&output.stderr) }
    }

    pub(crate) fn run(&self, args: &[&str]) -> Said {
        self.finish(self.start(args))
    }

    /// Runs and fails the test unless the exit code is 0.
    #[track_caller]
    pub(crate) fn good(&self, args: &[&str]) -> Said {
        let said = self.run(args);
        assert_eq!(said.code, 0, "{args:?}\n{}\n{}", said.out, said.err);
        said
    }

    /// Calls of stage programs since the last question, such as `dig run`.
    pub(crate) fn calls(&self) -> Vec<String> {
        let path = self.path("calls");
        let text = fs_err::read_to_string(&path).unwrap_or_default();
        let _ = fs_err::remove_file(&path);
        text.lines().map(str::to_owned).collect()
    }

    /// Verbs that did work since the last question.
    pub(crate) fn ran(&self) -> Vec<String> {
        self.calls().iter().filter_map(|call| Some(call.strip_suffix(" run")?.to_owned())).collect()
    }

    /// Waits, two minutes at most, until something is so.
    pub(crate) fn wait_for(&self, found: impl Fn() -> bool) {
        for _ in 0..6000 {
            if found() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("it did not happen: {}", self.path("").display());
    }

    pub(crate) fn artifacts(&self, stage: &str) -> usize {
        fs_err::read_dir(self.path(".pipeline/artifacts").join(stage)).map_or(0, Iterator::count)
    }

    /// The text of an error report with its keys, times and sizes made equal.
    pub(crate) fn report(&self, args: &[&str], code: i32) -> String {
        let said = self.run(args);
        assert_eq!(said.code, code, "{}\n{}", said.out, said.err);
        said.err
    }
}

/// Every line of `said` that starts with a stage's name, without key and time.
pub(crate) fn stage_line<'a>(text: &'a str, stage: &str) -> &'a str {
    text.lines().find(|line| line.starts_with(stage)).unwrap_or_else(|| panic!("no line of {stage} in:\n{text}"))
}

pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

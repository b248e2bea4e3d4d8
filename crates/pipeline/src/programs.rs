//! Stage programs: where they are, what they say of themselves, what they say about parameters.
//!
//! Answers are remembered by the program's file, the question, and the files that were consulted, so that an unchanged
//! recipe starts no process.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spec::graph::Node;
use spec::{Mistake, Problem};
use stage::{CONTRACT, CheckRequest, Checked, Description, Estimate, EstimateRequest, Exit, SourceKind};
use store::{Cache, Digest, FileStamp};

use crate::error::{Error, Result};

/// A program found on disk.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    stamp: FileStamp,
}

/// An answer of `check`, as it is remembered.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) checked: Checked,
    /// Digests of `checked.consulted`; `None` for a file that is not there.
    pub(crate) consulted: BTreeMap<PathBuf, Option<Digest>>,
}

impl Program {
    /// Looks for a stage's program: a path relative to the graph, else beside the runner, else on PATH.
    pub(crate) fn find(node: &Node, graph: Option<&Path>) -> Result<Self> {
        let name = &node.program;
        let mut candidates: Vec<PathBuf> = Vec::new();
        if name.contains('/') {
            let folder = graph.and_then(Path::parent).unwrap_or(Path::new("."));
            candidates.push(folder.join(name));
        } else {
            let runner = std::env::current_exe().ok();
            candidates.extend(runner.as_deref().and_then(Path::parent).map(|folder| folder.join(name)));
            let path = std::env::var_os("PATH").unwrap_or_default();
            candidates.extend(std::env::split_paths(&path).map(|folder| folder.join(name)));
        }
        let found = candidates.iter().find(|path| is_executable(path)).ok_or_else(|| {
            Error::new(
                Exit::Usage,
                Mistake::new(format!("the program `{name}` of the stage `{}` is not there", node.name)).help(
                    if name.contains('/') {
                        format!("`{}` must be an executable file", candidates[0].display())
                    } else {
                        "it is looked for beside the `pipeline` program and on PATH; `make` builds ours".to_owned()
                    },
                ),
            )
        })?;
        let path = fs_err::canonicalize(found)?;
        Ok(Self { stamp: FileStamp::of(&path)?, path })
    }

    fn identity(&self) -> Value {
        json!({"path": self.path, "stamp": self.stamp})
    }

    /// Asks the program what it is.
    pub(crate) fn describe(&self, cache: &Cache, node: &Node) -> Result<Description> {
        let question = self.identity();
        if let Some(known) = cache.recall::<Description>("describe", &question) {
            return Ok(known);
        }
        let description: Description = self.ask(&node.name, "describe", None)?;
        let broken = |message: String| {
            let help = format!("rebuild `{}` together with the runner", self.path.display());
            Err(Error::new(Exit::Failed, Mistake::new(message).help(help)))
        };
        if description.contract != CONTRACT {
            return broken(format!(
                "`{}` speaks contract {}, this runner speaks {CONTRACT}",
                self.path.display(),
                description.contract
            ));
        }
        if description.stage != node.name {
            return broken(format!(
                "`{}` says that it is the stage `{}`, not `{}`",
                self.path.display(),
                description.stage,
                node.name
            ));
        }
        cache.remember("describe", &question, &description);
        Ok(description)
    }

    /// Asks the program to look the parameters over.
    pub(crate) fn check(&self, cache: &Cache, stage: &str, request: &CheckRequest) -> Result<Answer> {
        let question = json!({"program": self.identity(), "request": request});
        let memo: Option<Answer> = cache.recall("check", &question);
        if let Some(memo) = memo.filter(|memo| still_true(memo, &request.base_dir)) {
            return Ok(memo);
        }
        let checked: Checked = self.ask(stage, "check", Some(&json!(request)))?;
        let answer = Answer { consulted: consulted(&checked, &request.base_dir), checked };
        // A problem may vanish by itself, when a file that was missing appears: ask again next time.
        if answer.checked.problems.is_empty() {
            cache.remember("check", &question, &answer);
        }
        Ok(answer)
    }

    /// Asks the program what a run would have to do.
    pub(crate) fn estimate(&self, stage: &str, request: &EstimateRequest) -> Result<Estimate> {
        self.ask(stage, "estimate", Some(&json!(request)))
    }

    /// Runs `program verb [--request -]` and reads the one JSON value it answers.
    fn ask<T: DeserializeOwned>(&self, stage: &str, verb: &str, request: Option<&Value>) -> Result<T> {
        let failed = |what: String, help: Option<String>| {
            let mistake = Mistake::new(format!("`{} {verb}` of the stage `{stage}` {what}", self.path.display()));
            Error::new(
                Exit::Failed,
                match help {
                    Some(help) => mistake.help(help),
                    None => mistake,
                },
            )
        };
        let mut command = Command::new(&self.path);
        command.arg(verb).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut file = tempfile_request()?;
        if let Some(request) = request {
            file.write_all(request.to_string().as_bytes())?;
            command.arg("--request").arg(file.path());
        }
        let output = command.output().map_err(|error| failed(format!("cannot be started: {error}"), None))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            let tail: Vec<&str> = log.trim().lines().rev().take(6).collect();
            let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
            let help = if tail.is_empty() {
                "it wrote nothing to its log".to_owned()
            } else {
                format!("its log ends with:\n{tail}")
            };
            return Err(failed(format!("failed ({})", ended(output.status)), Some(help)));
        }
        serde_json::from_slice(&output.stdout)
            .map_err(|error| failed(format!("gave an answer that cannot be read: {error}"), None))
    }
}

fn tempfile_request() -> Result<tempfile::NamedTempFile> {
    Ok(tempfile::Builder::new().prefix("pipeline-").suffix(".json").tempfile()?)
}

/// How a process ended, in words.
pub(crate) fn ended(status: std::process::ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => {
            let name = match signal {
                4 => " (SIGILL)",
                6 => " (SIGABRT)",
                7 => " (SIGBUS)",
                9 => " (SIGKILL)",
                11 => " (SIGSEGV)",
                15 => " (SIGTERM)",
                _ => "",
            };
            format!("killed by signal {signal}{name}")
        }
        (None, None) => "ended in an unknown way".to_owned(),
    }
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs_err::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn consulted(checked: &Checked, base_dir: &Path) -> BTreeMap<PathBuf, Option<Digest>> {
    checked.consulted.iter().map(|file| (file.clone(), Digest::of_file(&base_dir.join(file)).ok())).collect()
}

/// Whether what a remembered answer depended on is as it was.
fn still_true(memo: &Answer, base_dir: &Path) -> bool {
    consulted(&memo.checked, base_dir) == memo.consulted
        && memo.checked.sources.iter().all(|source| {
            // A folder may have appeared where a Hub id was meant, or gone.
            let here = base_dir.join(&source.location).exists();
            here == (source.kind == SourceKind::Path)
        })
}

/// A problem at a source's parameter.
pub(crate) fn at_source(name: &str, error: &dyn miette::Diagnostic) -> Problem {
    let problem = Problem::new(error.to_string()).field(name);
    match error.help() {
        Some(help) => problem.help(help.to_string()),
        None => problem,
    }
}

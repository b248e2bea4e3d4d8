//! `pipeline report` and the page that each run leaves: the record of a run and its artifacts, told to crate `report`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use report::{Artifact as Made, Ledger, Run, Source, Stage, Status};
use serde_json::{Value, json};
use stage::Exit;
use store::{Artifact, Lookup, RunFolder};

use crate::database;
use crate::error::{Error, Result, say};
use crate::links;
use crate::record::{self, RunRecord, StageRecord};
use crate::show::Current;
use crate::workspace::Workspace;

/// Name of the page, in the run's folder and beside the links to results.
const FILE: &str = "report.html";

/// `pipeline report RECIPE`: writes the page of the last run anew.
pub(crate) fn print(workspace: &Workspace, output: Option<&Path>, open: bool, as_json: bool) -> Result<()> {
    let recipe = &workspace.recipe.name;
    let Some((folder, record)) = last_run(workspace) else {
        let help = format!("`pipeline run {}` makes one", workspace.recipe.path.display());
        return Err(Error::new(Exit::Input, spec::Mistake::new(format!("`{recipe}` has no run yet")).help(help)));
    };
    let path = match output {
        Some(path) => {
            let page = page(workspace, folder.number, &record)?;
            fs_err::write(path, page)?;
            path.to_owned()
        }
        None => write(workspace, &folder, &record)?,
    };
    let text = if as_json { json!({"event": "report", "path": path}).to_string() } else { path.display().to_string() };
    say(&mut std::io::stdout(), &format!("{text}\n"));
    if open { show(&path) } else { Ok(()) }
}

/// Writes the page into the run's folder; answers the link in `runs/RECIPE` that a person follows.
pub(crate) fn write(workspace: &Workspace, folder: &RunFolder, record: &RunRecord) -> Result<PathBuf> {
    let page = page(workspace, folder.number, record)?;
    let path = folder.path.join(FILE);
    let beside = folder.path.join(format!(".{FILE}-{}", std::process::id()));
    fs_err::write(&beside, page)?;
    fs_err::rename(&beside, &path)?;
    links::point(&workspace.runs, &workspace.recipe.name, FILE, &path)
}

fn last_run(workspace: &Workspace) -> Option<(RunFolder, RunRecord)> {
    let runs = workspace.cache.root().join("runs").join(&workspace.recipe.name);
    workspace.cache.run_numbers(&workspace.recipe.name).into_iter().rev().find_map(|number| {
        let path = runs.join(number.to_string());
        let record = workspace.cache.run_record(&workspace.recipe.name, number)?;
        Some((RunFolder { number, path }, record))
    })
}

fn page(workspace: &Workspace, number: u64, record: &RunRecord) -> Result<String> {
    let names: BTreeSet<&str> = record.stages.iter().map(|stage| stage.stage.as_str()).collect();
    let nodes = workspace
        .graph
        .nodes()
        .filter(|node| names.contains(node.name.as_str()) || workspace.recipe.stages.contains_key(&node.name));
    let (mut stages, mut current) = (Vec::new(), Vec::new());
    for node in nodes {
        // A stage that was retried has several records; the last one counts.
        let known = record.stages.iter().rev().find(|stage| stage.stage == node.name);
        let artifact = known.filter(|stage| stage.digest.is_some()).and_then(|stage| {
            match workspace.cache.artifact(&node.name, &stage.key) {
                Lookup::Hit(artifact) => Some(*artifact),
                Lookup::Absent | Lookup::Broken(_) => None,
            }
        });
        stages.push(facts(node, known, artifact.as_ref()));
        current.push(Current { stage: node.name.clone(), artifact, fresh: true, record: known.cloned() });
    }
    let run = Run {
        recipe: record.recipe.clone(),
        text: fs_err::read_to_string(&workspace.recipe.path).unwrap_or_default(),
        number,
        started: record.started.clone(),
        seconds: record.seconds,
        exit: record.exit,
        overrides: record.overrides.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        stages,
    };
    Ok(report::page(&run, &database::open(workspace, &current)?))
}

fn facts(node: &spec::graph::Node, known: Option<&StageRecord>, artifact: Option<&Artifact>) -> Stage {
    let mut stage = Stage {
        name: node.name.clone(),
        inputs: node.inputs.iter().map(|(input, from)| (input.clone(), from.clone())).collect(),
        result: artifact.map(result),
        ..Stage::default()
    };
    if let Some(record) = known {
        stage.status = match record.status {
            record::Status::Cached => Status::Cached,
            record::Status::Made => Status::Made,
            record::Status::Failed => Status::Failed,
            record::Status::Interrupted => Status::Interrupted,
        };
        stage.reason.clone_from(&record.reason);
        stage.seconds = record.seconds;
        stage.device.clone_from(&record.device);
        stage.threads = record.threads;
        stage.notes.clone_from(&record.notes);
        stage.error.clone_from(&record.error);
        stage.key = record.key.to_string();
        // What was worth telling when it was made still is.
        stage.warnings = artifact.map_or_else(|| record.warnings.clone(), |made| made.manifest.warnings.clone());
    }
    stage
}

fn result(artifact: &Artifact) -> Made {
    let manifest = &artifact.manifest;
    let rows = |name: &str| manifest.ledger.get(name).and_then(Value::as_u64).unwrap_or(0);
    let source = |name: &String| {
        let record = manifest.sources.get(name);
        Source {
            name: name.clone(),
            location: record.map(|record| record.location.clone()).unwrap_or_default(),
            commit: record.and_then(|record| record.commit.clone()),
            digest: manifest.material.sources[name].to_string(),
        }
    };
    Made {
        path: artifact.path.clone(),
        files: manifest.files.iter().map(|file| file.path.clone()).collect(),
        bytes: manifest.bytes(),
        digest: manifest.digest.to_string(),
        version: manifest.material.version,
        parameters: manifest.material.parameters.clone(),
        info: manifest.info.clone(),
        sources: manifest.material.sources.keys().map(source).collect(),
        seconds: manifest.seconds,
        summary: manifest.summary.clone(),
        ledger: Ledger { taken: rows("in"), out: rows("out"), rejected: rows("rejected"), held: rows("held") },
    }
}

/// Opens a file with whatever the desktop opens pages with.
fn show(path: &Path) -> Result<()> {
    let opener = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    let opened =
        Command::new(opener).arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    match opened {
        Ok(status) if status.success() => Ok(()),
        _ => Err(Error::new(
            Exit::Failed,
            spec::Mistake::new(format!("`{opener}` could not open the page"))
                .help("the page is written; open the file in a browser"),
        )),
    }
}

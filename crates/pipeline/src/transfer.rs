//! `pipeline push` and `pipeline pull`: a recipe's artifacts to and from a remote, without running anything.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use remote::Remote;
use spec::Mistake;
use stage::Exit;
use store::{Artifact, Manifest};

use crate::error::{Error, Result};
use crate::exchange::{Exchange, Watch, explained, push};
use crate::journal::Journal;
use crate::links;
use crate::plan::{State, judge};
use crate::progress::Reporter;
use crate::record::Status;
use crate::recorded::Asked;
use crate::selection::{Request, Selection};
use crate::signals::Interrupt;
use crate::workspace::{Prepared, Workspace};

/// Address of a remote, as asked or from the environment.
pub(crate) fn address(asked: Option<String>) -> Option<String> {
    let of_environment = || std::env::var("PIPELINE_REMOTE").ok();
    asked.or_else(of_environment).filter(|address| !address.is_empty())
}

/// The same for a command that is nothing without one.
pub(crate) fn needed(asked: Option<String>) -> Result<String> {
    let help = "name one with `--remote URL` or PIPELINE_REMOTE";
    address(asked).ok_or_else(|| Error::usage("there is no remote to go to", help))
}

fn prepared(workspace: &Workspace) -> Result<Vec<Prepared>> {
    let selection = Selection::new(&workspace.graph, &workspace.recipe, &Request::default())?;
    workspace.prepare(&selection.all, &selection.implied)
}

fn reporter(stages: &[Prepared], json: bool) -> Mutex<Reporter> {
    Mutex::new(Reporter::new(json, stages.iter().map(|stage| stage.node.name.len())))
}

/// Sends what the recipe asks for now and the cache has; with `anew`, what the remote has, too.
pub(crate) fn to(workspace: &Workspace, address: &str, anew: bool, json: bool) -> Result<()> {
    let remote = Remote::open(address).map_err(|error| explained(&error))?;
    let stages = prepared(workspace)?;
    let (reporter, interrupt) = (reporter(&stages, json), Interrupt::listen()?);
    let watch = Watch { reporter: &reporter, interrupt: &interrupt };
    let mut made: BTreeMap<String, Artifact> = BTreeMap::new();
    for stage in &stages {
        if let State::Cached { artifact } = judge(workspace, stage, &made, false) {
            let asked = Asked::of(&workspace.recipe, stage);
            push(&remote, &workspace.cache, &watch, &artifact, &asked, anew).map_err(|error| explained(&error))?;
            made.insert(stage.node.name.clone(), *artifact);
        }
    }
    complete(workspace, &stages, &made, "in the cache")
}

/// Brings what the recipe asks for now and the remote has.
pub(crate) fn from(workspace: &Workspace, json: bool) -> Result<()> {
    let Some(exchange) = &workspace.exchange else { return Ok(()) };
    let stages = prepared(workspace)?;
    let (reporter, interrupt) = (reporter(&stages, json), Interrupt::listen()?);
    let watch = Watch { reporter: &reporter, interrupt: &interrupt };
    let mut made: BTreeMap<String, Artifact> = BTreeMap::new();
    // As after a run, what the links lead to is the recipe's, and stays.
    let journal = Journal::begin(workspace, Instant::now());
    for stage in &stages {
        let name = &stage.node.name;
        let artifact = match judge(workspace, stage, &made, false) {
            State::Cached { artifact } => Some(*artifact),
            State::Remote { manifest, .. } => exchange.fetch(&workspace.cache, &watch, &manifest)?,
            State::ToRun { .. } | State::Waits { .. } => None,
        };
        if exchange.remote().is_none() {
            return Err(unusable(exchange));
        }
        for trouble in exchange.troubles() {
            watch.reporter().note(&trouble);
        }
        if let Some(artifact) = artifact {
            let link = links::point(&workspace.runs, &workspace.recipe.name, name, &artifact.path)?;
            let rows = artifact.manifest.ledger.get("out").and_then(serde_json::Value::as_u64).unwrap_or(0);
            let Manifest { key, digest, .. } = artifact.manifest;
            watch.reporter().cached(name, rows, &link, &key);
            journal.note(stage, 0, Status::Cached, "pulled", key, Some(digest));
            made.insert(name.clone(), artifact);
        }
    }
    let done = complete(workspace, &stages, &made, &format!("in `{}`", exchange.address()));
    if let Some(trouble) = journal.end(done.as_ref().map_or_else(|error| error.exit, |()| Exit::Ok)) {
        watch.reporter().note(&trouble);
    }
    done
}

fn unusable(exchange: &Exchange) -> Error {
    let why = exchange.troubles().join("; ").replace("; the run goes on without the remote", "");
    Error::new(
        Exit::Hub,
        Mistake::new(why).help("check the network, the address and the credentials; what came is kept"),
    )
}

fn complete(workspace: &Workspace, stages: &[Prepared], made: &BTreeMap<String, Artifact>, place: &str) -> Result<()> {
    let names = stages.iter().map(|stage| &stage.node.name).filter(|name| !made.contains_key(*name));
    let lacking: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    if lacking.is_empty() {
        return Ok(());
    }
    let text = format!("{} of {} artifacts are not {place}: {}", lacking.len(), stages.len(), lacking.join(", "));
    let help = format!("`pipeline run {}` makes them", workspace.recipe.path.display());
    Err(Error::new(Exit::Input, Mistake::new(text).help(help)))
}

//! `pipeline run`: each stage when its inputs are there, reuse or run, publish, link, record.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spec::{Mistake, Problem};
use stage::{Exit, RunRequest};
use store::{Artifact, Digest, Finished, InputRecord, Lock, Lookup, Manifest, Material, SourceRecord, Staging};

use crate::clock;
use crate::disk;
use crate::error::{Error, Result};
use crate::exchange::{Exchange, Watch, lock};
use crate::journal::Journal;
use crate::links;
use crate::plan::{State, absence, judge, left_out, states, unable};
use crate::pool::{Pool, Share};
use crate::progress::{Ends, Reporter};
use crate::record::Status;
use crate::recorded::Asked;
use crate::request;
use crate::restart::Restarts;
use crate::selection::Selection;
use crate::signals::Interrupt;
use crate::sources::unchanged;
use crate::spawn;
use crate::workspace::{Prepared, Workspace};

/// What took longer than this to make is rebuilt only when asked for.
const DEAR_SECONDS: f64 = 600.0;
/// Input that is found damaged when it is about to be read is rebuilt so many times in one run.
const REPAIRS: usize = 3;
/// Lines of a log that a report of a failure shows.
const LOG_LINES: usize = 12;

/// A run under way.
struct Run<'a> {
    workspace: &'a Workspace,
    reporter: Mutex<Reporter>,
    interrupt: Interrupt,
    journal: Journal<'a>,
    /// An input was damaged and stepped aside: what made it must run first.
    damaged: AtomicBool,
}

/// Runs what must run; `Ok` means that every selected stage's artifact is there.
pub(crate) fn run(workspace: &Workspace, selection: &Selection, json: bool) -> Result<()> {
    let began = Instant::now();
    let interrupt = Interrupt::listen()?;
    let stages = workspace.prepare(&selection.all, &selection.implied)?;
    // Whatever must not run here and is missing is told before anything is spent.
    for (stage, state) in stages.iter().zip(states(workspace, selection, &stages)?) {
        if let State::ToRun { reason, .. } = state
            && let Some(error) = unable(workspace, stage, &reason)
        {
            return Err(error);
        }
    }
    let run = Run {
        workspace,
        reporter: Mutex::new(Reporter::new(json, stages.iter().map(|stage| stage.node.name.len()))),
        interrupt,
        journal: Journal::begin(workspace, began),
        damaged: AtomicBool::new(false),
    };
    for path in stages.iter().flat_map(|stage| &stage.absent).collect::<BTreeSet<_>>() {
        run.reporter().note(&absence(path));
    }
    let mut result = run.stages(selection, &stages);
    for _ in 0..REPAIRS {
        if !run.damaged.swap(false, Ordering::SeqCst) {
            break;
        }
        result = run.stages(selection, &stages);
    }
    let exit = result.as_ref().map_or_else(|error| error.exit, |_| Exit::Ok);
    if let Some(trouble) = run.journal.end(exit) {
        run.reporter().note(&trouble);
    }
    run.leave_report();
    let ends = result?;
    run.reporter().ends(ends, began.elapsed().as_secs_f64());
    Ok(())
}

impl Run<'_> {
    fn reporter(&self) -> MutexGuard<'_, Reporter> {
        self.reporter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) -> Watch<'_> {
        Watch { reporter: &self.reporter, interrupt: &self.interrupt }
    }

    /// Brings every stage's artifact about, and says how.
    ///
    /// A stage starts when its inputs are there and the pool has a share for it. After a failure nothing new starts; what
    /// runs is left to finish, since it is kept.
    fn stages(&self, selection: &Selection, stages: &[Prepared]) -> Result<Ends> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut pool = Pool::new(cores, self.workspace.options.jobs.unwrap_or(usize::MAX));
        let mut made: BTreeMap<String, Artifact> = BTreeMap::new();
        let mut waiting: Vec<&Prepared> = stages.iter().collect();
        let mut ready: Vec<(&Prepared, Material, String)> = Vec::new();
        // One that fetches takes no share.
        let mut running: BTreeMap<String, Option<Share>> = BTreeMap::new();
        let mut ends = Ends::default();
        let mut failed: Option<Error> = None;
        thread::scope(|scope| {
            let (send, ended) = mpsc::channel();
            let (share, shared) = mpsc::channel::<(Artifact, Asked)>();
            scope.spawn(move || self.share(&shared));
            let offer = |stage: &Prepared, artifact: &Artifact| {
                if self.workspace.exchange.is_some() {
                    let asked = Asked::of(&self.workspace.recipe, stage);
                    // The receiver waits for as long as this lives.
                    let _ = share.send((artifact.clone(), asked));
                }
            };
            loop {
                // In graph order, so that one pass sees through a chain of cached stages.
                for stage in std::mem::take(&mut waiting) {
                    if failed.is_some() || !stage.node.inputs.values().all(|from| made.contains_key(from)) {
                        waiting.push(stage);
                        continue;
                    }
                    match self.settle(selection, stage, &made) {
                        Ok(Settled::There(artifact)) => {
                            ends.cached += 1;
                            offer(stage, &artifact);
                            made.insert(stage.node.name.clone(), *artifact);
                        }
                        Ok(Settled::ToFetch(manifest)) => {
                            running.insert(stage.node.name.clone(), None);
                            let send = send.clone();
                            scope.spawn(move || {
                                let _ = send.send((stage, Ended::Fetched(self.fetch(stage, &manifest))));
                            });
                        }
                        Ok(Settled::ToMake(material, reason)) => ready.push((stage, material, reason)),
                        Err(error) => failed = Some(error),
                    }
                }
                let mut left = ready.len();
                for (stage, material, reason) in std::mem::take(&mut ready) {
                    let share = if failed.is_some() {
                        None
                    } else {
                        pool.take(stage.resources.threads, &stage.resources.device, left)
                    };
                    left -= 1;
                    let Some(share) = share else {
                        ready.push((stage, material, reason));
                        continue;
                    };
                    let (threads, forced) = (share.threads, selection.force.contains(&stage.node.name));
                    running.insert(stage.node.name.clone(), Some(share));
                    let inputs: BTreeMap<String, Artifact> = stage
                        .node
                        .inputs
                        .values()
                        .filter_map(|from| Some((from.clone(), made.get(from)?.clone())))
                        .collect();
                    let send = send.clone();
                    scope.spawn(move || {
                        let result = self.make(stage, threads, &material, &reason, &inputs, forced);
                        // The receiver waits for as long as anything runs.
                        let _ = send.send((stage, Ended::Made(result)));
                    });
                }
                if running.is_empty() {
                    break;
                }
                let Ok((stage, result)) = ended.recv() else { break };
                if let Some(Some(share)) = running.remove(&stage.node.name) {
                    pool.give(&share);
                }
                let result = match result {
                    Ended::Made(Ok((artifact, false))) => {
                        ends.cached += 1;
                        self.reuse(stage, &artifact, "cached").map(|()| artifact)
                    }
                    Ended::Made(result) => result.map(|(artifact, _)| {
                        ends.made += 1;
                        artifact
                    }),
                    Ended::Fetched(Ok(None)) => {
                        waiting.push(stage);
                        continue;
                    }
                    Ended::Fetched(Ok(Some(artifact))) => {
                        ends.fetched += 1;
                        Ok(artifact)
                    }
                    Ended::Fetched(Err(error)) => Err(error),
                };
                match result {
                    Ok(artifact) => {
                        offer(stage, &artifact);
                        made.insert(stage.node.name.clone(), artifact);
                    }
                    // What failed first is told; of what followed from it, nothing.
                    Err(error) => drop(failed.get_or_insert(error)),
                }
            }
        });
        failed.map_or(Ok(ends), Err)
    }

    /// Brings an artifact from the remote; `None` if it could not be had.
    fn fetch(&self, stage: &Prepared, manifest: &Manifest) -> Result<Option<Artifact>> {
        let Some(exchange) = &self.workspace.exchange else { return Ok(None) };
        let fetched = exchange.fetch(&self.workspace.cache, &self.watch(), manifest);
        self.tell_troubles();
        let Some(artifact) = fetched? else { return Ok(None) };
        self.reuse(stage, &artifact, &format!("fetched from {}", exchange.address()))?;
        Ok(Some(artifact))
    }

    /// Brings artifacts to the remote, one after the other, while the run goes on.
    fn share(&self, artifacts: &mpsc::Receiver<(Artifact, Asked)>) {
        for (artifact, asked) in artifacts {
            if let (Some(exchange), false) = (&self.workspace.exchange, self.interrupt.asked()) {
                exchange.share(&self.workspace.cache, &self.watch(), &artifact, &asked);
                self.tell_troubles();
            }
        }
    }

    fn tell_troubles(&self) {
        for trouble in self.workspace.exchange.iter().flat_map(Exchange::troubles) {
            self.reporter().note(&trouble);
        }
    }

    /// What is to be done about a stage whose inputs are there.
    fn settle(&self, selection: &Selection, stage: &Prepared, made: &BTreeMap<String, Artifact>) -> Result<Settled> {
        let name = &stage.node.name;
        let state = judge(self.workspace, stage, made, selection.force.contains(name));
        self.tell_troubles();
        if !selection.run.contains(name) && !matches!(state, State::Cached { .. } | State::Remote { .. }) {
            return Err(left_out(self.workspace, name, &state));
        }
        match state {
            State::Cached { artifact } => {
                self.reuse(stage, &artifact, "cached")?;
                Ok(Settled::There(artifact))
            }
            State::Remote { manifest } => Ok(Settled::ToFetch(manifest)),
            State::ToRun { reason, lost: Some(seconds), .. }
                if seconds >= DEAR_SECONDS && !self.workspace.options.repair =>
            {
                Err(dear(name, &reason, seconds))
            }
            State::ToRun { material, reason, .. } => match unable(self.workspace, stage, &reason) {
                Some(error) => Err(error),
                None => Ok(Settled::ToMake(material, reason)),
            },
            State::Waits { on } => {
                let waits = on.join(", ");
                Err(Error::new(Exit::Bug, Mistake::new(format!("`{name}` waits for {waits}, which ran"))))
            }
        }
    }

    /// Links and notes an artifact that was not made here and now.
    fn reuse(&self, stage: &Prepared, artifact: &Artifact, reason: &str) -> Result<()> {
        let name = &stage.node.name;
        let link = links::point(&self.workspace.runs, &self.workspace.recipe.name, name, &artifact.path)?;
        self.workspace.cache.touch(name, &artifact.manifest.key, clock::system());
        let rows = artifact.manifest.ledger.get("out").and_then(Value::as_u64).unwrap_or(0);
        self.reporter().cached(name, rows, &link, &artifact.manifest.key);
        self.journal.note(stage, 0, Status::Cached, reason, artifact.manifest.key, Some(artifact.manifest.digest));
        Ok(())
    }

    /// Runs one stage and publishes its result; `false` if another runner made it meanwhile.
    fn make(
        &self,
        stage: &Prepared,
        threads: usize,
        material: &Material,
        reason: &str,
        made: &BTreeMap<String, Artifact>,
        forced: bool,
    ) -> Result<(Artifact, bool)> {
        let (cache, name, key) = (&self.workspace.cache, &stage.node.name, material.key());
        let (lock, waited) = lock(cache, &self.watch(), name, &key)?;
        if let (Lookup::Hit(artifact), true) = (cache.artifact(name, &key), waited || !forced) {
            return Ok((*artifact, false));
        }
        self.check_inputs(stage, made)?;
        self.reporter().begins(name, reason, &stage.resources, &stage.checked.notes);
        self.journal.note(stage, threads, Status::Interrupted, reason, key, None);
        let folder = self.journal.folder()?;
        self.journal.save_now_and_then()?;

        let keep = stage.description.resumable && !forced;
        let staging = cache.stage_work(name, &key, keep)?;
        let (runs, recipe) = (&self.workspace.runs, &self.workspace.recipe.name);
        self.reporter().fills(name, &staging.out, &links::point_running(runs, recipe, name, &staging.out)?);
        let log = folder.path.join(format!("{name}.log"));
        // If there is one, an earlier run was killed while it published it.
        let end = if let Some(end) = staging.end::<End>().filter(|_| keep) {
            end
        } else {
            let request = request::new(self.workspace, stage, threads, &key, made, &staging, forced);
            let end = self.work(stage, &key, &request, &staging, &lock, &log)?;
            if keep {
                staging.note_end(&end)?;
            }
            end
        };
        let End { summary, ledger, info, warnings, seconds } = end;
        let published = cache.publish(
            &staging,
            Finished {
                kind: stage.description.output.clone(),
                material: material.clone(),
                sources: stage.sources.iter().map(|found| (found.name.clone(), source_record(found))).collect(),
                inputs: input_records(stage, made),
                measured: stage.description.measured.clone(),
                ledger,
                info,
                summary: summary.clone(),
                warnings,
                seconds,
            },
        );
        let artifact = match published {
            Ok(artifact) => artifact,
            Err(error) => {
                if !matches!(error, store::Error::Io(_)) {
                    staging.forget_end();
                }
                let error = Error::from(error);
                let why = error.mistakes.first().map(ToString::to_string);
                self.journal.amend(name, |record| (record.status, record.error) = (Status::Failed, why));
                return Err(error);
            }
        };
        self.journal.amend(name, |record| {
            (record.status, record.digest) = (Status::Made, Some(artifact.manifest.digest));
        });
        self.journal.save_now_and_then()?;
        links::remove_running(&self.workspace.runs, &self.workspace.recipe.name, name)?;
        let link = links::point(&self.workspace.runs, &self.workspace.recipe.name, name, &artifact.path)?;
        self.reporter().made(name, seconds, &summary, &link, &key);
        if self.interrupt.asked() {
            return Err(interrupted(format!("`{name}` was finished and is kept; the same command goes on after it")));
        }
        Ok((artifact, true))
    }

    /// Has a stage do its work, again where restarts are allowed; what came of it, held against what it must be.
    fn work(
        &self,
        stage: &Prepared,
        key: &Digest,
        request: &RunRequest,
        staging: &Staging,
        lock: &Lock,
        log: &std::path::Path,
    ) -> Result<End> {
        let (cache, name, began) = (&self.workspace.cache, &stage.node.name, Instant::now());
        let request_file = spawn::request_path(&staging.out);
        let mut restarts = Restarts::new(self.workspace, stage);
        let mut ended = loop {
            if let Some(problem) = self.consulted_otherwise(stage) {
                return Err(self.failed(stage, key, &problem, Exit::Input, log));
            }
            let start = spawn::Start {
                program: &stage.program.path,
                request,
                request_file: &request_file,
                log,
                lock,
                ranks: restarts.ranks,
            };
            let ended = spawn::run(&start, &self.interrupt, |event| self.reporter().event(name, event))?;
            match if self.interrupt.asked() { None } else { restarts.again(&ended)? } {
                Some(told) => self.reporter().note(&told),
                None => break ended,
            }
        };
        let ranks = restarts.ranks;
        ended.warnings.splice(0..0, restarts.told);
        let seconds = began.elapsed().as_secs_f64();
        self.journal.amend(name, |record| {
            (record.seconds, record.rejected, record.ranks) = (seconds, ended.rejected, ranks);
            record.warnings.clone_from(&ended.warnings);
            record.memory_bytes = ended.memory_bytes;
        });

        let done = match ended
            .outcome
            .map_err(|failed| (failed.problem, failed.exit))
            .and_then(|done| verify(name, &done).map(|()| done).map_err(|problem| (problem, Exit::Failed)))
        {
            Ok(done) => done,
            Err((mut problem, exit)) => {
                if disk::is_full(&problem.message) {
                    let written = disk::used(&staging.out) + disk::used(&staging.scratch);
                    let before = cache.manifests(name).first().map(Manifest::bytes);
                    problem.help = Some(disk::help(cache.root(), written, ended.progress, before));
                }
                return Err(self.failed(stage, key, &problem, exit, log));
            }
        };
        for source in &stage.sources {
            if !unchanged(cache, source)? {
                let problem =
                    Problem::new(format!("`{}` changed while `{name}` was reading it", source.resolved.location))
                        .field(&source.name)
                        .help("run again when nobody writes to it");
                return Err(self.failed(stage, key, &problem, Exit::Input, log));
            }
        }
        let (summary, ledger, info) = (done.summary, json!(done.ledger), done.info);
        Ok(End { summary, ledger, info, warnings: ended.warnings, seconds })
    }

    /// What is wrong if a file whose contents are in the key is not what it was: the stage is about to read it once more, and
    /// reads it when it starts.
    fn consulted_otherwise(&self, stage: &Prepared) -> Option<Problem> {
        let folder = &self.workspace.recipe.base_dir;
        let differs = |(path, then): &(&PathBuf, &Option<Digest>)| Digest::of_file(&folder.join(path)).ok() != **then;
        let (path, _) = stage.consulted.iter().find(differs)?;
        let message = format!("`{}` changed after this run had read it", path.display());
        Some(
            Problem::new(message)
                .help("run again: what is finished is kept, and the rest goes by the file as it is now"),
        )
    }

    /// Reads the artifacts that a stage is about to read, unless this run made or read them before: damage below the file
    /// system leaves no trace in a file's stamp.
    fn check_inputs(&self, stage: &Prepared, made: &BTreeMap<String, Artifact>) -> Result<()> {
        for artifact in stage.node.inputs.values().filter_map(|from| made.get(from)) {
            let Manifest { stage: from, key, .. } = &artifact.manifest;
            let reason = match self.workspace.cache.verify(from, key) {
                Lookup::Hit(_) => continue,
                Lookup::Broken(reason) => reason,
                Lookup::Absent => "it was removed".to_owned(),
            };
            self.damaged.store(true, Ordering::SeqCst);
            let text = format!("`{}` cannot use the artifact of `{from}`: {reason}", stage.node.name);
            return Err(Error::new(Exit::Input, Mistake::new(text).help("run again to rebuild it")));
        }
        Ok(())
    }

    fn failed(&self, stage: &Prepared, key: &Digest, problem: &Problem, exit: Exit, log: &std::path::Path) -> Error {
        let name = &stage.node.name;
        let resumable = stage.description.resumable;
        let abandoned = self.workspace.cache.abandon_work(name, key, resumable).map_err(Error::from).and_then(|()| {
            let workspace = self.workspace;
            if resumable { Ok(()) } else { links::remove_running(&workspace.runs, &workspace.recipe.name, name) }
        });
        let stopped = self.interrupt.asked() || exit == Exit::Interrupted;
        let status = if stopped { Status::Interrupted } else { Status::Failed };
        self.reporter().failed(name, status.name());
        self.journal.amend(name, |record| (record.status, record.error) = (status, Some(problem.message.clone())));
        if stopped {
            let kept: Vec<String> = self
                .journal
                .record()
                .stages
                .iter()
                .filter(|s| s.digest.is_some())
                .map(|s| format!("`{}`", s.stage))
                .collect();
            let kept =
                if kept.is_empty() { "no stage was finished".to_owned() } else { format!("kept: {}", kept.join(", ")) };
            let own = problem.help.clone().filter(|_| exit == Exit::Interrupted);
            let rest = match (own, resumable) {
                (Some(own), _) => own,
                (None, true) => format!("`{name}` goes on from its last save"),
                (None, false) => format!("`{name}` starts afresh"),
            };
            return interrupted(format!("{kept}; {rest}; run the same command to go on"));
        }
        let mut mistake = self.workspace.recipe.locate(&self.workspace.graph, name, problem);
        if problem.field.is_none() && problem.file.is_none() {
            // Not about the recipe: no snippet of it, but the stage's name.
            mistake = Mistake::new(format!("`{name}` failed: {}", problem.message));
            mistake.help.clone_from(&problem.help);
        }
        let mut error = Error::new(exit, mistake);
        let lines = spawn::tail(log, LOG_LINES);
        if !lines.is_empty() {
            error.log_tail = Some((log.display().to_string(), lines));
        }
        if let Err(also) = abandoned {
            error.mistakes.extend(also.mistakes);
        }
        error
    }

    /// The page of a run that has a record; its failure is told and is not the run's.
    fn leave_report(&self) {
        let Some(written) = self.journal.report() else { return };
        match written {
            Ok(path) => self.reporter().report(&path),
            Err(error) => {
                let why: Vec<String> = error.mistakes.iter().map(ToString::to_string).collect();
                self.reporter().note(&format!("the report of this run could not be written: {}", why.join("; ")));
            }
        }
    }
}

/// What a thread came back with.
enum Ended {
    /// The artifact, and whether this run made it.
    Made(Result<(Artifact, bool)>),
    /// The artifact; `None` if it must be made after all.
    Fetched(Result<Option<Artifact>>),
}

/// What is to be done about a stage.
enum Settled {
    /// Nothing.
    There(Box<Artifact>),
    /// It comes from the remote.
    ToFetch(Box<Manifest>),
    /// It must run: what is asked, and why.
    ToMake(Material, String),
}

/// Law L2: every row that came in is accounted for.
/// What a stage's work came to, before it is published.
#[derive(Serialize, Deserialize)]
struct End {
    summary: String,
    ledger: Value,
    info: Value,
    warnings: Vec<String>,
    seconds: f64,
}

fn verify(stage: &str, done: &spawn::Done) -> std::result::Result<(), Problem> {
    let ledger = done.ledger;
    if ledger.balances() {
        return Ok(());
    }
    Err(Problem::new(format!(
        "`{stage}` does not account for every row: {} in ≠ {} out + {} rejected + {} held",
        ledger.taken, ledger.out, ledger.rejected, ledger.held
    ))
    .help("this is a bug in the stage; nothing was published"))
}

/// A result that took long to make is lost: the user decides.
fn dear(stage: &str, reason: &str, seconds: f64) -> Error {
    let text = format!("`{stage}` took {} to make, and {reason}", clock::told(seconds));
    Error::new(Exit::Input, Mistake::new(text).help("`--repair` makes it again; a copy of the cache may still have it"))
}

fn interrupted(help: String) -> Error {
    Error::new(Exit::Interrupted, Mistake::new("interrupted").help(help))
}

fn source_record(found: &crate::sources::Found) -> SourceRecord {
    SourceRecord { location: found.resolved.location.clone(), commit: found.resolved.commit.clone() }
}

fn input_records(stage: &Prepared, made: &BTreeMap<String, Artifact>) -> BTreeMap<String, InputRecord> {
    let record =
        |from: &String| made.get(from).map(|artifact| InputRecord { stage: from.clone(), key: artifact.manifest.key });
    stage.node.inputs.iter().filter_map(|(input, from)| Some((input.clone(), record(from)?))).collect()
}

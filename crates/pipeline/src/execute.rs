//! `pipeline run`: each stage when its inputs are there, reuse or run, publish, link, record.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use spec::{Mistake, Problem};
use stage::Exit;
use store::{Artifact, Digest, Finished, InputRecord, Lock, Lookup, Manifest, Material, RunFolder, SourceRecord};

use crate::clock;
use crate::disk;
use crate::error::{Error, Result};
use crate::links;
use crate::plan::{State, judge, left_out, states};
use crate::pool::{Pool, Share};
use crate::progress::Reporter;
use crate::record::{self, RunRecord, StageRecord, Status};
use crate::report;
use crate::request;
use crate::selection::Selection;
use crate::signals::Interrupt;
use crate::sources::unchanged;
use crate::spawn;
use crate::workspace::{Prepared, Workspace};

/// What took longer than this to make is rebuilt only when asked for.
const DEAR_SECONDS: f64 = 600.0;
/// Input that is found damaged when it is about to be read is rebuilt so many times in one run.
const REPAIRS: usize = 3;
/// Writing the record of a run under way takes at most about one part in so many of the time.
const SAVE_SHARE: u32 = 10;
/// Lines of a log that a report of a failure shows.
const LOG_LINES: usize = 12;

/// A run under way.
struct Run<'a> {
    workspace: &'a Workspace,
    reporter: Mutex<Reporter>,
    interrupt: Interrupt,
    record: Mutex<RunRecord>,
    /// Made when the first stage runs: a run that does nothing leaves no record.
    folder: Mutex<Option<RunFolder>>,
    began: Instant,
    /// When the record was last written on the way, and how long that took.
    saved: Mutex<Option<(Instant, Duration)>>,
    /// An input was damaged and stepped aside: what made it must run first.
    damaged: AtomicBool,
}

/// Runs what must run; `Ok` means that every selected stage's artifact is there.
pub(crate) fn run(workspace: &Workspace, selection: &Selection, json: bool) -> Result<()> {
    let began = Instant::now();
    let interrupt = Interrupt::listen()?;
    let stages = workspace.prepare(&selection.all, &selection.implied)?;
    // Whatever must not run here and is missing is told before anything is spent.
    states(workspace, selection, &stages)?;
    let run = Run {
        workspace,
        reporter: Mutex::new(Reporter::new(json, stages.iter().map(|stage| stage.node.name.len()))),
        interrupt,
        record: Mutex::new(RunRecord {
            schema: record::SCHEMA,
            recipe: workspace.recipe.name.clone(),
            overrides: workspace.recipe.overrides.clone(),
            started: clock::now(),
            seconds: 0.0,
            exit: None,
            stages: Vec::new(),
        }),
        folder: Mutex::new(None),
        began,
        saved: Mutex::new(None),
        damaged: AtomicBool::new(false),
    };
    let mut result = run.stages(selection, &stages);
    for _ in 0..REPAIRS {
        if !run.damaged.swap(false, Ordering::SeqCst) {
            break;
        }
        result = run.stages(selection, &stages);
    }
    let exit = result.as_ref().map_or_else(|error| error.exit, |_| Exit::Ok);
    run.record().exit = Some(exit.code());
    run.save()?;
    run.leave_report();
    let (ran, cached) = result?;
    run.reporter().ends(ran, cached, began.elapsed().as_secs_f64());
    Ok(())
}

impl Run<'_> {
    fn reporter(&self) -> MutexGuard<'_, Reporter> {
        self.reporter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self) -> MutexGuard<'_, RunRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings every stage's artifact about; the numbers of those made and of those that were there.
    ///
    /// A stage starts when its inputs are there and the pool has a share for it. After a failure nothing new starts; what
    /// runs is left to finish, since it is kept.
    fn stages(&self, selection: &Selection, stages: &[Prepared]) -> Result<(usize, usize)> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut pool = Pool::new(cores, self.workspace.options.jobs.unwrap_or(usize::MAX));
        let mut made: BTreeMap<String, Artifact> = BTreeMap::new();
        let mut waiting: Vec<&Prepared> = stages.iter().collect();
        let mut ready: Vec<(&Prepared, Material, String)> = Vec::new();
        let mut running: BTreeMap<String, Share> = BTreeMap::new();
        let (mut ran, mut cached) = (0, 0);
        let mut failed: Option<Error> = None;
        thread::scope(|scope| {
            let (send, ended) = mpsc::channel();
            loop {
                // In graph order, so that one pass sees through a chain of cached stages.
                for stage in std::mem::take(&mut waiting) {
                    if failed.is_some() || !stage.node.inputs.values().all(|from| made.contains_key(from)) {
                        waiting.push(stage);
                        continue;
                    }
                    match self.settle(selection, stage, &made) {
                        Ok(Settled::There(artifact)) => {
                            cached += 1;
                            made.insert(stage.node.name.clone(), *artifact);
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
                    running.insert(stage.node.name.clone(), share);
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
                        let _ = send.send((stage, result));
                    });
                }
                if running.is_empty() {
                    break;
                }
                let Ok((stage, result)) = ended.recv() else { break };
                if let Some(share) = running.remove(&stage.node.name) {
                    pool.give(&share);
                }
                let result = result.and_then(|(artifact, is_new)| {
                    if !is_new {
                        self.reuse(stage, &artifact)?;
                    }
                    Ok((artifact, is_new))
                });
                match result {
                    Ok((artifact, is_new)) => {
                        (ran, cached) = if is_new { (ran + 1, cached) } else { (ran, cached + 1) };
                        made.insert(stage.node.name.clone(), artifact);
                    }
                    // What failed first is told; of what followed from it, nothing.
                    Err(error) => drop(failed.get_or_insert(error)),
                }
            }
        });
        failed.map_or(Ok((ran, cached)), Err)
    }

    /// What is to be done about a stage whose inputs are there.
    fn settle(&self, selection: &Selection, stage: &Prepared, made: &BTreeMap<String, Artifact>) -> Result<Settled> {
        let name = &stage.node.name;
        let state = judge(self.workspace, stage, made, selection.force.contains(name));
        if !selection.run.contains(name) && !matches!(state, State::Cached { .. }) {
            return Err(left_out(self.workspace, name, &state));
        }
        match state {
            State::Cached { artifact } => {
                self.reuse(stage, &artifact)?;
                Ok(Settled::There(artifact))
            }
            State::ToRun { reason, lost: Some(seconds), .. }
                if seconds >= DEAR_SECONDS && !self.workspace.options.repair =>
            {
                Err(dear(name, &reason, seconds))
            }
            State::ToRun { material, reason, .. } => Ok(Settled::ToMake(material, reason)),
            State::Waits { on } => {
                let waits = on.join(", ");
                Err(Error::new(Exit::Bug, Mistake::new(format!("`{name}` waits for {waits}, which ran"))))
            }
        }
    }

    /// Links and notes an artifact that was there.
    fn reuse(&self, stage: &Prepared, artifact: &Artifact) -> Result<()> {
        let name = &stage.node.name;
        let link = links::point(&self.workspace.runs, &self.workspace.recipe.name, name, &artifact.path)?;
        self.workspace.cache.touch(name, &artifact.manifest.key, clock::system());
        let rows = artifact.manifest.ledger.get("out").and_then(Value::as_u64).unwrap_or(0);
        self.reporter().cached(name, rows, &link, &artifact.manifest.key);
        self.note(stage, 0, Status::Cached, "cached", artifact.manifest.key, Some(artifact.manifest.digest));
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
        let (lock, waited) = self.lock(name, &key)?;
        if let (Lookup::Hit(artifact), true) = (cache.artifact(name, &key), waited || !forced) {
            return Ok((*artifact, false));
        }
        self.check_inputs(stage, made)?;
        self.reporter().begins(name, reason, &stage.resources, &stage.checked.notes);
        self.note(stage, threads, Status::Interrupted, reason, key, None);
        let folder = self.folder()?;
        self.save_now_and_then()?;

        let began = Instant::now();
        let keep = stage.description.resumable && !forced;
        let staging = cache.stage_work(name, &key, keep)?;
        let (runs, recipe) = (&self.workspace.runs, &self.workspace.recipe.name);
        self.reporter().fills(name, &staging.out, &links::point_running(runs, recipe, name, &staging.out)?);
        let log = folder.path.join(format!("{name}.log"));
        let request = request::new(self.workspace, stage, threads, &key, made, &staging, forced);
        let request_file = spawn::request_path(&staging.out);
        let start = spawn::Start {
            program: &stage.program.path,
            request: &request,
            request_file: &request_file,
            log: &log,
            lock: &lock,
            ranks: stage.resources.ranks,
        };
        let ended = spawn::run(&start, &self.interrupt, |event| self.reporter().event(name, event))?;
        let seconds = began.elapsed().as_secs_f64();
        self.amend(name, |record| {
            (record.seconds, record.rejected) = (seconds, ended.rejected);
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
                return Err(self.failed(stage, &key, &problem, exit, &log));
            }
        };
        for source in &stage.sources {
            if !unchanged(cache, source)? {
                let problem =
                    Problem::new(format!("`{}` changed while `{name}` was reading it", source.resolved.location))
                        .field(&source.name)
                        .help("run again when nobody writes to it");
                return Err(self.failed(stage, &key, &problem, Exit::Input, &log));
            }
        }
        let published = cache.publish(
            &staging,
            Finished {
                kind: stage.description.output.clone(),
                material: material.clone(),
                sources: stage.sources.iter().map(|found| (found.name.clone(), source_record(found))).collect(),
                inputs: input_records(stage, made),
                measured: stage.description.measured.clone(),
                ledger: json!(done.ledger),
                info: done.info,
                summary: done.summary.clone(),
                warnings: ended.warnings,
                seconds,
            },
        );
        let artifact = match published {
            Ok(artifact) => artifact,
            Err(error) => {
                let error = Error::from(error);
                let why = error.mistakes.first().map(ToString::to_string);
                self.amend(name, |record| (record.status, record.error) = (Status::Failed, why));
                return Err(error);
            }
        };
        self.amend(name, |record| {
            (record.status, record.digest) = (Status::Made, Some(artifact.manifest.digest));
        });
        self.save_now_and_then()?;
        links::remove_running(&self.workspace.runs, &self.workspace.recipe.name, name)?;
        let link = links::point(&self.workspace.runs, &self.workspace.recipe.name, name, &artifact.path)?;
        self.reporter().made(name, seconds, &done.summary, &link, &key);
        if self.interrupt.asked() {
            return Err(interrupted(format!("`{name}` was finished and is kept; the same command goes on after it")));
        }
        Ok((artifact, true))
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

    /// Waits for the right to make a key; also says whether it had to wait.
    fn lock(&self, stage: &str, key: &Digest) -> Result<(Lock, bool)> {
        let mut waited = false;
        loop {
            if let Some(lock) = self.workspace.cache.try_lock(stage, key)? {
                return Ok((lock, waited));
            }
            if !waited {
                self.reporter().waits(stage);
                waited = true;
            }
            thread::sleep(Duration::from_millis(100));
        }
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
        self.amend(name, |record| (record.status, record.error) = (status, Some(problem.message.clone())));
        if stopped {
            let kept: Vec<String> =
                self.record().stages.iter().filter(|s| s.digest.is_some()).map(|s| format!("`{}`", s.stage)).collect();
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

    fn note(
        &self,
        stage: &Prepared,
        threads: usize,
        status: Status,
        reason: &str,
        key: Digest,
        digest: Option<Digest>,
    ) {
        self.record().stages.push(StageRecord {
            stage: stage.node.name.clone(),
            status,
            reason: reason.to_owned(),
            key,
            digest,
            started: clock::now(),
            seconds: 0.0,
            device: stage.resources.device.clone(),
            threads,
            ranks: stage.resources.ranks,
            notes: stage.checked.notes.clone(),
            warnings: Vec::new(),
            memory_bytes: None,
            rejected: 0,
            error: None,
        });
    }

    /// Changes the last record of a stage.
    fn amend(&self, stage: &str, change: impl FnOnce(&mut StageRecord)) {
        if let Some(record) = self.record().stages.iter_mut().rev().find(|record| record.stage == stage) {
            change(record);
        }
    }

    fn folder(&self) -> Result<RunFolder> {
        let mut known = self.folder.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(folder) = &*known {
            return Ok(folder.clone());
        }
        let folder = self.workspace.cache.new_run(&self.workspace.recipe.name)?;
        Ok(known.insert(folder).clone())
    }

    fn has_folder(&self) -> bool {
        self.folder.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The page of a run that has a record; its failure is told and is not the run's.
    fn leave_report(&self) {
        if !self.has_folder() {
            return;
        }
        let written = self.folder().and_then(|folder| report::write(self.workspace, &folder, &self.record()));
        match written {
            Ok(path) => self.reporter().report(&path),
            Err(error) => {
                let why: Vec<String> = error.mistakes.iter().map(ToString::to_string).collect();
                self.reporter().note(&format!("the report of this run could not be written: {}", why.join("; ")));
            }
        }
    }

    /// Writes the record unless that was done just before: a run of many short stages would do little else.
    fn save_now_and_then(&self) -> Result<()> {
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if saved.is_some_and(|(at, took)| at.elapsed() < SAVE_SHARE * took) {
            return Ok(());
        }
        let began = Instant::now();
        self.save()?;
        *saved = Some((Instant::now(), began.elapsed()));
        Ok(())
    }

    /// Writes the record. A run in which nothing ran is recorded only if it stands for other artifacts than the last.
    fn save(&self) -> Result<()> {
        // Held while it is written, so that an older state never replaces a newer one.
        let mut record = self.record();
        if !self.has_folder() {
            let keys = |record: &RunRecord| -> Vec<Digest> { record.stages.iter().map(|stage| stage.key).collect() };
            let last: Option<RunRecord> = self.workspace.cache.run_records(&self.workspace.recipe.name).next();
            if record.stages.is_empty() || last.is_some_and(|last| keys(&last) == keys(&record)) {
                return Ok(());
            }
        }
        let folder = self.folder()?;
        record.seconds = self.began.elapsed().as_secs_f64();
        Ok(self.workspace.cache.write_run_record(&folder, &*record)?)
    }
}

/// What is to be done about a stage.
enum Settled {
    /// Nothing.
    There(Box<Artifact>),
    /// It must run: what is asked, and why.
    ToMake(Material, String),
}

/// Law L2: every row that came in is accounted for.
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

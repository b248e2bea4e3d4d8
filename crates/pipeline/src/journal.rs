//! The record of a run under way: written now and then, and at its end; a run that did nothing new leaves none.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stage::Exit;
use store::{Digest, RunFolder};

use crate::clock;
use crate::error::Result;
use crate::record::{self, RunRecord, StageRecord, Status};
use crate::recorded::Asked;
use crate::report;
use crate::workspace::{Prepared, Workspace};

/// Writing the record takes at most about one part in so many of the time.
const SAVE_SHARE: u32 = 10;

/// The record of a run, and the folder it goes to.
pub(crate) struct Journal<'a> {
    workspace: &'a Workspace,
    record: Mutex<RunRecord>,
    /// Made when the first stage runs: a run that does nothing leaves no record.
    folder: Mutex<Option<RunFolder>>,
    began: Instant,
    /// When the record was last written on the way, and how long that took.
    saved: Mutex<Option<(Instant, Duration)>>,
}

impl<'a> Journal<'a> {
    /// An empty record.
    pub(crate) fn begin(workspace: &'a Workspace, began: Instant) -> Self {
        let record = RunRecord {
            schema: record::SCHEMA,
            recipe: workspace.recipe.name.clone(),
            overrides: workspace.recipe.overrides.clone(),
            started: clock::now(),
            seconds: 0.0,
            exit: None,
            stages: Vec::new(),
        };
        Self { workspace, record: Mutex::new(record), folder: Mutex::new(None), began, saved: Mutex::new(None) }
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, RunRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a stage.
    pub(crate) fn note(
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
            asked: Some(Asked::of(&self.workspace.recipe, stage)),
        });
    }

    /// Changes the last record of a stage.
    pub(crate) fn amend(&self, stage: &str, change: impl FnOnce(&mut StageRecord)) {
        if let Some(record) = self.record().stages.iter_mut().rev().find(|record| record.stage == stage) {
            change(record);
        }
    }

    /// The folder of this run, made if need be.
    pub(crate) fn folder(&self) -> Result<RunFolder> {
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

    /// Writes the page of a run that has a record.
    pub(crate) fn report(&self) -> Option<Result<PathBuf>> {
        let write = |folder| report::write(self.workspace, &folder, &self.record());
        self.has_folder().then(|| self.folder().and_then(write))
    }

    /// Writes the record unless that was done just before: a run of many short stages would do little else.
    pub(crate) fn save_now_and_then(&self) -> Result<()> {
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if saved.is_some_and(|(at, took)| at.elapsed() < SAVE_SHARE * took) {
            return Ok(());
        }
        let began = Instant::now();
        self.save()?;
        *saved = Some((Instant::now(), began.elapsed()));
        Ok(())
    }

    /// Writes the record of a run that ended so. What came of the run counts, not that it was noted: if it cannot be, what to say.
    pub(crate) fn end(&self, exit: Exit) -> Option<String> {
        self.record().exit = Some(exit.code());
        let error = self.save().err()?;
        let why = error.mistakes.first().map(ToString::to_string).unwrap_or_default();
        Some(format!("this run is not on record: {why}"))
    }

    /// Writes the record. A run in which nothing ran is recorded only if it stands for other artifacts than the last.
    fn save(&self) -> Result<()> {
        // Held while it is written, so that an older state never replaces a newer one.
        let mut record = self.record();
        if !self.has_folder() {
            let keys = |record: &RunRecord| -> Vec<(Digest, Option<Asked>)> {
                record.stages.iter().map(|stage| (stage.key, stage.asked.clone())).collect()
            };
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

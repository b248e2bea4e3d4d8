//! A checkpoint on its way to the disk: laid out by all ranks together, written by each alone, given its name by one. Between
//! these nobody waits for anybody, so training may go on meanwhile.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use models::ModelFolder;
use nn::save::Plan;
use nn::{Named, Parameters};
use parallel::checkpoint::Together;
use serde_json::Value;
use spec::Problem;
use stage::{Exit, Failure};
use tch::Kind;

use crate::checkpoint::{Checkpoint, PARTIAL, STATE, finished, write_progress};
use crate::components::Unchanged;
use crate::config::Config;
use crate::session::{STEM, Session};
use crate::{between_ranks, unusable};

/// Where the parts come from that training leaves alone.
pub(crate) struct Origin<'a> {
    /// Name of the model, for the adapter's files.
    pub(crate) base_model: &'a str,
    /// Whether the model's files never change in place.
    pub(crate) immutable: bool,
}

/// One rank's share of the work on a checkpoint.
#[derive(Debug)]
pub(crate) struct Draft {
    checkpoint: Checkpoint,
    partial: PathBuf,
    files: Vec<Together>,
    /// What one rank does beside its share; none on the others.
    lead: Option<Lead>,
}

#[derive(Debug)]
struct Lead {
    result: Outcome,
    seed: u64,
    config: Value,
}

/// What the checkpoint is for, beside the state that a run goes on from.
#[derive(Debug)]
enum Outcome {
    /// A diffusers folder: its unchanged parts, and the index of the denoiser's files.
    Folder { model: ModelFolder, immutable: bool, previous: Option<PathBuf>, plan: Plan },
    /// The adapter's files.
    Adapter { adapter: Parameters, base_model: String },
}

impl Draft {
    /// Lays out the checkpoint after (epoch, step) `place`: all ranks together. With `keep`, what is to be written is copied
    /// to host memory.
    pub(crate) fn new(
        session: &Session,
        config: &Config,
        output: &Path,
        place: (u64, u64),
        origin: &Origin<'_>,
        keep: bool,
    ) -> Result<Self, Failure> {
        let checkpoint = Checkpoint::at(output, place);
        let partial = output.join(format!("{PARTIAL}{}", Checkpoint::name(place.0, place.1)));
        let leads = session.team.leads();
        let previous = if leads { finished(output)?.pop().map(|previous| previous.path) } else { None };
        let (state, transformer) = (partial.join(STATE), partial.join("transformer"));
        let shared = |name: &str, tensors: &[Named]| {
            let parts = session.spread.parts(&session.team, tensors, None).map_err(between_ranks)?;
            Together::new(&state.join(format!("{name}.safetensors")), parts, &BTreeMap::new()).map_err(between_ranks)
        };
        // Whole tensors whatever the mesh, so that any other mesh can go on from them.
        let mut files = vec![shared("weights", session.trained())?, shared("optimizer", &session.optimizer.state())?];
        if let Some(ema) = &session.ema {
            files.push(shared("ema", ema.state())?);
        }
        // The result is the average, when there is one.
        let result = session.ema.as_ref().map_or(session.trained(), nn::ema::Ema::state);
        let result = if config.peft.is_some() {
            let whole = session.spread.whole(&session.team, result).map_err(between_ranks)?;
            let adapter = session.parameters.with_adapter(whole.iter().map(copied).collect::<Result<_, _>>()?);
            Outcome::Adapter { adapter, base_model: origin.base_model.to_owned() }
        } else {
            let kind = Some(Kind::from(config.model.torch_dtype));
            let parts = session.spread.parts(&session.team, result, kind).map_err(between_ranks)?;
            let (weights, plan) =
                Together::model(&transformer, STEM, parts, nn::save::SHARD_BYTES).map_err(between_ranks)?;
            files.extend(weights);
            Outcome::Folder { model: session.folder.clone(), immutable: origin.immutable, previous, plan }
        };
        if keep {
            files.iter_mut().try_for_each(Together::keep).map_err(between_ranks)?;
        }
        if leads {
            fs_err::create_dir_all(&state)?;
            if matches!(result, Outcome::Folder { .. }) {
                fs_err::create_dir_all(&transformer)?;
            }
            files.iter().try_for_each(Together::create).map_err(between_ranks)?;
        }
        session.team.barrier().map_err(between_ranks)?;
        let config_value = serde_json::to_value(config).map_err(Failure::from_error)?;
        let lead = leads.then_some(Lead { result, seed: config.seed, config: config_value });
        Ok(Self { checkpoint, partial, files, lead })
    }

    /// Does the rest, all ranks together.
    pub(crate) fn complete(self, session: &Session) -> Result<Checkpoint, Failure> {
        self.write()?;
        session.team.barrier().map_err(between_ranks)?;
        let checkpoint = self.finish()?;
        session.team.barrier().map_err(between_ranks)?;
        Ok(checkpoint)
    }

    /// Writes this rank's share.
    fn write(&self) -> Result<(), Failure> {
        self.files.iter().try_for_each(Together::write).map_err(between_ranks)?;
        match self.lead.as_ref().map(|lead| &lead.result) {
            Some(Outcome::Adapter { adapter, base_model }) => {
                nn::lora_file::save(&self.partial, adapter, Some(base_model)).map_err(unusable)?;
            }
            Some(Outcome::Folder { model, immutable, previous, plan }) => {
                let unchanged = Unchanged { model, immutable: *immutable, previous: previous.as_deref() };
                unchanged.place(&self.partial)?;
                plan.write_index(&self.partial.join("transformer"), STEM).map_err(unusable)?;
            }
            None => {}
        }
        Ok(())
    }

    /// Gives the checkpoint its name, after all ranks have written.
    fn finish(self) -> Result<Checkpoint, Failure> {
        let Some(Lead { seed, config, .. }) = self.lead else { return Ok(self.checkpoint) };
        self.files.iter().try_for_each(Together::finish).map_err(between_ranks)?;
        let Checkpoint { path, epoch, step } = &self.checkpoint;
        write_progress(&self.partial.join(STATE), (*epoch, *step), seed, config)?;
        fs_err::rename(&self.partial, path)?;
        if let Some(output) = path.parent() {
            fs_err::File::open(output)?.sync_all()?;
        }
        Ok(self.checkpoint)
    }
}

fn copied(named: &Named) -> Result<Named, Failure> {
    let tensor = named.tensor.f_detach().map_err(Failure::from_error)?.copy();
    Ok(Named { name: named.name.clone(), tensor })
}

/// A draft under way beside training.
#[derive(Debug)]
pub(crate) enum Writing {
    Shares(JoinHandle<Result<Draft, Failure>>),
    Name(JoinHandle<Result<Checkpoint, Failure>>),
}

impl Writing {
    /// Begins to write.
    pub(crate) fn begin(draft: Draft) -> Result<Self, Failure> {
        let write = move || draft.write().map(|()| draft);
        Ok(Self::Shares(thread::Builder::new().name("checkpoint".to_owned()).spawn(write)?))
    }

    /// Goes as far as it can without waiting, or with `wait` to the end: all ranks together, at the same step.
    pub(crate) fn advance(self, session: &Session, wait: bool) -> Result<Advance, Failure> {
        let ready =
            |done: bool| -> Result<bool, Failure> { Ok(wait || !session.team.any(!done).map_err(between_ranks)?) };
        let naming = match self {
            Self::Shares(thread) => {
                if !ready(thread.is_finished())? {
                    return Ok(Advance::Under(Self::Shares(thread)));
                }
                let draft = joined(thread)?;
                // Written by all, now that each has come here with its share done.
                session.team.barrier().map_err(between_ranks)?;
                thread::Builder::new().name("checkpoint".to_owned()).spawn(move || draft.finish())?
            }
            Self::Name(thread) => thread,
        };
        if !ready(naming.is_finished())? {
            return Ok(Advance::Under(Self::Name(naming)));
        }
        let checkpoint = joined(naming)?;
        session.team.barrier().map_err(between_ranks)?;
        Ok(Advance::Done(checkpoint))
    }
}

/// How far a draft has come.
#[derive(Debug)]
pub(crate) enum Advance {
    Under(Writing),
    Done(Checkpoint),
}

fn joined<T>(thread: JoinHandle<Result<T, Failure>>) -> Result<T, Failure> {
    let gone = || Failure::new(Exit::Bug, Problem::new("the thread that writes checkpoints ended early"));
    thread.join().map_err(|_| gone())?
}

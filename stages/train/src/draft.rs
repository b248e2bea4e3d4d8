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
use crate::experts::Expert;
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
    /// Of each expert that this rank holds.
    parts: Vec<Part>,
    /// What one rank does beside its share; none on the others.
    lead: Option<Lead>,
}

/// What is written of one expert.
#[derive(Debug)]
struct Part {
    files: Vec<Together>,
    /// On the first of the ranks that hold it: what the checkpoint is for, beside the state that a run goes on from.
    result: Option<Outcome>,
}

#[derive(Debug)]
enum Outcome {
    /// The index of the weights' files in a component's folder.
    Weights { folder: PathBuf, plan: Plan },
    /// The adapter's files, and the folder for them.
    Adapter { folder: PathBuf, adapter: Parameters, base_model: String },
}

#[derive(Debug)]
struct Lead {
    /// The unchanged parts of a diffusers folder, if it is to be one.
    rest: Option<Rest>,
    seed: u64,
    config: Value,
}

#[derive(Debug)]
struct Rest {
    model: ModelFolder,
    immutable: bool,
    previous: Option<PathBuf>,
    trained: Vec<&'static str>,
    boundary: Option<f64>,
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
        // Nobody makes a file before what a killed run left is gone.
        session.team.barrier().map_err(between_ranks)?;
        let part = |expert| Part::new(expert, config, &partial, origin, keep);
        let parts = session.experts.iter().map(part).collect::<Result<_, _>>()?;
        session.team.barrier().map_err(between_ranks)?;
        let rest = config.peft.is_none().then(|| Rest {
            model: session.folder.clone(),
            immutable: origin.immutable,
            previous,
            trained: session.roles.iter().map(|role| role.denoiser.component).collect(),
            boundary: config.model.boundary_ratio,
        });
        let config_value = serde_json::to_value(config).map_err(Failure::from_error)?;
        let lead = leads.then_some(Lead { rest, seed: config.seed, config: config_value });
        Ok(Self { checkpoint, partial, parts, lead })
    }

    /// Does the rest, all ranks together.
    pub(crate) fn complete(self, session: &Session) -> Result<Checkpoint, Failure> {
        self.write()?;
        self.close(session)?;
        let checkpoint = self.finish()?;
        session.team.barrier().map_err(between_ranks)?;
        Ok(checkpoint)
    }

    /// Writes this rank's share.
    fn write(&self) -> Result<(), Failure> {
        self.parts.iter().try_for_each(Part::write)?;
        if let Some(Rest { model, immutable, previous, trained, boundary }) =
            self.lead.as_ref().and_then(|lead| lead.rest.as_ref())
        {
            let (immutable, previous, boundary) = (*immutable, previous.as_deref(), *boundary);
            Unchanged { model, immutable, previous, trained, boundary }.place(&self.partial)?;
        }
        Ok(())
    }

    /// Gives the files their names, once all ranks have written: those of each expert on one of its ranks.
    fn close(&self, session: &Session) -> Result<(), Failure> {
        session.team.barrier().map_err(between_ranks)?;
        let closed = |part: &Part| part.files.iter().try_for_each(Together::finish).map_err(between_ranks);
        self.parts.iter().filter(|part| part.result.is_some()).try_for_each(closed)?;
        session.team.barrier().map_err(between_ranks)
    }

    /// Gives the checkpoint its name, after all files have theirs.
    fn finish(self) -> Result<Checkpoint, Failure> {
        let Some(Lead { seed, config, .. }) = self.lead else { return Ok(self.checkpoint) };
        let Checkpoint { path, epoch, step } = &self.checkpoint;
        write_progress(&self.partial.join(STATE), (*epoch, *step), seed, config)?;
        fs_err::rename(&self.partial, path)?;
        if let Some(output) = path.parent() {
            fs_err::File::open(output)?.sync_all()?;
        }
        Ok(self.checkpoint)
    }
}

impl Part {
    /// Lays out what is written of an expert: the ranks that hold it together.
    fn new(expert: &Expert, config: &Config, partial: &Path, origin: &Origin<'_>, keep: bool) -> Result<Self, Failure> {
        let Expert { role, team, spread, .. } = expert;
        let state = role.denoiser.place(&partial.join(STATE));
        let shared = |name: &str, tensors: &[Named]| {
            let parts = spread.parts(team, tensors, None).map_err(between_ranks)?;
            Together::new(&state.join(format!("{name}.safetensors")), parts, &BTreeMap::new()).map_err(between_ranks)
        };
        // Whole tensors whatever the mesh, so that any other mesh can go on from them.
        let mut files = vec![shared("weights", expert.trained())?, shared("optimizer", &expert.optimizer.state())?];
        if let Some(ema) = &expert.ema {
            files.push(shared("ema", ema.state())?);
        }
        // The result is the average, when there is one.
        let result = expert.ema.as_ref().map_or(expert.trained(), nn::ema::Ema::state);
        let (result, folder) = if config.peft.is_some() {
            let whole = spread.whole(team, result).map_err(between_ranks)?;
            let adapter = expert.parameters.with_adapter(whole.iter().map(copied).collect::<Result<_, _>>()?);
            let folder = role.denoiser.place(partial);
            (Outcome::Adapter { folder: folder.clone(), adapter, base_model: origin.base_model.to_owned() }, folder)
        } else {
            let kind = Some(Kind::from(config.model.torch_dtype));
            let parts = spread.parts(team, result, kind).map_err(between_ranks)?;
            let folder = partial.join(role.denoiser.component);
            let (weights, plan) =
                Together::model(&folder, STEM, parts, nn::save::SHARD_BYTES).map_err(between_ranks)?;
            files.extend(weights);
            (Outcome::Weights { folder: folder.clone(), plan }, folder)
        };
        if keep {
            files.iter_mut().try_for_each(Together::keep).map_err(between_ranks)?;
        }
        if team.leads() {
            fs_err::create_dir_all(&state)?;
            fs_err::create_dir_all(&folder)?;
            files.iter().try_for_each(Together::create).map_err(between_ranks)?;
        }
        Ok(Self { files, result: team.leads().then_some(result) })
    }

    /// Writes this rank's share of it.
    fn write(&self) -> Result<(), Failure> {
        self.files.iter().try_for_each(Together::write).map_err(between_ranks)?;
        match &self.result {
            Some(Outcome::Adapter { folder, adapter, base_model }) => {
                nn::lora_file::save(folder, adapter, Some(base_model)).map(|_| ()).map_err(unusable)
            }
            Some(Outcome::Weights { folder, plan }) => plan.write_index(folder, STEM).map(|_| ()).map_err(unusable),
            None => Ok(()),
        }
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
                draft.close(session)?;
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

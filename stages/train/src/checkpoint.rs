//! Checkpoints: `epoch_E_step_S/`, a diffusers pipeline folder or adapter files, with the state that a run goes on from in
//! `training_state/`. A folder appears whole under its name or not at all.

use std::path::{Path, PathBuf};

use nn::{Named, Weights};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use spec::Problem;
use stage::{Exit, Failure};
use tch::Kind;

use crate::components::Unchanged;
use crate::config::Config;
use crate::session::{STEM, Session};
use crate::unusable;

/// Name of the state's folder inside a checkpoint; diffusers does not look at it.
const STATE: &str = "training_state";
/// Version of the state's layout.
const FORMAT: u32 = 1;
/// Start of the names of unfinished checkpoints.
const PARTIAL: &str = ".partial-";

/// `state.json`.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    format: u32,
    /// Optimizer steps taken.
    steps: u64,
    /// Epoch of the last of them, from 0.
    epoch: u64,
    seed: u64,
    /// What moved a number; see [`Config`].
    config: Value,
}

/// A finished checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) epoch: u64,
    /// The last step it holds, from 0.
    pub(crate) step: u64,
}

impl Checkpoint {
    /// The checkpoint in `output` after epoch and step `place`.
    pub(crate) fn at(output: &Path, place: (u64, u64)) -> Self {
        let (epoch, step) = place;
        Self { path: output.join(Self::name(epoch, step)), epoch, step }
    }

    /// Name of the checkpoint after step `step` (from 0).
    pub(crate) fn name(epoch: u64, step: u64) -> String {
        format!("epoch_{epoch}_step_{step}")
    }

    fn parse(path: PathBuf) -> Option<Self> {
        let (epoch, step) = path.file_name()?.to_str()?.strip_prefix("epoch_")?.split_once("_step_")?;
        let (epoch, step) = (epoch.parse().ok()?, step.parse().ok()?);
        path.join(STATE).join("state.json").is_file().then_some(Self { path, epoch, step })
    }
}

/// The finished checkpoints of a run, oldest first; what a killed run left unfinished is removed.
pub(crate) fn finished(output: &Path) -> Result<Vec<Checkpoint>, Failure> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(output)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
            fs_err::remove_dir_all(entry.path())?;
        } else {
            found.extend(Checkpoint::parse(entry.path()));
        }
    }
    found.sort_by_key(|checkpoint| checkpoint.step);
    Ok(found)
}

/// Where the parts come from that training leaves alone.
pub(crate) struct Origin<'a> {
    /// Name of the model, for the adapter's files.
    pub(crate) base_model: &'a str,
    /// Whether the model's files never change in place.
    pub(crate) immutable: bool,
}

/// Writes the checkpoint after step `step`.
pub(crate) fn write(
    session: &mut Session,
    config: &Config,
    output: &Path,
    (epoch, step): (u64, u64),
    origin: &Origin<'_>,
) -> Result<Checkpoint, Failure> {
    let earlier = finished(output)?;
    let name = Checkpoint::name(epoch, step);
    let partial = output.join(format!("{PARTIAL}{name}"));
    let state = partial.join(STATE);
    fs_err::create_dir_all(&state)?;
    write_state(session, config, &state, (epoch, step))?;
    // Checkpoints hold the average, when there is one; training goes on from the weights themselves.
    swap(session)?;
    let written = if config.peft.is_some() {
        nn::lora_file::save(&partial, &session.parameters, Some(origin.base_model)).map(|_| ()).map_err(unusable)
    } else {
        let previous = earlier.last().map(|checkpoint| checkpoint.path.as_path());
        Unchanged { model: &session.folder, immutable: origin.immutable, previous }.place(&partial).and_then(|()| {
            let (folder, weights) = (partial.join("transformer"), &session.parameters.weights);
            let kind = Some(Kind::from(config.model.torch_dtype));
            nn::save::save_model(&folder, STEM, weights, kind, nn::save::SHARD_BYTES).map(|_| ()).map_err(unusable)
        })
    };
    swap(session)?;
    written?;
    let checkpoint = Checkpoint::at(output, (epoch, step));
    fs_err::rename(&partial, &checkpoint.path)?;
    fs_err::File::open(output)?.sync_all()?;
    Ok(checkpoint)
}

/// Removes checkpoints before `newest` that are not `due`, and the oldest beyond `max_recent`.
pub(crate) fn retain(
    output: &Path,
    max_recent: Option<u64>,
    newest: &Checkpoint,
    due: impl Fn(u64) -> bool,
) -> Result<(), Failure> {
    let earlier = finished(output)?.into_iter().filter(|checkpoint| checkpoint.step < newest.step);
    let (kept, surplus): (Vec<_>, Vec<_>) = earlier.partition(|checkpoint| due(checkpoint.step));
    let beyond = max_recent.map_or(0, |keep| (kept.len() + 1).saturating_sub(keep as usize));
    for old in surplus.iter().chain(kept.iter().take(beyond)) {
        fs_err::remove_dir_all(&old.path)?;
    }
    Ok(())
}

fn swap(session: &mut Session) -> Result<(), Failure> {
    session.ema.as_mut().map_or(Ok(()), nn::ema::Ema::swap).map_err(Failure::from_diagnostic)
}

fn write_state(session: &Session, config: &Config, folder: &Path, (epoch, step): (u64, u64)) -> Result<(), Failure> {
    save(folder, "weights", session.trained())?;
    save(folder, "optimizer", &session.optimizer.state())?;
    if let Some(ema) = &session.ema {
        save(folder, "ema", ema.state())?;
    }
    let config_value = serde_json::to_value(config).map_err(Failure::from_error)?;
    let state = State { format: FORMAT, steps: step + 1, epoch, seed: config.seed, config: config_value };
    let text = serde_json::to_string_pretty(&state).map_err(Failure::from_error)?;
    let mut file = fs_err::File::create(folder.join("state.json"))?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    file.sync_all()?;
    Ok(())
}

fn save(folder: &Path, name: &str, tensors: &[Named]) -> Result<(), Failure> {
    let pairs = tensors.iter().map(|named| (named.name.as_str(), &named.tensor));
    nn::save::save_safetensors(&folder.join(format!("{name}.safetensors")), pairs, &std::collections::BTreeMap::new())
        .map_err(Failure::from_diagnostic)
}

/// Takes up the state in `checkpoint`; how many steps had been taken. `config` must be the run's own, unless `foreign`.
pub(crate) fn restore(
    session: &mut Session,
    config: &Config,
    checkpoint: &Path,
    foreign: bool,
) -> Result<u64, Failure> {
    let folder = checkpoint.join(STATE);
    let refuse = |reason: String| {
        let problem = Problem::new(format!("cannot go on from `{}`: {reason}", checkpoint.display()));
        Failure::new(Exit::Input, problem.help("remove that folder, or choose another checkpoint"))
    };
    let text = fs_err::read_to_string(folder.join("state.json"))?;
    let state: State = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    if state.format != FORMAT {
        return Err(refuse(format!("its format is {}, this program writes {FORMAT}", state.format)));
    }
    if !foreign && serde_json::to_value(config).ok().as_ref() != Some(&state.config) {
        return Err(refuse("it was written under another training recipe".to_owned()));
    }
    let weights = open(&folder, "weights")?;
    let count = weights.names().count();
    if count != session.trained().len() {
        return Err(refuse(format!("it holds {count} trained tensors, the model has {}", session.trained().len())));
    }
    for named in session.trained() {
        let saved = weights.tensor_of_shape(&named.name, &named.tensor.size()).map_err(unusable)?;
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&saved));
    }
    session.optimizer.load_state(&open(&folder, "optimizer")?).map_err(unusable)?;
    if let Some(ema) = &mut session.ema {
        // A checkpoint without an average starts one at its weights.
        if folder.join("ema.safetensors").is_file() {
            ema.load_state(&open(&folder, "ema")?).map_err(unusable)?;
        } else {
            *ema = nn::ema::Ema::new(session.optimizer.parameters().to_vec()).map_err(Failure::from_diagnostic)?;
        }
    }
    Ok(state.steps)
}

fn open(folder: &Path, name: &str) -> Result<Weights, Failure> {
    Weights::file(&folder.join(format!("{name}.safetensors"))).map_err(unusable)
}

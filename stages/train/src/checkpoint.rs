//! Checkpoints: `epoch_E_step_S/`, a diffusers pipeline folder or adapter files, with the state that a run goes on from in
//! `training_state/`. A folder appears whole under its name or not at all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nn::Weights;
use parallel::Spread;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use spec::Problem;
use stage::{Exit, Failure};
use store::Digest;

use crate::config::Config;
use crate::experts::Expert;
use crate::session::Session;
use crate::unusable;

/// Name of the state's folder inside a checkpoint; diffusers does not look at it.
pub(crate) const STATE: &str = "training_state";
/// Version of the state's layout; 1 had no digests.
const FORMAT: u32 = 2;
/// Start of the names of unfinished checkpoints.
pub(crate) const PARTIAL: &str = ".partial-";

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
    /// The other files of the state, with their digests.
    #[serde(default)]
    files: BTreeMap<String, Digest>,
    /// Digest of all the above.
    #[serde(default)]
    seal: Option<Digest>,
}

impl State {
    fn sealed(mut self) -> Result<Self, serde_json::Error> {
        self.seal = None;
        self.seal = Some(Digest::of_json(&serde_json::to_value(&self)?));
        Ok(self)
    }

    /// The state in a checkpoint, if its files are what was written; else what is wrong.
    fn sound(checkpoint: &Path) -> Result<Self, String> {
        let folder = checkpoint.join(STATE);
        let text = fs_err::read_to_string(folder.join("state.json")).map_err(|error| error.to_string())?;
        let told = |error: serde_json::Error| format!("`state.json` cannot be read: {error}");
        let (state, again): (Self, Self) =
            (serde_json::from_str(&text).map_err(told)?, serde_json::from_str(&text).map_err(told)?);
        if !(1..=FORMAT).contains(&state.format) {
            return Err(format!("its format is {}, this program writes {FORMAT}", state.format));
        }
        if state.format > 1 && state.seal != again.sealed().map_err(told)?.seal {
            return Err("`state.json` is not what was written".to_owned());
        }
        for (name, digest) in &state.files {
            let found = Digest::of_file(&folder.join(name)).map_err(|error| error.to_string())?;
            if found != *digest {
                return Err(format!("`{name}` is not what was written"));
            }
        }
        Ok(state)
    }
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

/// Removes checkpoints of a run, from the newest on, until one is as it was written: a run goes on from nothing else. Answers
/// what was removed and why.
pub(crate) fn remove_damaged(output: &Path) -> Result<Vec<String>, Failure> {
    let mut removed = Vec::new();
    while let Some(newest) = finished(output)?.pop() {
        let Err(reason) = State::sound(&newest.path) else { break };
        fs_err::remove_dir_all(&newest.path)?;
        removed.push(format!("{} is damaged and was removed: {reason}", Checkpoint::name(newest.epoch, newest.step)));
    }
    Ok(removed)
}

/// Removes checkpoints before `newest` that are not `due`, and the oldest beyond `max_recent` but that after step `best`.
pub(crate) fn retain(
    output: &Path,
    max_recent: Option<u64>,
    best: Option<u64>,
    newest: &Checkpoint,
    due: impl Fn(u64) -> bool,
) -> Result<(), Failure> {
    let earlier = finished(output)?.into_iter().filter(|checkpoint| checkpoint.step < newest.step);
    let (kept, surplus): (Vec<_>, Vec<_>) = earlier.partition(|checkpoint| due(checkpoint.step));
    let beyond = max_recent.map_or(0, |keep| (kept.len() + 1).saturating_sub(keep as usize));
    let not_best = |checkpoint: &&Checkpoint| Some(checkpoint.step) != best;
    for old in surplus.iter().chain(kept.iter().take(beyond).filter(not_best)) {
        fs_err::remove_dir_all(&old.path)?;
    }
    Ok(())
}

/// Writes `state.json` over all that lies in `folder`, which the ranks wrote.
pub(crate) fn write_progress(
    folder: &Path,
    (epoch, step): (u64, u64),
    seed: u64,
    config: Value,
) -> Result<(), Failure> {
    let mut files = BTreeMap::new();
    for name in store::files_matching(folder, &[]).map_err(Failure::from_error)? {
        let digest = Digest::of_file(&folder.join(&name)).map_err(Failure::from_diagnostic)?;
        files.insert(name, digest);
    }
    let state = State { format: FORMAT, steps: step + 1, epoch, seed, config, files, seal: None };
    let state = state.sealed().map_err(Failure::from_error)?;
    let text = serde_json::to_string_pretty(&state).map_err(Failure::from_error)?;
    let mut file = fs_err::File::create(folder.join("state.json"))?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    file.sync_all()?;
    Ok(())
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
    let mut state: State = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    // One rank reads it all; the run's own was read before.
    if foreign && session.team.leads() {
        state = State::sound(checkpoint).map_err(refuse)?;
    }
    if !foreign && serde_json::to_value(config).ok().as_ref() != Some(&state.config) {
        return Err(refuse("it was written under another training recipe".to_owned()));
    }
    for expert in &mut session.experts {
        let folder = expert.role.denoiser.place(&folder);
        if !folder.join("weights.safetensors").is_file() {
            return Err(refuse(format!("it holds no state of `{}`", expert.role.denoiser.component)));
        }
        restore_expert(expert, &folder, &refuse)?;
    }
    Ok(state.steps)
}

fn restore_expert(expert: &mut Expert, folder: &Path, refuse: &dyn Fn(String) -> Failure) -> Result<(), Failure> {
    let open = |name: &str| Weights::file(&folder.join(format!("{name}.safetensors"))).map_err(unusable);
    // What this rank holds of each tensor.
    let seen = |weights: Weights, spread: &Spread| weights.seen(|name| spread.share(name)).map_err(unusable);
    let weights = open("weights")?;
    let count = weights.names().count();
    let trained = expert.spread.trained().len();
    if count != trained {
        return Err(refuse(format!("it holds {count} trained tensors, the model has {trained}")));
    }
    let weights = seen(weights, &expert.spread)?;
    for named in expert.trained() {
        let saved = weights.tensor_of_shape(&named.name, &named.tensor.size()).map_err(unusable)?;
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&saved));
    }
    expert.optimizer.load_state(&seen(open("optimizer")?, &expert.spread)?).map_err(unusable)?;
    if let Some(ema) = &mut expert.ema {
        // A checkpoint without an average starts one at its weights.
        if folder.join("ema.safetensors").is_file() {
            ema.load_state(&seen(open("ema")?, &expert.spread)?).map_err(unusable)?;
        } else {
            *ema = nn::ema::Ema::new(expert.optimizer.parameters().to_vec()).map_err(Failure::from_diagnostic)?;
        }
    }
    Ok(())
}

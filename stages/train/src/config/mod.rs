//! The training recipe: NeMo Automodel's YAML schema, read strictly, one block a file.
//!
//! Every key of the peer's schema is honoured or answered by one note; any other key is a mistake with a suggestion.
//! What moves a number is serialised into the stage's key; what does not is skipped.

mod additions;
mod checkpoint;
mod data;
mod distributed;
mod flow_matching;
#[cfg(test)]
mod lr_golden;
mod lr_scheduler;
mod model;
mod optimizer;
mod peft;
mod reader;
mod source;
mod step_scheduler;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nn::optim::Kept;
use serde::Serialize;
use serde_json::{Map, Value};
use spec::mesh::Axis;
use spec::{Mesh, Problem, counted};

pub(crate) use additions::{Ema, Samples, Validation};
pub(crate) use checkpoint::Checkpoint;
pub(crate) use data::Data;
pub(crate) use distributed::Distributed;
pub(crate) use flow_matching::FlowMatching;
pub(crate) use lr_scheduler::{LrScheduler, Rates};
pub(crate) use model::{Mode, Model, Stage};
pub(crate) use optimizer::{Optimizer, State};
pub(crate) use peft::Peft;
pub(crate) use step_scheduler::StepScheduler;

use reader::{Block, Report};

/// Everything a run is told.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) model: Model,
    pub(crate) optimizer: Optimizer,
    pub(crate) clip_grad_norm: Option<f64>,
    pub(crate) lr_scheduler: Option<LrScheduler>,
    pub(crate) flow_matching: FlowMatching,
    pub(crate) step_scheduler: StepScheduler,
    pub(crate) data: Data,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) peft: Option<Peft>,
    pub(crate) ema: Option<Ema>,
    pub(crate) validation: Option<Validation>,
    pub(crate) samples: Option<Samples>,
    /// How the run is spread over ranks and in time. It moves no number, or is part of the key.
    #[serde(skip_serializing_if = "Distributed::moves_no_number")]
    pub(crate) distributed: Distributed,
}

/// A training recipe that was read, with what there is to say about it.
pub(crate) struct Loaded {
    pub(crate) config: Config,
    pub(crate) notes: Vec<String>,
    pub(crate) problems: Vec<Problem>,
    origin: source::Origin,
}

impl Loaded {
    /// Gives a mistake found later the place of the value at dotted `path`.
    pub(crate) fn place(&self, path: &str, problem: Problem) -> Problem {
        self.origin.place(path, problem)
    }

    /// The YAML file, if one was named, with the line of each of its keys.
    pub(crate) fn written(&self) -> Option<(PathBuf, BTreeMap<String, usize>)> {
        self.origin.written()
    }
}

/// Reads the YAML file `config` (our copy of the peer's FLUX settings if `None`), with `table` laid over it.
pub(crate) fn load(config: Option<&str>, table: Map<String, Value>, base_dir: &Path) -> Result<Loaded, Problem> {
    let merged = source::merge(config, table, base_dir)?;
    let report = Report::new(merged.origin);
    let mut root = Block::root(&report, merged.values);
    let config = Config::read(&mut root, &report);
    root.finish();
    let (problems, mut notes, origin) = report.finish();
    notes.splice(0..0, merged.notes);
    Ok(Loaded { config, notes, problems, origin })
}

impl Config {
    fn read(root: &mut Block<'_>, report: &Report) -> Self {
        let optimizer = Optimizer::read(root.block_or_empty("optimizer"));
        let lr_scheduler = root.block("lr_scheduler").map(LrScheduler::read);
        if let Some((key, problem)) = lr_scheduler.as_ref().and_then(|scheduler| scheduler.ranges(&optimizer)) {
            report.problem(&format!("lr_scheduler.{key}"), problem);
        }
        let step_scheduler = StepScheduler::read(root.block_or_empty("step_scheduler"));
        let config = Self {
            seed: root.count("seed").unwrap_or(42),
            model: Model::read(root.block_or_empty("model")),
            clip_grad_norm: optimizer::clip(root.block_or_empty("clip_grad_norm")),
            flow_matching: FlowMatching::read(root.block_or_empty("flow_matching")),
            data: Data::read(root.block_or_empty("data"), step_scheduler.local_batch_size),
            step_scheduler,
            checkpoint: Checkpoint::read(root.block_or_empty("checkpoint")),
            peft: root.block("peft").map(Peft::read),
            ema: root.block("ema").map(Ema::read),
            validation: root.block("validation").map(Validation::read),
            samples: root.block("samples").map(Samples::read),
            distributed: Distributed::read(root),
            optimizer,
            lr_scheduler,
        };
        distributed::bystanders(root, report);
        config.remark(report);
        config
    }

    /// How the optimizer's state is kept.
    pub(crate) fn kept(&self) -> Kept {
        let State { exp_avg, exp_avg_sq } = self.optimizer.state;
        Kept { exp_avg, exp_avg_sq, seed: self.seed }
    }

    /// What cannot be done on this mesh, or not with the numbers of one rank: the key, and the mistake.
    pub(crate) fn refused_on(&self, mesh: &Mesh) -> Option<(&'static str, Problem)> {
        self.masks_on(mesh).or_else(|| self.interleaved_on(mesh))
    }

    /// Chunks of a pipeline that would only wait for each other.
    fn interleaved_on(&self, mesh: &Mesh) -> Option<(&'static str, Problem)> {
        let (chunks, stages) = (self.distributed.chunks, mesh.degree(Axis::Pp) as u64);
        let ranks = (mesh.degree(Axis::DpReplicate) * mesh.degree(Axis::DpShard)) as u64;
        let StepScheduler { global_batch_size: global, local_batch_size: local, .. } = self.step_scheduler;
        let batches = global.div_ceil(local * ranks);
        if chunks == 1 || stages == 1 || batches >= stages {
            return None;
        }
        let message = format!(
            "`pp_virtual_stages` is {chunks}, but global_batch_size {global} / (local_batch_size {local} × {}) makes {} a step \
             for pp_size {stages}",
            counted(ranks, "data-parallel rank"),
            counted(batches, "micro-batch"),
        );
        let help = format!("lower `step_scheduler.local_batch_size` until a step has {stages}, or remove the key");
        Some(("fsdp.pp_virtual_stages", Problem::new(message).help(help)))
    }

    /// Masks that no rank could draw whole.
    fn masks_on(&self, mesh: &Mesh) -> Option<(&'static str, Problem)> {
        let dropout = self.peft.as_ref().map(|peft| peft.dropout).filter(|dropout| *dropout > 0.0)?;
        let axis = [Axis::Tp, Axis::Cp].into_iter().find(|axis| mesh.degree(*axis) > 1)?;
        let message = format!(
            "`peft.dropout` is {dropout} and `{axis}_size` is {}: a mask is drawn over all tokens of a sample, of which each \
             rank would have some",
            mesh.degree(axis)
        );
        Some(("peft.dropout", Problem::new(message).help(format!("set `peft.dropout: 0`, or `{axis}_size: 1`"))))
    }

    /// Things worth knowing that no single key shows.
    fn remark(&self, report: &Report) {
        if self.peft.is_none() && self.model.torch_dtype == nn::Dtype::Bfloat16 {
            report.note("model.torch_dtype: `bfloat16`: checkpoints are written in it; masters are float32".to_owned());
        }
        if self.model.mode == Mode::Pretrain && self.peft.is_some() {
            let problem = Problem::new("`peft` needs trained weights, and `model.mode` is `pretrain`")
                .help("remove one of the two");
            report.problem("peft", problem);
        }
        if self.checkpoint.keep_best && self.validation.is_none() {
            let problem =
                Problem::new("`checkpoint.best_metric_key` is `validation_loss`, and there is no `validation`")
                    .help("add the block `validation`, or remove the key");
            report.problem("checkpoint.best_metric_key", problem);
        }
        let warmup = self.lr_scheduler.as_ref().and_then(|scheduler| scheduler.warmup_steps);
        if let (Some(warmup), Some(steps)) = (warmup, self.step_scheduler.max_steps)
            && warmup >= steps
        {
            report.note(format!(
                "lr_scheduler.lr_warmup_steps: {warmup}: the run ends after {}, still warming up",
                counted(steps, "step")
            ));
        }
    }
}

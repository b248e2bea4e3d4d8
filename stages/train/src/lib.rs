//! The stage `train`: shards, captions and a model to checkpoints, by flow matching; full, LoRA, or from random weights.
//!
//! One loop serves all three. Every random number is a function of (seed, sample, step), so neither the batch's split nor
//! a resume changes a result.

mod balance;
mod batch;
mod check;
mod checkpoint;
mod components;
mod config;
mod dataset;
mod draft;
mod estimate;
mod experts;
mod parameters;
mod plan;
mod prefetch;
mod preview;
mod probe;
mod records;
mod session;
mod step;
#[cfg(test)]
mod tests;
mod trainer;
mod validate;

use stage::{About, CheckRequest, Checked, Estimate, EstimateRequest, Exit, Failure, Outcome, Stage, Work};

pub use parameters::{ModelBlock, Parameters, Settings};

/// The stage.
#[derive(Debug, Clone, Copy)]
pub struct Train;

impl Stage for Train {
    type Parameters = Parameters;
    type Settings = Settings;

    fn describe() -> About {
        About {
            stage: "train",
            version: 2,
            about: "Trains the denoiser by flow matching: full fine-tune, LoRA, or from random weights.",
            inputs: &[("shards", "shards"), ("captions", "encoded")],
            optional: &[],
            output: "checkpoint",
            tables: &[
                ("steps", "steps.parquet"),
                ("losses", "losses.parquet"),
                ("validation", "validation.parquet"),
                ("held", "held.parquet"),
            ],
            measured: &["steps.parquet"],
            resumable: true,
            devices: &["cpu", "cuda"],
        }
    }

    fn ranks() -> &'static [&'static str] {
        &["cpu", "cuda"]
    }

    fn check(parameters: &Parameters, settings: &Settings, request: &CheckRequest) -> Checked {
        check::check(parameters, settings, &request.base_dir, request.ranks)
    }

    const ESTIMATES: bool = true;

    fn estimate(parameters: &Parameters, settings: &Settings, request: &EstimateRequest) -> Result<Estimate, Failure> {
        estimate::estimate(parameters, settings, request)
    }

    fn run(work: &Work<Self>) -> Result<Outcome, Failure> {
        trainer::run(work, &stage::launch()?).map_err(|mut failure| {
            if failure.exit == Exit::Memory {
                failure.problem.help = Some(LESS_MEMORY.to_owned());
            }
            failure
        })
    }
}

/// What helps a run that does not fit.
const LESS_MEMORY: &str = "more ranks with `fsdp`, a smaller `step_scheduler.local_batch_size`, `fsdp.activation_checkpointing`, \
                           or `optimizer.state_dtype: 8bit`";

/// What failed between ranks; the end of another one is a consequence, not a cause.
fn between_ranks(error: parallel::Error) -> Failure {
    let lost = error.is_loss();
    let failure = Failure::from_diagnostic(error);
    if lost { failure.exit(Exit::Lost) } else { failure }
}

/// A model, a table or a picture that cannot be used; what the file system said keeps its own exit code.
fn unusable(error: impl miette::Diagnostic + 'static) -> Failure {
    let failure = Failure::from_diagnostic(error);
    if failure.exit == Exit::Failed { failure.exit(Exit::Input) } else { failure }
}

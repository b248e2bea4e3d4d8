//! `pipeline-bucket`: latents to shards of equal shape, every bucket's rows filled up to whole batches.
//!
//! Rows are in order of their sample id; shuffling is the trainer's, a function of seed and epoch. Knows nothing of what
//! a latent means.

mod pack;
mod plan;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use spec::Problem;
use stage::{About, CheckRequest, Checked, Estimate, EstimateRequest, Exit, Failure, Outcome, Stage, Work};

/// What is done with the rows of a bucket that fill no batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Remainder {
    /// Rows from the bucket's beginning are repeated, marked, to fill the last batch.
    #[default]
    Pad,
    /// The last batch is short.
    Short,
    /// They are held back, and listed in `held`.
    Drop,
}

/// What changes the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Parameters {
    /// Rows of a bucket come in multiples of this: the trainer's local batch, or the global one.
    pub batch_size: u64,
    /// What is done with rows that fill no batch.
    pub remainder: Remainder,
    /// A shard is closed before its latents exceed this many bytes, at a whole batch.
    pub shard_bytes: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { batch_size: 1, remainder: Remainder::Pad, shard_bytes: 256 << 20 }
    }
}

/// Nothing is operational here.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {}

/// The stage.
pub struct Bucketing;

impl Stage for Bucketing {
    type Parameters = Parameters;
    type Settings = Settings;

    fn describe() -> About {
        About {
            stage: "bucket",
            version: 1,
            about: "Packs latents into shards of equal shape, in whole batches.",
            inputs: &[("latents", "encoded")],
            optional: &[],
            output: "shards",
            tables: &[("shards", "shards.parquet"), ("held", "held.parquet"), ("rejects", "rejects.parquet")],
            measured: &[],
            resumable: false,
            devices: &["cpu"],
        }
    }

    fn check(parameters: &Parameters, _: &Settings, _: &CheckRequest) -> Checked {
        let mut checked = Checked { key: serde_json::json!(parameters), ..Checked::default() };
        for (field, value) in [("batch_size", parameters.batch_size), ("shard_bytes", parameters.shard_bytes)] {
            if value == 0 {
                let help = "leave it out for the default";
                checked.problems.push(Problem::new(format!("`{field}` must be at least 1")).field(field).help(help));
            }
        }
        if parameters.batch_size == 1 && parameters.remainder != Remainder::Pad {
            checked.notes.push("`remainder` has no effect with `batch_size = 1`: there is never a remainder".into());
        }
        checked
    }

    const ESTIMATES: bool = true;

    fn estimate(parameters: &Parameters, request: &EstimateRequest) -> Result<Estimate, Failure> {
        match request.inputs.get("latents") {
            Some(input) => pack::estimate(input, parameters),
            None => Ok(Estimate::default()),
        }
    }

    fn run(work: &Work<Self>) -> Result<Outcome, Failure> {
        let input = work
            .request
            .inputs
            .get("latents")
            .ok_or_else(|| Failure::new(Exit::Usage, Problem::new("the request names no input `latents`")))?;
        pack::pack(input, &work.request.output, &work.parameters, &work.events)
    }
}

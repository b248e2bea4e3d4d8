//! `pipeline-bucket`: latents to shards of equal shape, every bucket's rows filled up to whole batches.
//!
//! Rows are in order of their sample id; shuffling is the trainer's, a function of seed and epoch. Knows nothing of what
//! a latent means.

mod condition;
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
    /// No shard's latents take more bytes than this; a quarter of it on average. Where a shard ends depends on the rows in
    /// it alone, so that a row that comes or goes changes one or two shards.
    pub shard_bytes: u64,
    /// Rows for which this SQL condition is not true are held back: over the columns of `latents` and `samples`, as in
    /// `caption not like '%blurry%' and scale <= 1`.
    #[serde(rename = "where", skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { batch_size: 1, remainder: Remainder::Pad, shard_bytes: 256 << 20, condition: None }
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
            version: 2,
            about: "Packs latents into shards of equal shape, in whole batches.",
            inputs: &[("latents", "encoded"), ("samples", "samples")],
            optional: &["samples"],
            output: "shards",
            tables: &[("shards", "shards.parquet"), ("held", "held.parquet"), ("rejects", "rejects.parquet")],
            measured: &[],
            resumable: false,
            devices: &["cpu"],
        }
    }

    fn check(parameters: &Parameters, _: &Settings, request: &CheckRequest) -> Checked {
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
        match &parameters.condition {
            Some(condition) => checked.problems.extend(condition::check(condition, &request.inputs)),
            None => drop(checked.unused.insert("samples".to_owned())),
        }
        checked
    }

    const ESTIMATES: bool = true;

    fn estimate(parameters: &Parameters, _: &Self::Settings, request: &EstimateRequest) -> Result<Estimate, Failure> {
        match request.inputs.get("latents") {
            Some(input) => pack::estimate(input, request.inputs.get("samples"), parameters),
            None => Ok(Estimate::default()),
        }
    }

    fn run(work: &Work<Self>) -> Result<Outcome, Failure> {
        let input = work
            .request
            .inputs
            .get("latents")
            .ok_or_else(|| Failure::new(Exit::Usage, Problem::new("the request names no input `latents`")))?;
        let samples = work.request.inputs.get("samples");
        pack::pack(input, samples, &work.request.output, &work.parameters, &work.events)
    }
}

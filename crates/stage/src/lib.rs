//! The contract of a stage program: what it is asked and what it answers. Knows no particular stage.
//!
//! A stage written in Rust implements [`Stage`] and calls [`entry()`] from its `main`; one in another language speaks the
//! JSON of the contract types itself.

mod colour;
mod contract;
mod entry;
mod events;
mod failure;
mod parameters;
mod source;

pub use colour::Colour;
pub use contract::*;
pub use entry::{entry, launch};
pub use events::Events;
pub use failure::{Exit, Failure};

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// One verb of the pipeline.
pub trait Stage: Sized {
    /// Semantic parameters: those that change the result. `#[serde(deny_unknown_fields)]`, no `flatten`.
    type Parameters: Serialize + DeserializeOwned + JsonSchema;
    /// Operational settings: those that must not change it. `#[serde(default, deny_unknown_fields)]`, no `flatten`.
    type Settings: Serialize + DeserializeOwned + JsonSchema + Default;

    /// What the stage is; [`entry()`] adds the schemas.
    fn describe() -> About;

    /// Devices on which one run may be several processes (ranks); see [`Description::ranks`].
    fn ranks() -> &'static [&'static str] {
        &[]
    }

    /// Looks the parameters over without loading or fetching anything big.
    fn check(parameters: &Self::Parameters, settings: &Self::Settings, request: &CheckRequest) -> Checked;

    /// Does the work: fills `work.request.output`.
    fn run(work: &Work<Self>) -> Result<Outcome, Failure>;

    /// Whether [`Stage::estimate`] has something to say.
    const ESTIMATES: bool = false;

    /// Says what a run would have to do, without doing any of it.
    fn estimate(_: &Self::Parameters, _: &Self::Settings, _: &EstimateRequest) -> Result<Estimate, Failure> {
        Ok(Estimate::default())
    }
}

/// A [`Description`] without what can be derived from types.
#[derive(Debug, Clone)]
pub struct About {
    /// The verb, such as `encode`.
    pub stage: &'static str,
    /// Step version; see [`Description::version`].
    pub version: u32,
    /// One sentence.
    pub about: &'static str,
    /// `(input name, kind of artifact)`.
    pub inputs: &'static [(&'static str, &'static str)],
    /// See [`Description::optional`].
    pub optional: &'static [&'static str],
    /// Kind of the artifact it makes.
    pub output: &'static str,
    /// `(table name, glob of its Parquet files inside the artifact)`.
    pub tables: &'static [(&'static str, &'static str)],
    /// See [`Description::measured`].
    pub measured: &'static [&'static str],
    /// See [`Description::resumable`].
    pub resumable: bool,
    /// `cpu`, `cuda`.
    pub devices: &'static [&'static str],
}

impl About {
    /// The full description of stage `S`.
    fn description<S: Stage>(&self) -> Description {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        Description {
            contract: CONTRACT,
            stage: self.stage.to_owned(),
            version: self.version,
            about: self.about.to_owned(),
            parameters: schemars::schema_for!(S::Parameters).to_value(),
            settings: schemars::schema_for!(S::Settings).to_value(),
            inputs: map(self.inputs),
            optional: self.optional.iter().map(|input| (*input).to_owned()).collect(),
            output: self.output.to_owned(),
            tables: map(self.tables),
            measured: self.measured.iter().map(|glob| (*glob).to_owned()).collect(),
            resumable: self.resumable,
            devices: self.devices.iter().map(|d| (*d).to_owned()).collect(),
            estimates: S::ESTIMATES,
            ranks: S::ranks().iter().map(|d| (*d).to_owned()).collect(),
        }
    }
}

/// One piece of work: the request, parsed, and where to report.
pub struct Work<S: Stage> {
    /// Semantic parameters.
    pub parameters: S::Parameters,
    /// Operational settings.
    pub settings: S::Settings,
    /// Paths, sources, device and threads.
    pub request: RunRequest,
    /// Where progress goes, and whether to stop.
    pub events: Events,
}

/// What a good run says at its end.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// One sentence for a person.
    pub summary: String,
    /// Rows in = out + rejected + held.
    pub ledger: Ledger,
    /// Free-form facts for the manifest.
    pub info: Value,
}

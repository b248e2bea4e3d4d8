//! The stage `encode`: samples to VAE latents and text embeddings, each distinct caption once.
//!
//! Two passes over `samples`: the first, without the media, finds buckets and collects captions; the second decodes and
//! crops on CPU threads while the device encodes what is not there yet. Each latent and embedding has a key of its own: rows
//! of earlier artifacts and of killed tries are taken over, and no byte of the result depends on whether they were. Knows
//! nothing of training.

mod captions;
mod check;
mod engine;
mod estimate;
mod identity;
mod latents;
mod length;
mod parameters;
mod pictures;
mod plan;
mod shards;
mod stock;

use std::ops::ControlFlow;
use std::path::PathBuf;

use models::ModelFolder;
use nn::BuildOptions;
use serde_json::json;
use spec::{Problem, counted};
use stage::{
    About, CheckRequest, Checked, Estimate, EstimateRequest, Exit, Failure, Ledger, Outcome, ResolvedSource,
    SourceKind, Stage, Work,
};
use store::Memo;
use tables::TableReader;
use tch::Kind;

use engine::Engine;
pub use parameters::{FrameRule, Parameters, Posterior, Settings, Upscale};
use plan::{Grid, Plan};

/// The step version: bumped when equal inputs and parameters would give another result.
const VERSION: u32 = 3;

/// The version of what is made of one item, in the keys of items: those that it does not change are taken over.
pub(crate) const ITEM_VERSION: u32 = 2;

/// The same of what only clips go through.
pub(crate) const CLIP_VERSION: u32 = 2;

/// Memory that a caption of 512 tokens needs on its way through T5-XXL, roughly.
const CAPTION_BYTES: u64 = 256 << 20;

/// What is told to someone who interrupts.
pub(crate) const KEPT: &str = "what was encoded is kept";

/// The stage.
#[derive(Debug, Clone, Copy)]
pub struct Encode;

impl Stage for Encode {
    type Parameters = Parameters;
    type Settings = Settings;

    fn describe() -> About {
        About {
            stage: "encode",
            version: VERSION,
            about: "Encodes pictures with the model's VAE and captions with its text encoders.",
            inputs: &[("samples", "samples")],
            optional: &[],
            output: "encoded",
            tables: &[
                ("latents", "latents/**/*.parquet"),
                ("captions", "captions/*.parquet"),
                ("rejects", "rejects.parquet"),
            ],
            measured: &[],
            resumable: true,
            devices: &["cpu", "cuda"],
        }
    }

    fn check(parameters: &Parameters, settings: &Settings, request: &CheckRequest) -> Checked {
        check::check(parameters, settings, &request.base_dir)
    }

    const ESTIMATES: bool = true;

    fn estimate(parameters: &Parameters, _: &Self::Settings, request: &EstimateRequest) -> Result<Estimate, Failure> {
        estimate::estimate(parameters, request)
    }

    fn run(work: &Work<Self>) -> Result<Outcome, Failure> {
        let request = &work.request;
        let device =
            torch::device::resolve(&request.device).map_err(|e| Failure::from_diagnostic(e).exit(Exit::Input))?;
        let model = request.sources.get("model").ok_or_else(|| Problem::new("no `model` source was given"))?;
        let folder = model_folder(model, &|done, total| {
            work.events.progress("fetching the model", done, Some(total), "bytes", None);
            if work.events.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let memo = Memo::at(request.memo.as_ref().unwrap_or(&request.scratch));
        let family = models::family_of(&folder).map_err(unusable)?;
        let input = request.inputs.get("samples").ok_or_else(|| Problem::new("no `samples` artifact was given"))?;
        let samples = TableReader::open(&input.join("samples")).map_err(unusable)?;

        let plan = Plan::new(&work.parameters, Grid::of(family, &folder).map_err(unusable)?, &samples)?;
        plan.report(&work.events);
        // What a killed try left in the output is not complete; what it left in the scratch folder is.
        fs_err::remove_dir_all(&request.output)?;
        fs_err::create_dir_all(&request.output)?;
        let options =
            || BuildOptions { device, storage: Kind::from(work.parameters.dtype), trainable: false, adapter: None };
        let texts = {
            let identities = identity::text_encoders(family, &folder, &memo)?;
            captions::encode(work, &plan.captions, &identities, || {
                let encoders = family.text_encoders(&folder, options()).map_err(unusable)?;
                Ok((encoders, Engine::new(device, request.threads, CAPTION_BYTES)?))
            })?
        };
        let made = {
            let identity = identity::vae(family, &folder, &memo)?;
            latents::encode(work, &samples, &plan, &identity, || {
                let mut vae = family.vae(&folder, options()).map_err(unusable)?;
                vae.set_tiling(work.parameters.vae_tiling).map_err(unusable)?;
                let largest = plan.counts().into_keys().max_by_key(|bucket| Engine::picture_bytes(*bucket));
                Ok((vae, Engine::new(device, request.threads, largest.map_or(0, Engine::picture_bytes))?))
            })?
        };

        let ledger = Ledger { taken: plan.rows, out: made.encoded, rejected: made.rejected, held: 0 };
        if ledger.out == 0 {
            let reason = made.first_reject.unwrap_or_else(|| "the data set is empty".to_owned());
            let problem =
                Problem::new(format!("nothing of {} could be encoded: {reason}", counted(plan.rows, "sample")));
            return Err(Failure::new(
                Exit::Input,
                problem.help("look at the table `rejects` of `ingest`, or at the pictures"),
            ));
        }
        let buckets = made.buckets.len();
        Ok(Outcome {
            summary: format!(
                "{} in {}{}, {}{}{}",
                counted(made.encoded, "sample"),
                counted(buckets, "bucket"),
                reused(made.new, made.encoded),
                counted(texts.captions, "distinct caption"),
                reused(texts.new as u64, texts.captions as u64),
                if made.rejected > 0 { format!(", {} rejected", made.rejected) } else { String::new() },
            ),
            ledger,
            info: json!({
                "buckets": made.buckets, "captions": texts.captions, "truncated": texts.truncated,
                "new": { "latents": made.new, "captions": texts.new },
            }),
        })
    }
}

/// How many were not there already, unless all.
fn reused(new: u64, all: u64) -> String {
    if new == all { String::new() } else { format!(" ({new} new, {} reused)", all - new) }
}

/// The model's folder on this machine, fetched if it is on the Hub.
fn model_folder(source: &ResolvedSource, progress: hub::Progress<'_>) -> Result<ModelFolder, Failure> {
    let path = match source.kind {
        SourceKind::Path => PathBuf::from(&source.location),
        SourceKind::HubModel | SourceKind::HubDataset => {
            let commit = source.commit.as_deref().ok_or_else(|| Problem::new("the model's commit was not resolved"))?;
            hub::Repo::model(&source.location)
                .and_then(|repo| hub::local_folder(&repo, commit, &source.parts, progress))
                .map_err(|error| Failure::from_diagnostic(error).exit(Exit::Hub))?
        }
    };
    ModelFolder::open(path).map_err(unusable)
}

/// A model or a table that cannot be used.
fn unusable(error: impl miette::Diagnostic + 'static) -> Failure {
    let failure = Failure::from_diagnostic(error);
    if failure.exit == Exit::Failed { failure.exit(Exit::Input) } else { failure }
}

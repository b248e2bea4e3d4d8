//! Which weights draw: the trained checkpoint, the base model, a LoRA on either.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use models::{Denoiser, DynTextEncoders, DynTransformer, DynVae, Family, ModelFolder};
use nn::lora_file::AdapterFile;
use nn::{BuildOptions, Builder, Weights};
use spec::Problem;
use stage::{Exit, Failure, ResolvedSource, SourceKind, Work};
use store::{Digest, Entry, Identity, Manifest};
use tch::{Device, Kind};

use crate::check::{self, Look};
use crate::checkpoint::{self, Checkpoint};
use crate::{Generate, Parameters, picture, unusable};

/// The model folders and adapters of a run.
pub(crate) struct Models<'a> {
    work: &'a Work<Generate>,
    device: Device,
    checkpoint: Option<Checkpoint>,
    /// The base model, if something needs it.
    base: Option<ModelFolder>,
    /// The folder whose encoders, VAE and schedule are used.
    folder: ModelFolder,
    /// Its family.
    pub(crate) family: &'static dyn Family,
    /// Its denoisers.
    denoisers: Vec<Denoiser>,
    /// What it says about the parameters.
    pub(crate) look: Look,
}

/// An adapter to apply.
struct Lora {
    name: String,
    path: PathBuf,
}

impl Lora {
    /// What of it is for one denoiser out of `all`: a file is for the first, a folder may have something for any.
    fn of(&self, denoiser: &Denoiser, all: &[Denoiser]) -> Option<PathBuf> {
        let there = |denoiser: &Denoiser| {
            let place = denoiser.place(&self.path);
            (place.is_file() || checkpoint::holds_adapter(&place)).then_some(place)
        };
        // One with nothing in any place goes to the first, which says what is missing.
        let first = || all.first().filter(|first| *first == denoiser && all.iter().all(|one| there(one).is_none()));
        there(denoiser).or_else(|| first().map(|first| first.place(&self.path)))
    }
}

impl<'a> Models<'a> {
    /// Finds the checkpoint and opens the folder that matters; loads no weights.
    pub(crate) fn open(work: &'a Work<Generate>, device: Device) -> Result<Self, Failure> {
        let parameters = &work.parameters;
        let checkpoint = match work.request.inputs.get("checkpoint") {
            Some(artifact) => Some(checkpoint::find(artifact, parameters.checkpoint.as_deref()).map_err(missing)?),
            None => None,
        };
        let full = checkpoint.as_ref().filter(|checkpoint| checkpoint.kind == checkpoint::Kind::Pipeline);
        let base = if full.is_none() || parameters.with_base {
            Some(ModelFolder::open(fetch(work, "model")?).map_err(unusable)?)
        } else {
            None
        };
        let trained = full.map(|full| ModelFolder::open(&full.path)).transpose().map_err(unusable)?;
        let folder = trained.or_else(|| base.clone()).ok_or_else(|| Problem::new("there is no model to draw with"))?;
        let family = models::family_of(&folder).map_err(unusable)?;
        // Once more: `check` could not look at a model that was still on the Hub.
        let look = Look::of(family, &folder).map_err(unusable)?;
        if let Some(problem) = check::against_model(parameters, &look).into_iter().next() {
            return Err(Failure::new(Exit::Recipe, problem));
        }
        let denoisers = family.denoisers(&folder).map_err(unusable)?;
        Ok(Self { work, device, checkpoint, base, folder, family, denoisers, look })
    }

    /// Name of the checkpoint, if there is one.
    pub(crate) fn checkpoint_name(&self) -> Option<&str> {
        self.checkpoint.as_ref().map(|checkpoint| checkpoint.name.as_str())
    }

    /// The text encoders.
    pub(crate) fn text_encoders(&self) -> Result<DynTextEncoders, Failure> {
        self.family.text_encoders(&self.folder, self.options()).map_err(unusable)
    }

    /// The VAE.
    pub(crate) fn vae(&self) -> Result<DynVae, Failure> {
        let mut vae = self.family.vae(&self.folder, self.options()).map_err(unusable)?;
        vae.set_tiling(self.work.parameters.vae_tiling).map_err(unusable)?;
        Ok(vae)
    }

    /// `scheduler/scheduler_config.json`.
    pub(crate) fn scheduler(&self) -> Result<serde_json::Value, Failure> {
        self.folder.json("scheduler/scheduler_config.json", "it gives the noise schedule").map_err(unusable)
    }

    /// `guidance` of the second denoiser, if there is one.
    pub(crate) fn second_guidance(&self) -> Option<f64> {
        let Parameters { guidance, guidance_2, .. } = self.work.parameters;
        (self.denoisers.len() > 1).then(|| guidance_2.unwrap_or(guidance))
    }

    /// The trained denoisers, or the base model's, each with the lowest level that it is for, and what their pictures are labelled
    /// with.
    pub(crate) fn denoisers(&self, base: bool) -> Result<(Vec<(f64, DynTransformer)>, picture::Weights), Failure> {
        let folder = self.base.as_ref().filter(|_| base).unwrap_or(&self.folder);
        let loras = if base { Vec::new() } else { self.loras()? };
        let parts = self.family.denoisers(folder).map_err(unusable)?;
        let denoiser = |part: &Denoiser| -> Result<(f64, DynTransformer), Failure> {
            let adapters = loras.iter().filter_map(|lora| lora.of(part, &parts));
            let adapters: nn::Result<Vec<_>> = adapters.map(|path| AdapterFile::open(&path)).collect();
            Ok((part.from, self.transformer(folder, part, &adapters.map_err(unusable)?)?))
        };
        let denoisers = parts.iter().map(denoiser).collect::<Result<_, _>>()?;
        let names: Vec<_> = loras.into_iter().map(|lora| lora.name).collect();
        let label = picture::Weights {
            model: self.work.parameters.model.clone(),
            checkpoint: if base { self.base_label()? } else { self.label()? },
            lora: if names.is_empty() { None } else { Some(names.join(" + ")) },
        };
        Ok((denoisers, label))
    }

    fn transformer(
        &self,
        folder: &ModelFolder,
        part: &Denoiser,
        adapters: &[AdapterFile],
    ) -> Result<DynTransformer, Failure> {
        // A first one stays beside the weights, as diffusers runs it; the rest is added to them.
        let (adapter, merged) = adapters.split_first().unzip();
        let weights = Weights::open(&folder.path.join(part.component), "diffusion_pytorch_model").map_err(unusable)?;
        let options = BuildOptions { adapter: adapter.map(AdapterFile::spec), ..self.options() };
        let builder = Builder::from_weights(weights, options);
        let transformer = self.family.transformer(folder, &builder).map_err(unusable)?;
        let built = builder.finish().map_err(unusable)?;
        let strength = self.work.parameters.lora_scale;
        if let Some(adapter) = adapter {
            adapter.fill(&built).map_err(unusable)?;
            built.set_adapter_strength(strength);
        }
        for adapter in merged.unwrap_or_default() {
            adapter.merge_into(&built, strength).map_err(unusable)?;
        }
        Ok(transformer)
    }

    fn options(&self) -> BuildOptions {
        BuildOptions::frozen(self.device, Kind::from(self.work.parameters.dtype))
    }

    /// The trained adapter, then the recipe's.
    fn loras(&self) -> Result<Vec<Lora>, Failure> {
        let trained = self.checkpoint.iter().filter(|checkpoint| checkpoint.kind == checkpoint::Kind::Lora);
        let mut loras: Vec<_> =
            trained.map(|checkpoint| Lora { name: checkpoint.name.clone(), path: checkpoint.path.clone() }).collect();
        if let Some(name) = &self.work.parameters.lora {
            loras.push(Lora { name: name.clone(), path: fetch(self.work, "lora")? });
        }
        Ok(loras)
    }

    fn label(&self) -> Result<String, Failure> {
        let (Some(checkpoint), Some(artifact)) = (&self.checkpoint, self.work.request.inputs.get("checkpoint")) else {
            return self.base_label();
        };
        Ok(format!("{}@{}", checkpoint.name, checkpoint_digest(artifact, checkpoint)?))
    }

    fn base_label(&self) -> Result<String, Failure> {
        Ok(format!("base@{}", source(self.work, "model")?.digest))
    }
}

/// Identity of a checkpoint's files but its training state: from the artifact's manifest, else by hashing.
fn checkpoint_digest(artifact: &Path, checkpoint: &Checkpoint) -> Result<Digest, Failure> {
    let counts = |path: &str| !path.starts_with("training_state");
    let recorded = fs_err::read(artifact.join("manifest.json")).ok();
    if let Some(manifest) = recorded.and_then(|bytes| serde_json::from_slice::<Manifest>(&bytes).ok()) {
        let prefix = format!("{}/", checkpoint.name);
        let inside =
            |file: &store::FileRecord| file.path.strip_prefix(&prefix).filter(|path| counts(path)).map(str::to_owned);
        let entry = |file: &store::FileRecord| Some(Entry { path: inside(file)?, digest: file.digest.to_string() });
        let entries: Vec<_> = manifest.files.iter().filter_map(entry).collect();
        if !entries.is_empty() {
            return Ok(Identity::of_entries(entries).digest);
        }
    }
    let files = store::files_matching(&checkpoint.path, &[]).map_err(Failure::from_error)?;
    let entry = |path: String| {
        let digest = Digest::of_file(&checkpoint.path.join(&path))?.to_string();
        Ok(Entry { path, digest })
    };
    let entries: store::Result<Vec<_>> = files.into_iter().filter(|path| counts(path)).map(entry).collect();
    Ok(Identity::of_entries(entries.map_err(Failure::from_error)?).digest)
}

fn source<'a>(work: &'a Work<Generate>, name: &str) -> Result<&'a ResolvedSource, Failure> {
    Ok(work.request.sources.get(name).ok_or_else(|| Problem::new(format!("no `{name}` source was given")))?)
}

/// Where a source lies on this machine, fetched if it is on the Hub.
fn fetch(work: &Work<Generate>, name: &str) -> Result<PathBuf, Failure> {
    let source = source(work, name)?;
    if source.kind == SourceKind::Path {
        return Ok(PathBuf::from(&source.location));
    }
    let commit =
        source.commit.as_deref().ok_or_else(|| Problem::new(format!("the commit of `{name}` was not resolved")))?;
    let progress = |done, total| {
        work.events.progress("fetching the model", done, Some(total), "bytes", None);
        if work.events.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    hub::Repo::model(&source.location)
        .and_then(|repo| hub::local_folder(&repo, commit, &source.parts, &progress))
        .map_err(|error| Failure::from_diagnostic(error).exit(Exit::Hub))
}

fn missing(problem: Problem) -> Failure {
    Failure::new(Exit::Input, problem)
}

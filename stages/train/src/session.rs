//! What is trained: the denoiser with its parameters, their optimizer, and their moving average.

use models::{DynTransformer, Family, ModelFolder};
use nn::ema::Ema;
use nn::lora::Spec;
use nn::optim::{AdamW, Settings};
use nn::{BuildOptions, Builder, Conditions, Inputs, Named, Parameters, Recompute, Weights};
use parallel::{Flight, Frame, Outline, Spread, Team};
use stage::Failure;
use tch::{Device, Kind, Tensor};

use crate::config::{Config, Mode};
use crate::{between_ranks, unusable};

/// Name of the weights' file in a diffusers component folder.
pub(crate) const STEM: &str = "diffusion_pytorch_model";

/// The state of a run that lives on the device.
pub(crate) struct Session {
    pub(crate) family: &'static dyn Family,
    pub(crate) folder: ModelFolder,
    pub(crate) transformer: DynTransformer,
    pub(crate) parameters: Parameters,
    pub(crate) optimizer: AdamW,
    pub(crate) ema: Option<Ema>,
    pub(crate) device: Device,
    /// Kind of activations.
    pub(crate) compute: Kind,
    /// Scale given to the guidance embedding, if the model has one.
    pub(crate) guidance: Option<f64>,
    recompute: Recompute,
    /// The ranks of the run.
    pub(crate) team: Team,
    /// What each of them holds, and how their gradients become one.
    pub(crate) spread: Spread,
}

impl Session {
    /// Builds the model: f32 masters for a full fine-tune, frozen weights and an f32 adapter for a LoRA.
    pub(crate) fn build(config: &Config, folder: ModelFolder, device: Device, team: Team) -> Result<Self, Failure> {
        let family = models::family_of(&folder).map_err(unusable)?;
        let adapter = adapter_spec(config, family);
        let storage = if adapter.is_some() { Kind::from(config.model.torch_dtype) } else { Kind::Float };
        let options = BuildOptions { device, storage, trainable: true, adapter };
        let outline = outline(family, &folder, options.clone())?;
        let builder = match config.model.mode {
            Mode::Finetune => {
                let weights = Weights::open(&folder.path.join("transformer"), STEM).map_err(unusable)?;
                Builder::from_weights(weights, options)
            }
            Mode::Pretrain => Builder::random(config.seed, options),
        };
        let compute = compute_kind(config, device);
        let frame = Frame::new(&team, outline).map_err(between_ranks)?.with(config.distributed.options());
        let frame = if config.distributed.cpu_offload { frame.in_host_memory() } else { frame };
        let builder = frame.on(&team, builder, compute);
        let transformer = family.transformer(&folder, &builder).map_err(unusable)?;
        let parameters = builder.finish().map_err(unusable)?;
        let (transformer, spread) = frame.spread(&team, transformer, &parameters).map_err(between_ranks)?;
        let betas = config.optimizer.betas;
        let settings = Settings { betas, weight_decay: config.optimizer.weight_decay, eps: config.optimizer.eps };
        let optimizer = AdamW::new(parameters.trainable(), settings)
            .and_then(|optimizer| optimizer.kept(config.kept(), &parameters.shares))
            .map_err(unusable)?;
        let ema = config.ema.map(|_| Ema::new(parameters.trainable())).transpose().map_err(unusable)?;
        let takes_guidance = family.takes_guidance(&folder).map_err(unusable)?;
        Ok(Self {
            family,
            folder,
            transformer,
            parameters,
            optimizer,
            ema,
            device,
            compute,
            guidance: takes_guidance.then_some(config.flow_matching.guidance_scale),
            recompute: config.distributed.recompute,
            team,
            spread,
        })
    }

    /// What is trained.
    pub(crate) fn trained(&self) -> &[Named] {
        self.optimizer.parameters()
    }

    /// The velocity at `latents` (f32 `[B, ...]`) and `sigma` (f32 `[B]`), in the compute kind.
    pub(crate) fn velocity(&self, latents: Tensor, sigma: &Tensor, conditions: &Conditions) -> Result<Tensor, Failure> {
        let inputs = self.inputs(latents, sigma, conditions)?;
        self.transformer.forward(&inputs, self.recompute).map_err(|error| self.failure(error))
    }

    /// As [`velocity`](Self::velocity), with a graph, for a backward that may come after other forwards. Where the blocks are
    /// spread over ranks, only some have the prediction.
    pub(crate) fn forward(
        &self,
        latents: Tensor,
        sigma: &Tensor,
        conditions: &Conditions,
    ) -> Result<(Option<Tensor>, Flight), Failure> {
        let inputs = self.inputs(latents, sigma, conditions)?;
        let run = self.spread.forward(self.transformer.as_ref(), &inputs, self.recompute);
        run.map_err(|error| self.failure(error))
    }

    fn inputs(&self, latents: Tensor, sigma: &Tensor, conditions: &Conditions) -> Result<Inputs, Failure> {
        let upload = |(name, tensor): (&String, &Tensor)| Ok((name.clone(), torch::host::upload(tensor, self.device)?));
        let conditions = conditions.iter().map(upload).collect::<torch::Result<_>>();
        let guidance = self.guidance.map(|scale| Tensor::full([latents.size()[0]], scale, (Kind::Float, self.device)));
        Ok(Inputs {
            latents,
            sigma: sigma.shallow_clone(),
            conditions: conditions.map_err(Failure::from_diagnostic)?,
            guidance,
            compute: self.compute,
        })
    }

    /// A failure between ranks, or of a backward behind which there is one.
    pub(crate) fn lost(&self, error: parallel::Error) -> Failure {
        between_ranks(self.spread.failure().unwrap_or(error))
    }

    /// An error of forward or backward, or the failure between ranks behind it.
    pub(crate) fn failure(&self, error: impl miette::Diagnostic + 'static) -> Failure {
        self.spread.failure().map_or_else(|| Failure::from_diagnostic(error), between_ranks)
    }
}

/// What the whole model is like; no weights are read.
pub(crate) fn outline(family: &dyn Family, folder: &ModelFolder, options: BuildOptions) -> Result<Outline, Failure> {
    let builder = Builder::meta(options);
    let model = family.transformer(folder, &builder).map_err(unusable)?;
    let parameters = builder.finish().map_err(unusable)?;
    Outline::of(model.as_ref(), &parameters).map_err(between_ranks)
}

/// Kind of activations: as asked, or bfloat16 where the device computes in it natively.
fn compute_kind(config: &Config, device: Device) -> Kind {
    match config.model.compute_dtype {
        Some(dtype) => dtype.into(),
        None if torch::device::native_bf16(device) => Kind::BFloat16,
        None => Kind::Float,
    }
}

/// The LoRA of the training recipe; without targets of its own it goes to the family's usual layers.
pub(crate) fn adapter_spec(config: &Config, family: &dyn Family) -> Option<Spec> {
    let peft = config.peft.as_ref()?;
    let usual = || family.lora_targets().iter().map(|target| (*target).to_owned()).collect();
    let targets = if peft.target_modules.is_empty() { usual() } else { peft.target_modules.clone() };
    let mut spec = Spec::new(peft.dim as i64, peft.alpha, targets);
    spec.exclude.clone_from(&peft.exclude_modules);
    spec.dropout = peft.dropout;
    spec.seed = config.seed;
    Some(spec)
}

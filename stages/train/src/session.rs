//! What is trained: the experts of a run, and what they have in common.

use models::{Family, ModelFolder};
use nn::lora::Spec;
use nn::{BuildOptions, Conditions, Inputs, Recompute};
use parallel::{Action, Flight, Team};
use spec::mesh::Axis;
use stage::Failure;
use tch::{Device, Kind, Tensor};

use crate::config::Config;
use crate::experts::{Division, Expert, Role};
use crate::{between_ranks, experts, unusable};

/// Name of the weights' file in a diffusers component folder.
pub(crate) const STEM: &str = "diffusion_pytorch_model";

/// The state of a run that lives on the device.
pub(crate) struct Session {
    pub(crate) family: &'static dyn Family,
    pub(crate) folder: ModelFolder,
    /// All denoisers of the model.
    pub(crate) denoisers: Vec<Role>,
    /// What is trained of them, in the same order.
    pub(crate) roles: Vec<Role>,
    /// Those of the trained ones that this rank holds: `roles[first..]`.
    pub(crate) experts: Vec<Expert>,
    /// Number of the first of them.
    pub(crate) first: usize,
    pub(crate) device: Device,
    /// Kind of activations.
    pub(crate) compute: Kind,
    /// Scale given to the guidance embedding, if the model has one.
    pub(crate) guidance: Option<f64>,
    recompute: Recompute,
    /// The ranks of the run.
    pub(crate) team: Team,
}

impl Session {
    /// Builds the experts.
    pub(crate) fn build(config: &Config, folder: ModelFolder, device: Device, team: Team) -> Result<Self, Failure> {
        let family = models::family_of(&folder).map_err(unusable)?;
        let denoisers = experts::all(config, family, &folder).map_err(unusable)?;
        let roles = experts::trained(config, &denoisers).map_err(recipe)?;
        experts::shared(config, &roles, team.mesh()).map_err(recipe)?;
        let adapter = adapter_spec(config, family);
        let storage = if adapter.is_some() { Kind::from(config.model.torch_dtype) } else { Kind::Float };
        let options = BuildOptions { device, storage, trainable: true, adapter };
        let compute = compute_kind(config, device);
        let held = division(&team, roles.len()).of(team.share().0).0;
        let build = |role: &Role| {
            let team = team.apart(Axis::Ep).map_err(between_ranks)?;
            Expert::build(config, family, &folder, (*role, team), (options.clone(), compute))
        };
        let experts = roles[held.clone()].iter().map(build).collect::<Result<_, _>>()?;
        let takes_guidance = family.takes_guidance(&folder).map_err(unusable)?;
        Ok(Self {
            family,
            folder,
            denoisers,
            roles,
            experts,
            first: held.start,
            device,
            compute,
            guidance: takes_guidance.then_some(config.flow_matching.guidance_scale),
            recompute: config.distributed.recompute,
            team,
        })
    }

    /// Which experts each share of the data goes through.
    pub(crate) fn division(&self) -> Division {
        division(&self.team, self.roles.len())
    }

    /// Whether no rank has all that is trained, so that all must run the model together.
    pub(crate) fn in_step(&self) -> bool {
        self.experts.len() < self.roles.len() || self.experts.iter().any(|expert| expert.spread.in_step())
    }

    /// The velocity of an expert at `latents` (f32 `[B, ...]`) and `sigma` (f32 `[B]`), in the compute kind.
    pub(crate) fn velocity(
        &self,
        expert: &Expert,
        latents: Tensor,
        sigma: &Tensor,
        conditions: &Conditions,
    ) -> Result<Tensor, Failure> {
        let inputs = self.inputs(latents, sigma, conditions)?;
        expert.transformer.forward(&inputs, self.recompute).map_err(|error| self.failure(error))
    }

    /// As [`velocity`](Self::velocity), with a graph, for a backward that may come after other forwards. Where the blocks are
    /// spread over ranks, only some have the prediction.
    pub(crate) fn forward(
        &self,
        expert: &Expert,
        latents: Tensor,
        sigma: &Tensor,
        conditions: &Conditions,
        action: Action,
    ) -> Result<(Option<Tensor>, Flight), Failure> {
        let inputs = self.inputs(latents, sigma, conditions)?;
        let run = expert.spread.forward(expert.transformer.as_ref(), &inputs, self.recompute, action);
        run.map_err(|error| self.failure(error))
    }

    /// The prediction of a trained expert on every rank, of which only some hold it; all must ask at the same point.
    pub(crate) fn predict_together(
        &self,
        role: &Role,
        held: Option<&Expert>,
        inputs: &Inputs,
    ) -> parallel::Result<Tensor> {
        let number = self.roles.iter().position(|other| other == role).unwrap_or(0);
        let place = number * self.division().groups / self.roles.len();
        parallel::ep::predict(&self.team, place, inputs, |inputs| match held {
            Some(expert) => expert.transformer.forward(inputs, Recompute::default()),
            None => Err(nn::Error::Invalid("the expert is on another rank".to_owned())),
        })
    }

    fn inputs(&self, latents: Tensor, sigma: &Tensor, conditions: &Conditions) -> Result<Inputs, Failure> {
        let upload =
            |(name, tensor): (&String, &Tensor)| Ok((name.clone(), torch::host::upload_beside(tensor, self.device)?));
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
        between_ranks(self.between_ranks().unwrap_or(error))
    }

    /// An error of forward or backward, or the failure between ranks behind it.
    pub(crate) fn failure(&self, error: impl miette::Diagnostic + 'static) -> Failure {
        self.between_ranks().map_or_else(|| Failure::from_diagnostic(error), between_ranks)
    }

    fn between_ranks(&self) -> Option<parallel::Error> {
        self.experts.iter().find_map(|expert| expert.spread.failure())
    }
}

fn division(team: &Team, experts: usize) -> Division {
    Division { experts, groups: team.place(Axis::Ep).1, shares: team.share().1 }
}

#[expect(clippy::boxed_local, reason = "what `map_err` hands over")]
fn recipe(mistake: experts::Mistake) -> Failure {
    Failure::new(stage::Exit::Recipe, mistake.1)
}

/// Kind of activations: as asked, or bfloat16 where the device computes in it natively.
pub(crate) fn compute_kind(config: &Config, device: Device) -> Kind {
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

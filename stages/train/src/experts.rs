//! The experts of a run: the denoisers that are trained, each on the samples whose noise level falls in its window. They share no
//! parameter, so each has its own gradients, norm, optimizer and average. A model with one denoiser is one expert for all levels.

use std::ops::Range;

use diffusion::timestep::{Levels, Window};
use models::{Denoiser, DynTransformer, Family, ModelFolder};
use nn::ema::Ema;
use nn::optim::{AdamW, Settings};
use nn::{BuildOptions, Builder, Named, Parameters, Weights};
use parallel::{Frame, Outline, Spread, Team};
use spec::mesh::Axis;
use spec::{Mesh, Problem, counted};
use stage::Failure;
use tch::Kind;

use crate::config::{Config, Mode, Stage};
use crate::session::STEM;
use crate::{between_ranks, unusable};

/// What an expert is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Role {
    pub(crate) denoiser: Denoiser,
    pub(crate) window: Window,
}

/// A mistake with its dotted path in the training recipe.
pub(crate) type Mistake = Box<(&'static str, Problem)>;

/// The denoisers of a model with their windows, as the training recipe sets the border between them.
pub(crate) fn all(config: &Config, family: &dyn Family, folder: &ModelFolder) -> models::Result<Vec<Role>> {
    let mut denoisers = family.denoisers(folder)?;
    if let (Some(boundary), [first, _]) = (config.model.boundary_ratio, denoisers.as_mut_slice()) {
        first.from = boundary;
    }
    let mut below = f64::INFINITY;
    let role = |denoiser: Denoiser| {
        let window = Window { from: denoiser.from, below };
        below = denoiser.from;
        Role { denoiser, window }
    };
    let roles = denoisers.into_iter().map(role).collect::<Vec<_>>();
    // One is for whatever is drawn.
    Ok(if let [only] = roles[..] { vec![Role { window: Window::ALL, ..only }] } else { roles })
}

/// Those of `all` that are trained.
pub(crate) fn trained(config: &Config, all: &[Role]) -> Result<Vec<Role>, Mistake> {
    let [first, .., last] = all else {
        let given = [
            ("model.stage", config.model.stage.map(|stage| format!("`{stage}`"))),
            ("model.boundary_ratio", config.model.boundary_ratio.map(|boundary| boundary.to_string())),
        ];
        return match given.into_iter().find_map(|(path, value)| Some((path, value?))) {
            None => Ok(all.to_vec()),
            Some((path, value)) => {
                let problem = Problem::new(format!("`{path}` is {value}, but the model has one denoiser"));
                let help = "remove it; one range of noise is trained with `flow_matching.sigma_min` and `sigma_max`";
                Err(Box::new((path, problem.help(help))))
            }
        };
    };
    let trained = match config.model.stage {
        None => all.to_vec(),
        Some(Stage::HighNoise) => vec![*first],
        Some(Stage::LowNoise) => vec![*last],
    };
    levels(config, &trained)
        .map_err(|error| Box::new(("flow_matching.timestep_sampling", Problem::new(error.to_string()))))?;
    let seen = |sigma: &f64| trained.iter().any(|role| role.window.holds(*sigma as f32));
    if config.validation.as_ref().is_some_and(|validation| !validation.sigmas.iter().any(seen)) {
        let problem = Problem::new("none of `validation.sigmas` is in the window of the denoiser that is trained");
        return Err(Box::new(("validation.sigmas", problem.help("add a level that `model.stage` is for"))));
    }
    Ok(trained)
}

/// Fails unless as many groups of ranks as there are, or as the recipe asks for, can share the experts.
pub(crate) fn shared(config: &Config, trained: &[Role], mesh: &Mesh) -> Result<(), Mistake> {
    let (groups, count) = (config.distributed.experts().max(mesh.degree(Axis::Ep)), trained.len());
    if count.is_multiple_of(groups) {
        return Ok(());
    }
    let message =
        format!("`fsdp`: ep_size {groups}: {} to share among {groups} groups of ranks", counted(count, "expert"));
    let help = "set it to 1: every rank holds all that is trained, and the numbers are the same";
    Err(Box::new(("fsdp.ep_size", Problem::new(message).help(help))))
}

/// How noise levels are drawn for these experts.
pub(crate) fn levels(config: &Config, trained: &[Role]) -> diffusion::Result<Levels> {
    let windows = || trained.iter().map(|role| role.window);
    let below = windows().map(|window| window.below).fold(f64::NEG_INFINITY, f64::max);
    let from = windows().map(|window| window.from).fold(f64::INFINITY, f64::min);
    // Levels are never below 0.
    let from = if from > 0.0 { from } else { f64::NEG_INFINITY };
    Levels { within: Window { from, below }, ..config.flow_matching.levels()? }.validated()
}

/// Which experts each share of the data goes through: shares of one group of ranks have the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    pub(crate) experts: usize,
    /// Groups of ranks that hold different ones.
    pub(crate) groups: usize,
    /// Shares of the data in all.
    pub(crate) shares: usize,
}

impl Division {
    /// Of a share: its experts, and its place among the shares of its group.
    pub(crate) fn of(self, share: usize) -> (Range<usize>, usize) {
        let (each, members) = (self.experts / self.groups, self.shares / self.groups);
        let group = share / members;
        (group * each..(group + 1) * each, share % members)
    }

    /// Shares of one group.
    pub(crate) fn members(self) -> usize {
        self.shares / self.groups
    }
}

/// An expert that this rank holds, or a share of one.
pub(crate) struct Expert {
    pub(crate) role: Role,
    pub(crate) transformer: DynTransformer,
    pub(crate) parameters: Parameters,
    pub(crate) optimizer: AdamW,
    pub(crate) ema: Option<Ema>,
    /// The ranks that hold it.
    pub(crate) team: Team,
    /// What each of them holds, and how their gradients become one.
    pub(crate) spread: Spread,
}

impl Expert {
    /// Builds it: f32 masters for a full fine-tune, frozen weights and an f32 adapter for a LoRA.
    pub(crate) fn build(
        config: &Config,
        family: &dyn Family,
        folder: &ModelFolder,
        (role, team): (Role, Team),
        (options, compute): (BuildOptions, Kind),
    ) -> Result<Self, Failure> {
        let outline = outline(family, folder, options.clone())?;
        let builder = match config.model.mode {
            Mode::Finetune => {
                let weights = Weights::open(&folder.path.join(role.denoiser.component), STEM).map_err(unusable)?;
                Builder::from_weights(weights, options)
            }
            Mode::Pretrain => Builder::random(config.seed, options),
        };
        let frame = Frame::new(&team, outline).map_err(between_ranks)?.with(config.distributed.options());
        let frame = if config.distributed.cpu_offload { frame.in_host_memory() } else { frame };
        let frame = frame.interleaved(&team, config.distributed.chunks).map_err(between_ranks)?;
        let builder = frame.on(&team, builder, compute);
        let transformer = family.transformer(folder, &builder).map_err(unusable)?;
        let parameters = builder.finish().map_err(unusable)?;
        let (transformer, spread) = frame.spread(&team, transformer, &parameters).map_err(between_ranks)?;
        let betas = config.optimizer.betas;
        let settings = Settings { betas, weight_decay: config.optimizer.weight_decay, eps: config.optimizer.eps };
        let optimizer = AdamW::new(parameters.trainable(), settings)
            .and_then(|optimizer| optimizer.kept(config.kept(), &parameters.shares))
            .map_err(unusable)?;
        let ema = config.ema.map(|_| Ema::new(parameters.trainable())).transpose().map_err(unusable)?;
        Ok(Self { role, transformer, parameters, optimizer, ema, team, spread })
    }

    /// What is trained.
    pub(crate) fn trained(&self) -> &[Named] {
        self.optimizer.parameters()
    }

    /// The norm of the gradients, which are then at most `max`.
    pub(crate) fn clip(&self, max: Option<f64>) -> parallel::Result<f64> {
        match max {
            Some(max) => self.spread.clip(&self.team, self.trained(), max),
            None => self.spread.gradient_norm(&self.team, self.trained()),
        }
    }
}

/// What the whole model is like; no weights are read.
fn outline(family: &dyn Family, folder: &ModelFolder, options: BuildOptions) -> Result<Outline, Failure> {
    let builder = Builder::meta(options);
    let model = family.transformer(folder, &builder).map_err(unusable)?;
    let parameters = builder.finish().map_err(unusable)?;
    Outline::of(model.as_ref(), &parameters).map_err(between_ranks)
}

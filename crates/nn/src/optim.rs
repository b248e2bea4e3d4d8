//! AdamW over named parameters, and clipping by the global norm.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::builder::Named;
use crate::error::{Error, Result, some_of};
use crate::moment::{Moment, Order};
use crate::rng::Stream;
use crate::share::Share;
use crate::weights::Weights;

pub use crate::moment::Keeping;

/// Settings of AdamW that stay the same over a run; defaults are those of `torch.optim.AdamW`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Decay of the means of gradients and of their squares.
    pub betas: (f64, f64),
    /// Decoupled decay, per unit of learning rate.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), weight_decay: 0.01, eps: 1e-8 }
    }
}

/// How state is kept. Numbers of a narrow state are functions of (seed, name, step, element).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// Means of gradients.
    pub exp_avg: Keeping,
    /// Means of their squares.
    pub exp_avg_sq: Keeping,
    /// Of the rounding of narrow kinds.
    pub seed: u64,
}

/// AdamW with state in f32, or as told by [`kept`](Self::kept). As in PyTorch, a parameter's state begins with its first gradient,
/// and a step passes over parameters without one.
#[derive(Debug)]
pub struct AdamW {
    settings: Settings,
    kept: Kept,
    parameters: Vec<Named>,
    /// What each of them is of a tensor.
    shares: Vec<Share>,
    moments: Vec<Option<Moments>>,
}

#[derive(Debug)]
struct Moments {
    mean: Moment,
    variance: Moment,
    /// Steps taken, an f32 scalar where the parameter is.
    step: Tensor,
}

impl AdamW {
    /// For f32 parameters that require gradients.
    pub fn new(parameters: Vec<Named>, settings: Settings) -> Result<Self> {
        if let Some(named) = parameters.iter().find(|named| named.tensor.kind() != Kind::Float) {
            return Err(Error::Invalid(format!(
                "parameter `{}` is {:?}; trained weights must be f32",
                named.name,
                named.tensor.kind()
            )));
        }
        let moments = parameters.iter().map(|_| None).collect();
        let shares = parameters.iter().map(|named| Share::whole(&named.tensor.size())).collect();
        Ok(Self { settings, kept: Kept::default(), parameters, shares, moments })
    }

    /// Keeps state so; before the first step. `shares`: what is held of parameters that are not whole.
    pub fn kept(mut self, kept: Kept, shares: &BTreeMap<String, Share>) -> Result<Self> {
        for (named, own) in self.parameters.iter().zip(&mut self.shares) {
            if let Some(share) = shares.get(&named.name) {
                own.clone_from(share);
            }
            kept.exp_avg.check(&named.name, own)?;
            kept.exp_avg_sq.check(&named.name, own)?;
        }
        Ok(Self { kept, ..self })
    }

    /// What is trained.
    pub fn parameters(&self) -> &[Named] {
        &self.parameters
    }

    /// Moves every parameter that has a gradient.
    pub fn step(&mut self, lr: f64) -> Result<()> {
        let Settings { betas, weight_decay, eps } = self.settings;
        let step = torch::ops::AdamW { lr, betas, weight_decay, eps };
        let mut lists: [Vec<Tensor>; 5] = Default::default();
        let all = self.parameters.iter().zip(&self.shares).zip(&mut self.moments);
        for ((named, share), moments) in all {
            let gradient = named.tensor.grad();
            if !gradient.defined() {
                continue;
            }
            let moments = match moments {
                Some(moments) => moments,
                None => moments.insert(Moments::zero(self.kept, &named.tensor, share)?),
            };
            let (Some(mean), Some(variance)) = (moments.mean.in_f32(), moments.variance.in_f32()) else {
                tch::no_grad(|| moments.step_narrow(step, named, &gradient, share, self.kept.seed))?;
                continue;
            };
            let now = [&named.tensor, &gradient, mean, variance, &moments.step];
            lists.iter_mut().zip(now).for_each(|(list, tensor)| list.push(tensor.shallow_clone()));
        }
        let [parameters, gradients, means, variances, steps] = &lists;
        Ok(torch::ops::fused_adamw(step, parameters, gradients, means, variances, steps)?)
    }

    /// Changes the decay of the steps to come.
    pub fn set_weight_decay(&mut self, weight_decay: f64) {
        self.settings.weight_decay = weight_decay;
    }

    /// Forgets all gradients.
    pub fn clear_gradients(&self) -> Result<()> {
        let tensors: Vec<_> = self.parameters.iter().map(|named| named.tensor.shallow_clone()).collect();
        Ok(torch::autograd::clear_gradients(&tensors)?)
    }

    /// `{name}.exp_avg`, `{name}.exp_avg_sq` and `{name}.step` of every parameter that ever had a gradient; of 8-bit moments
    /// the codes, and `{name}.exp_avg_scale`, `{name}.exp_avg_sq_scale`.
    pub fn state(&self) -> Vec<Named> {
        let begun = self
            .parameters
            .iter()
            .zip(&self.moments)
            .filter_map(|(named, moments)| Some((&named.name, moments.as_ref()?)));
        begun
            .flat_map(|(name, moments)| {
                let step = ("step", moments.step.shallow_clone());
                let all = moments.mean.state().into_iter().chain(moments.variance.state()).chain([step]);
                all.map(move |(suffix, tensor)| Named { name: format!("{name}.{suffix}"), tensor })
            })
            .collect()
    }

    /// Bytes of the state that this holds, once all parameters have had a gradient.
    pub fn state_bytes(&self) -> usize {
        let of = |(named, share): (&Named, &Share)| {
            let (held, whole) = (named.tensor.numel(), share.whole_shape().iter().product::<i64>() as usize);
            self.kept.exp_avg.bytes(held, whole) + self.kept.exp_avg_sq.bytes(held, whole) + size_of::<f32>()
        };
        self.parameters.iter().zip(&self.shares).map(of).sum()
    }

    /// Takes up a saved [`state`](Self::state), whatever it was kept as. Parameters absent from it begin anew; a tensor for no
    /// parameter is an error.
    pub fn load_state(&mut self, saved: &Weights) -> Result<()> {
        let mut taken = 0;
        for ((named, share), moments) in self.parameters.iter().zip(&self.shares).zip(&mut self.moments) {
            let keys = SUFFIXES.map(|suffix| format!("{}.{suffix}", named.name));
            if keys.iter().all(|key| saved.shape(key).is_none()) {
                *moments = None;
                continue;
            }
            let mut own = Moments::zero(self.kept, &named.tensor, share)?;
            let step = format!("{}.step", named.name);
            own.step = saved.tensor_of_shape(&step, &[])?.f_to_device(named.tensor.device())?;
            taken += 1 + own.mean.load(saved, &named.name)? + own.variance.load(saved, &named.name)?;
            *moments = Some(own);
        }
        let expected = |name: &&str| {
            self.parameters.iter().any(|named| {
                name.strip_prefix(named.name.as_str())
                    .is_some_and(|rest| SUFFIXES.iter().any(|suffix| rest.strip_prefix('.') == Some(suffix)))
            })
        };
        let count = saved.names().count() - taken;
        if count > 0 {
            let names = some_of(saved.names().filter(|name| !expected(name)));
            return Err(Error::Unexpected { origin: saved.origin().to_owned(), count, names });
        }
        Ok(())
    }
}

/// What the names of a parameter's state may end in, after a dot.
pub const SUFFIXES: [&str; 5] = ["exp_avg", "exp_avg_sq", "step", "exp_avg_scale", "exp_avg_sq_scale"];

/// Shape of what is kept under `suffix` for a parameter of `shape`: a number for each element, for each block, or one.
pub fn state_shape(suffix: &str, shape: &[i64]) -> Vec<i64> {
    match suffix {
        "step" => Vec::new(),
        "exp_avg_scale" | "exp_avg_sq_scale" => Share::whole(shape).blocks().map_or(Vec::new(), |share| share.shape()),
        _ => shape.to_vec(),
    }
}

/// What is held under `suffix` where `share` of the parameter is.
pub fn state_share(suffix: &str, share: &Share) -> Result<Share> {
    match suffix {
        "exp_avg_scale" | "exp_avg_sq_scale" => share.blocks(),
        _ => Ok(share.clone()),
    }
}

/// Elements that a narrow state is widened for at a time: whole blocks.
const WIDENED: i64 = 1 << 20;

impl Moments {
    fn zero(kept: Kept, parameter: &Tensor, share: &Share) -> Result<Self> {
        let mean = Moment::zero(Order::First, kept.exp_avg, parameter, share)?;
        let variance = Moment::zero(Order::Second, kept.exp_avg_sq, parameter, share)?;
        Ok(Self { mean, variance, step: Tensor::f_zeros([], (Kind::Float, parameter.device()))? })
    }

    /// A step in f32 on some elements after the others, rounded again at once.
    fn step_narrow(
        &mut self,
        step: torch::ops::AdamW,
        parameter: &Named,
        gradient: &Tensor,
        share: &Share,
        seed: u64,
    ) -> Result<()> {
        let taken = f64::try_from(&self.step)? as u64;
        let stream = Stream::new(seed, &["optimizer state".into(), (&parameter.name).into(), taken.into()]);
        let (weights, gradient) = (parameter.tensor.f_detach()?.f_view([-1])?, gradient.f_reshape([-1])?);
        let total = weights.size()[0];
        let mut first = 0;
        while first < total {
            let range = first..(first + WIDENED).min(total);
            first = range.end;
            let some = |tensor: &Tensor| tensor.f_narrow(0, range.start, range.end - range.start);
            let (mean, variance) = (self.mean.open(&range)?, self.variance.open(&range)?);
            let count = self.step.copy();
            let lists = [some(&weights)?, some(&gradient)?, mean.shallow_clone(), variance.shallow_clone(), count];
            let [weights, gradients, means, variances, counts] = lists.each_ref().map(std::slice::from_ref);
            torch::ops::fused_adamw(step, weights, gradients, means, variances, counts)?;
            // One draw for both, 16 bits each.
            let bits = stream.bits_at(&share.places(range.clone(), mean.device())?)?;
            self.mean.close(&range, &mean, &bits.f_bitwise_and(0xFFFF)?)?;
            let upper = bits.f_bitwise_right_shift_tensor_scalar(16)?.f_bitwise_and(0xFFFF)?;
            self.variance.close(&range, &variance, &upper)?;
        }
        let _ = self.step.f_add_scalar_(1)?;
        Ok(())
    }
}

/// The l2 norm over all gradients together; 0 without any.
pub fn gradient_norm(parameters: &[Named]) -> Result<f64> {
    Ok(total(&gradients(parameters).1)?.map_or(0.0, |(norm, _)| norm))
}

/// Scales all gradients so that their global l2 norm is at most `max_norm`, as `clip_grad_norm_`, and returns the norm
/// before. Fails, with the gradients untouched, if it is not finite.
pub fn clip_gradients(parameters: &[Named], max_norm: f64) -> Result<f64> {
    let (names, gradients) = gradients(parameters);
    let Some((norm, tensor)) = total(&gradients)? else { return Ok(0.0) };
    if !norm.is_finite() {
        let finite = |gradient: &Tensor| f64::try_from(gradient.abs().max()).is_ok_and(f64::is_finite);
        let bad = names.iter().zip(&gradients).filter(|(_, gradient)| !finite(gradient)).map(|(name, _)| *name);
        return Err(Error::NonFinite { norm, names: some_of(bad) });
    }
    scale_down(&gradients, &tensor, max_norm)?;
    Ok(norm)
}

/// As [`clip_gradients`], where these are a part of all gradients, whose norm is `norm`.
pub fn clip_part(parameters: &[Named], norm: f64, max_norm: f64) -> Result<()> {
    let gradients = gradients(parameters).1;
    match gradients.first() {
        Some(first) => scale_down(&gradients, &Tensor::f_full([], norm, (Kind::Float, first.device()))?, max_norm),
        None => Ok(()),
    }
}

fn scale_down(gradients: &[Tensor], norm: &Tensor, max_norm: f64) -> Result<()> {
    let factor = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(max_norm)?;
    if f64::try_from(&factor)? < 1.0 {
        torch::ops::scale(gradients, &factor)?;
    }
    Ok(())
}

fn gradients(parameters: &[Named]) -> (Vec<&str>, Vec<Tensor>) {
    parameters
        .iter()
        .map(|named| (named.name.as_str(), named.tensor.grad()))
        .filter(|(_, gradient)| gradient.defined())
        .unzip()
}

/// The global norm as a number and as an f32 scalar tensor.
fn total(gradients: &[Tensor]) -> Result<Option<(f64, Tensor)>> {
    if gradients.is_empty() {
        return Ok(None);
    }
    let norm = torch::ops::norms(gradients)?.f_norm()?;
    Ok(Some((f64::try_from(&norm)?, norm)))
}

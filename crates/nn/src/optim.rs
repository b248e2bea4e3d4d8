//! AdamW over named parameters, and clipping by the global norm.

use tch::{Kind, Tensor};

use crate::builder::Named;
use crate::error::{Error, Result, some_of};
use crate::weights::Weights;

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

/// AdamW with f32 state. As in PyTorch, a parameter's state begins with its first gradient, and a step passes over
/// parameters without one.
#[derive(Debug)]
pub struct AdamW {
    settings: Settings,
    parameters: Vec<Named>,
    moments: Vec<Option<Moments>>,
}

#[derive(Debug)]
struct Moments {
    mean: Tensor,
    variance: Tensor,
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
        Ok(Self { settings, parameters, moments })
    }

    /// What is trained.
    pub fn parameters(&self) -> &[Named] {
        &self.parameters
    }

    /// Moves every parameter that has a gradient.
    pub fn step(&mut self, lr: f64) -> Result<()> {
        let mut lists: [Vec<Tensor>; 5] = Default::default();
        for (named, moments) in self.parameters.iter().zip(&mut self.moments) {
            let gradient = named.tensor.grad();
            if !gradient.defined() {
                continue;
            }
            let moments = match moments {
                Some(moments) => moments,
                None => moments.insert(Moments::zero(&named.tensor)?),
            };
            let now = [&named.tensor, &gradient, &moments.mean, &moments.variance, &moments.step];
            lists.iter_mut().zip(now).for_each(|(list, tensor)| list.push(tensor.shallow_clone()));
        }
        let [parameters, gradients, means, variances, steps] = &lists;
        let Settings { betas, weight_decay, eps } = self.settings;
        let step = torch::ops::AdamW { lr, betas, weight_decay, eps };
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

    /// `{name}.exp_avg`, `{name}.exp_avg_sq` and `{name}.step` of every parameter that ever had a gradient.
    pub fn state(&self) -> Vec<Named> {
        let begun = self
            .parameters
            .iter()
            .zip(&self.moments)
            .filter_map(|(named, moments)| Some((&named.name, moments.as_ref()?)));
        begun
            .flat_map(|(name, moments)| {
                let Moments { mean, variance, step } = moments;
                SUFFIXES.iter().zip([mean, variance, step]).map(move |(suffix, tensor)| Named {
                    name: format!("{name}.{suffix}"),
                    tensor: tensor.shallow_clone(),
                })
            })
            .collect()
    }

    /// Takes up a saved [`state`](Self::state). Parameters absent from it begin anew; a tensor for no parameter is an error.
    pub fn load_state(&mut self, saved: &Weights) -> Result<()> {
        let mut taken = 0;
        for (named, moments) in self.parameters.iter().zip(&mut self.moments) {
            let keys = SUFFIXES.map(|suffix| format!("{}.{suffix}", named.name));
            if keys.iter().all(|key| saved.shape(key).is_none()) {
                *moments = None;
                continue;
            }
            let shape = named.tensor.size();
            let device = named.tensor.device();
            let read =
                |key: &str, shape: &[i64]| Ok::<_, Error>(saved.tensor_of_shape(key, shape)?.f_to_device(device)?);
            *moments = Some(Moments {
                mean: read(&keys[0], &shape)?,
                variance: read(&keys[1], &shape)?,
                step: read(&keys[2], &[])?,
            });
            taken += keys.len();
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

/// What the names of a parameter's state end in, after a dot.
pub const SUFFIXES: [&str; 3] = ["exp_avg", "exp_avg_sq", "step"];

impl Moments {
    fn zero(parameter: &Tensor) -> Result<Self> {
        let zeros = || parameter.f_zeros_like().and_then(|tensor| tensor.f_set_requires_grad(false));
        let step = Tensor::f_zeros([], (Kind::Float, parameter.device()))?;
        Ok(Self { mean: zeros()?, variance: zeros()?, step })
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

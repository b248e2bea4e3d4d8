//! The flow-matching objective: `x = (1 - sigma) clean + sigma noise`, target `noise - clean`, weighted squared error.
//!
//! Everything is f32; the model alone computes in another kind. The mean over a batch is the caller's: it knows how many
//! samples the *global* batch has, whatever way it was split.

use nn::rng::Stream;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// Steps of the table that `bsmntw` indexes.
const TABLE: usize = 1000;

/// Standard normal noise of one sample at one optimizer step, f32 of `shape`, on the CPU.
pub fn noise(seed: u64, sample_id: &str, step: u64, shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    let drawn = Stream::new(seed, &["noise".into(), sample_id.into(), step.into()]).normals(count);
    Tensor::from_slice(&drawn).view(shape)
}

/// `(1 - sigma) clean + sigma noise`: f32 [B, ...] for f32 [B, ...] and sigma f32 `[B]`.
pub fn interpolate(clean: &Tensor, noise: &Tensor, sigma: &Tensor) -> Tensor {
    let sigma = per_sample(sigma, clean.dim());
    (1.0 - &sigma) * clean + sigma * noise
}

/// What the model should predict: the velocity `noise - clean`.
pub fn target(clean: &Tensor, noise: &Tensor) -> Tensor {
    noise - clean
}

/// Squared error of each sample, averaged over its elements: f32 `[B]`.
pub fn sample_losses(prediction: &Tensor, target: &Tensor) -> Tensor {
    let error = (prediction.to_kind(Kind::Float) - target).square();
    let rest: Vec<i64> = (1..error.dim() as i64).collect();
    error.mean_dim(rest.as_slice(), false, Kind::Float)
}

fn per_sample(values: &Tensor, dims: usize) -> Tensor {
    let mut shape = vec![-1];
    shape.resize(dims, 1);
    values.view(shape.as_slice())
}

/// How much a sample counts, by its sigma.
#[derive(Debug, Clone, PartialEq)]
pub enum Weighting {
    /// 1.
    None,
    /// `1 + shift sigma`.
    Linear {
        /// The flow shift.
        shift: f64,
    },
    /// Bell around the middle: `exp(-2 ((t - 500) / 1000)^2)` for t = 0..999, less its least value, scaled to mean 1.
    Bsmntw(Vec<f32>),
}

impl Weighting {
    /// Names a training recipe may use when weighting is on.
    pub const NAMES: [&'static str; 2] = ["linear", "bsmntw"];

    /// The weighting called `name`.
    pub fn from_name(name: &str, shift: f64) -> Result<Self> {
        match name {
            "linear" => Ok(Self::Linear { shift }),
            "bsmntw" => Ok(Self::Bsmntw(bell())),
            _ => Err(Error::UnknownWeighting { name: name.to_owned() }),
        }
    }

    /// Weight of a sample at `sigma`.
    pub fn weight(&self, sigma: f32) -> f32 {
        match self {
            Self::None => 1.0,
            Self::Linear { shift } => 1.0 + *shift as f32 * sigma,
            Self::Bsmntw(table) => table[((sigma * TABLE as f32) as usize).min(TABLE - 1)],
        }
    }
}

fn bell() -> Vec<f32> {
    let centre = TABLE as f64 / 2.0;
    let raw: Vec<f64> = (0..TABLE).map(|t| (-2.0 * ((t as f64 - centre) / TABLE as f64).powi(2)).exp()).collect();
    let least = raw.iter().copied().fold(f64::INFINITY, f64::min);
    let scale = TABLE as f64 / raw.iter().map(|w| w - least).sum::<f64>();
    raw.iter().map(|w| ((w - least) * scale) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolation_ends_in_the_picture_and_in_the_noise() {
        let (clean, noise) = (
            Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).view([2, 2]),
            Tensor::from_slice(&[5f32, 6.0, 7.0, 8.0]).view([2, 2]),
        );
        let x = interpolate(&clean, &noise, &Tensor::from_slice(&[0f32, 1.0]));
        assert_eq!(Vec::<f32>::try_from(x.view(-1)).unwrap(), [1.0, 2.0, 7.0, 8.0]);
        // d x / d sigma is the target, whatever sigma is.
        let quarter = interpolate(&clean, &noise, &Tensor::from_slice(&[0.25f32, 0.25]));
        let half = interpolate(&clean, &noise, &Tensor::from_slice(&[0.5f32, 0.5]));
        assert!(((half - quarter) * 4.0 - target(&clean, &noise)).abs().max().double_value(&[]) < 1e-6);
    }

    #[test]
    fn a_samples_loss_does_not_depend_on_its_neighbours() {
        let prediction = Tensor::from_slice(&[1f32, 3.0, 0.0, 0.0]).view([2, 1, 2]);
        let losses = sample_losses(&prediction, &Tensor::zeros([2, 1, 2], (Kind::Float, tch::Device::Cpu)));
        assert_eq!(Vec::<f32>::try_from(losses).unwrap(), [5.0, 0.0]);
    }

    #[test]
    fn bell_weights_have_the_published_values() {
        let Weighting::Bsmntw(table) = Weighting::from_name("bsmntw", 1.0).unwrap() else { unreachable!() };
        // Values stated for the peer's table: 0 at t = 0, 1.108 at 250, 1.580 at 500, 0.005 at 999.
        for (t, expected) in [(0, 0.0), (250, 1.108), (500, 1.580), (999, 0.005)] {
            assert!((f64::from(table[t]) - expected).abs() < 6e-4, "{t}: {}", table[t]);
        }
        let mean = table.iter().map(|&w| f64::from(w)).sum::<f64>() / TABLE as f64;
        assert!((mean - 1.0).abs() < 1e-6);
    }

    #[test]
    fn linear_weights_grow_with_sigma() {
        let weighting = Weighting::from_name("linear", 3.0).unwrap();
        assert_eq!([weighting.weight(0.0), weighting.weight(0.5), weighting.weight(1.0)], [1.0, 2.5, 4.0]);
        assert_eq!(Weighting::None.weight(0.3), 1.0);
        assert!(Weighting::from_name("min_snr", 1.0).is_err());
    }

    #[test]
    fn noise_is_a_function_of_seed_sample_and_step() {
        let draw = |seed, sample: &str, step| noise(seed, sample, step, &[4, 8, 8]);
        assert_eq!(draw(1, "a", 2), draw(1, "a", 2));
        for other in [draw(2, "a", 2), draw(1, "b", 2), draw(1, "a", 3)] {
            assert_ne!(draw(1, "a", 2), other);
        }
        let many = noise(1, "a", 0, &[100_000]);
        assert!(many.mean(Kind::Float).double_value(&[]).abs() < 0.01);
        assert!((many.std(true).double_value(&[]) - 1.0).abs() < 0.01);
    }
}

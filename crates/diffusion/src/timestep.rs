//! Noise levels: how sigma in [0, 1] is drawn for a training sample.
//!
//! A draw is a pure function of (seed, sample, step), so it does not depend on which samples share a batch. Names and
//! formulas are those of NeMo Automodel's `flow_matching` block, except that mixing is decided per sample, a window
//! rescales sigma instead of clamping it (clamping piles probability up on the border), and an unknown name is an error. One of
//! several denoisers is given the part of the distribution that lies in its window ([`Levels::within`]).

use std::f64::consts::PI;

use nn::rng::Stream;

use crate::error::{Error, Result};

/// Below this, `u` would divide by (nearly) zero in the shift.
const U_MIN: f64 = 1e-5;
/// Scale of the `mode` density, fixed as in SD3's best setting.
const MODE_SCALE: f64 = 1.29;

/// Density of `u`, the level before the shift.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// `U(0, 1)`.
    Uniform,
    /// `sigmoid(N(mean, std))`.
    LogitNormal {
        /// Mean of the logit.
        mean: f64,
        /// Standard deviation of the logit.
        std: f64,
    },
    /// `sigmoid(N(0, 1))`.
    LogNorm,
    /// `1 - u - 1.29 (cos^2(pi u / 2) - 1 + u)`, clamped to [0, 1].
    Mode,
    /// As [`Sampling::LogNorm`]; the mixing with uniform levels is [`Levels::mix_uniform_ratio`].
    Mix,
    /// Sigma itself from `Beta(alpha, beta)`: neither shifted nor mixed.
    Beta {
        /// First shape parameter.
        alpha: f64,
        /// Second shape parameter.
        beta: f64,
    },
}

impl Sampling {
    /// Names a training recipe may use.
    pub const NAMES: [&'static str; 6] = ["uniform", "logit_normal", "lognorm", "mode", "mix", "beta"];

    /// The density called `name`; parameters that it does not have are left unread.
    pub fn from_name(name: &str, mean: f64, std: f64, alpha: f64, beta: f64) -> Result<Self> {
        Ok(match name {
            "uniform" => Self::Uniform,
            "logit_normal" => Self::LogitNormal { mean, std: at_least("logit_std", std, 0.0, "0 or more")? },
            "lognorm" => Self::LogNorm,
            "mode" => Self::Mode,
            "mix" => Self::Mix,
            "beta" => Self::Beta { alpha: positive("beta_alpha", alpha)?, beta: positive("beta_beta", beta)? },
            _ => {
                return Err(Error::UnknownSampling { name: name.to_owned() });
            }
        })
    }

    fn draw(self, stream: &mut Stream) -> f64 {
        match self {
            Self::Uniform => stream.uniform(),
            Self::LogitNormal { mean, std } => sigmoid(mean + std * stream.normal()),
            Self::LogNorm | Self::Mix => sigmoid(stream.normal()),
            Self::Mode => {
                let u = stream.uniform();
                (1.0 - u - MODE_SCALE * ((PI * u / 2.0).cos().powi(2) - 1.0 + u)).clamp(0.0, 1.0)
            }
            Self::Beta { alpha, beta } => {
                let (a, b) = (gamma(alpha, stream), gamma(beta, stream));
                a / (a + b)
            }
        }
    }
}

/// A window of noise levels: the lowest that is in it, and the lowest above it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// In it.
    pub from: f64,
    /// Not in it any more.
    pub below: f64,
}

impl Window {
    /// Every level.
    pub const ALL: Self = Self { from: f64::NEG_INFINITY, below: f64::INFINITY };

    /// Whether a level is in it.
    pub fn holds(self, sigma: f32) -> bool {
        let sigma = f64::from(sigma);
        // What is no number is no window's business.
        !(sigma < self.from || sigma >= self.below)
    }
}

/// The whole rule from random numbers to sigma.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Levels {
    /// Density of `u`.
    pub sampling: Sampling,
    /// `s` in `sigma = s / (s + 1/u - 1)`; 1 leaves `u` as it is, more favours noise.
    pub shift: f64,
    /// Chance that a sample draws `u` uniformly instead, for every density but `beta`.
    pub mix_uniform_ratio: f64,
    /// Window [min, max] that sigma is rescaled into.
    pub window: (f64, f64),
    /// False: `u` is uniform and is not shifted, whatever the above says.
    pub use_sigma_noise: bool,
    /// The levels that are wanted of all that come so. The others are drawn again: in the window the density keeps its form, as if
    /// its quantiles between those of the window's ends were stretched over [0, 1], whatever density it is.
    pub within: Window,
}

/// Draws out of which [`Levels::within`] must hold a thousandth.
const TRIALS: u64 = 4000;

impl Levels {
    /// Checks the ranges.
    pub fn validated(self) -> Result<Self> {
        positive("flow_shift", self.shift)?;
        if !(0.0..=1.0).contains(&self.mix_uniform_ratio) {
            return Err(Error::OutOfRange {
                name: "mix_uniform_ratio",
                value: self.mix_uniform_ratio,
                expected: "a value in [0, 1]",
            });
        }
        let (low, high) = self.window;
        if !(0.0..1.0).contains(&low) {
            return Err(Error::OutOfRange { name: "sigma_min", value: low, expected: "a value in [0, 1)" });
        }
        if !(high > low && high <= 1.0) {
            return Err(Error::OutOfRange {
                name: "sigma_max",
                value: high,
                expected: "a value above `sigma_min` and at most 1",
            });
        }
        let held =
            |trial: &u64| self.within.holds(self.draw(&mut Stream::new(0, &["window".into(), (*trial).into()])) as f32);
        if self.within != Window::ALL && (0..TRIALS).filter(held).count() < TRIALS as usize / 1000 {
            let Window { from, below } = self.within;
            return Err(Error::EmptyWindow { from, below });
        }
        Ok(self)
    }

    /// Sigma of one sample at one optimizer step.
    pub fn sigma(&self, seed: u64, sample_id: &str, step: u64) -> f32 {
        let mut stream = Stream::new(seed, &["sigma".into(), sample_id.into(), step.into()]);
        loop {
            let sigma = self.draw(&mut stream) as f32;
            if self.within.holds(sigma) {
                return sigma;
            }
        }
    }

    fn draw(&self, stream: &mut Stream) -> f64 {
        let (low, high) = self.window;
        low + (high - low) * self.unwindowed(stream)
    }

    fn unwindowed(&self, stream: &mut Stream) -> f64 {
        if !self.use_sigma_noise {
            return stream.uniform();
        }
        if matches!(self.sampling, Sampling::Beta { .. }) {
            return self.sampling.draw(stream);
        }
        let mixed = stream.uniform() < self.mix_uniform_ratio;
        let u = if mixed { Sampling::Uniform } else { self.sampling }.draw(stream).max(U_MIN);
        self.shift / (self.shift + 1.0 / u - 1.0)
    }
}

fn at_least(name: &'static str, value: f64, low: f64, expected: &'static str) -> Result<f64> {
    if value.is_finite() && value >= low { Ok(value) } else { Err(Error::OutOfRange { name, value, expected }) }
}

fn positive(name: &'static str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(Error::OutOfRange { name, value, expected: "a value above 0" })
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Gamma(shape, 1) by Marsaglia and Tsang's rejection (ACM TOMS 26, 2000); shapes below 1 are boosted.
fn gamma(shape: f64, stream: &mut Stream) -> f64 {
    if shape < 1.0 {
        let boost = (1.0 - stream.uniform()).powf(1.0 / shape);
        return gamma(shape + 1.0, stream) * boost;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = stream.normal();
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - stream.uniform()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::TAU;

    use super::*;

    const N: u64 = 20_000;

    fn levels(sampling: Sampling) -> Levels {
        Levels {
            sampling,
            shift: 1.0,
            mix_uniform_ratio: 0.0,
            window: (0.0, 1.0),
            use_sigma_noise: true,
            within: Window::ALL,
        }
    }

    /// Largest distance between the empirical distribution of `levels` and `cdf` (Kolmogorov and Smirnov).
    fn distance(levels: Levels, cdf: impl Fn(f64) -> f64) -> f64 {
        let mut drawn: Vec<f64> = (0..N).map(|step| f64::from(levels.sigma(7, "a", step))).collect();
        drawn.sort_by(f64::total_cmp);
        let n = N as f64;
        drawn.iter().enumerate().map(|(i, &x)| (cdf(x) - (i as f64 + 0.5) / n).abs()).fold(0.0, f64::max)
    }

    /// Normal distribution function by Simpson's rule: an independent reference for the samplers.
    fn phi(x: f64) -> f64 {
        integral(|t| (-t * t / 2.0).exp() / TAU.sqrt(), -9.0, x)
    }

    fn integral(f: impl Fn(f64) -> f64, from: f64, to: f64) -> f64 {
        let n = 2000;
        let h = (to - from) / f64::from(n);
        let inner: f64 = (1..n).map(|i| f(from + h * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
        h / 3.0 * (f(from) + f(to) + inner)
    }

    fn logit(x: f64) -> f64 {
        (x / (1.0 - x)).ln()
    }

    // 1.63 / sqrt(N) is the 1 % point of the Kolmogorov distribution; the seed is fixed, so this cannot flicker.
    const LIMIT: f64 = 0.0115;

    #[test]
    fn each_density_has_its_distribution() {
        assert!(distance(levels(Sampling::Uniform), |x| x) < LIMIT);
        assert!(
            distance(levels(Sampling::LogitNormal { mean: 0.5, std: 0.8 }), |x| phi((logit(x) - 0.5) / 0.8)) < LIMIT
        );
        assert!(distance(levels(Sampling::LogNorm), |x| phi(logit(x))) < LIMIT);
        assert!(distance(levels(Sampling::Mix), |x| phi(logit(x))) < LIMIT);
        let density = |x: f64| x.powf(1.5) * (1.0 - x).powf(0.5);
        let whole = integral(density, 0.0, 1.0);
        assert!(
            distance(levels(Sampling::Beta { alpha: 2.5, beta: 1.5 }), |x| integral(density, 0.0, x) / whole) < LIMIT
        );
    }

    #[test]
    fn mode_density_follows_its_map() {
        // The map is decreasing in u, so its distribution function is 1 - (inverse map), found here by bisection.
        let map = |u: f64| 1.0 - u - MODE_SCALE * ((PI * u / 2.0).cos().powi(2) - 1.0 + u);
        let cdf = |x: f64| {
            let (mut low, mut high) = (0.0, 1.0);
            for _ in 0..60 {
                let middle = f64::midpoint(low, high);
                if map(middle) > x { low = middle } else { high = middle }
            }
            1.0 - low
        };
        assert!(distance(levels(Sampling::Mode), cdf) < LIMIT);
    }

    #[test]
    fn shift_moves_the_distribution_as_its_formula_says() {
        let shifted = Levels { shift: 3.0, ..levels(Sampling::Uniform) };
        // sigma = 3u / (1 + 2u), so u = sigma / (3 - 2 sigma).
        assert!(distance(shifted, |x| x / (3.0 - 2.0 * x)) < LIMIT);
    }

    #[test]
    fn a_window_rescales_and_puts_no_mass_on_its_border() {
        let windowed = Levels { window: (0.875, 1.0), shift: 3.0, ..levels(Sampling::Uniform) };
        let drawn: Vec<f32> = (0..N).map(|step| windowed.sigma(1, "a", step)).collect();
        assert!(drawn.iter().all(|s| (0.875..=1.0).contains(s)));
        assert!(drawn.iter().filter(|&&s| s == 0.875).count() < 3);
        assert!(
            distance(windowed, |x| {
                let y = (x - 0.875) / 0.125;
                y / (3.0 - 2.0 * y)
            }) < LIMIT
        );
    }

    /// Drawing within a window is drawing from the part of the distribution that lies in it: no pile on its border, no stretching.
    #[test]
    fn within_a_window_the_distribution_keeps_its_form() {
        let shifted = Levels { shift: 3.0, ..levels(Sampling::Uniform) };
        let cdf = |x: f64| x / (3.0 - 2.0 * x);
        let border = 0.875;
        let high = Levels { within: Window { from: border, below: f64::INFINITY }, ..shifted }.validated().unwrap();
        let low = Levels { within: Window { from: 0.0, below: border }, ..shifted }.validated().unwrap();
        assert!(distance(high, |x| (cdf(x) - cdf(border)) / (1.0 - cdf(border))) < LIMIT);
        assert!(distance(low, |x| cdf(x) / cdf(border)) < LIMIT);
        // A level that the whole distribution gives and that fits is the one that the window gives.
        for step in 0..200 {
            let whole = shifted.sigma(7, "a", step);
            let kept = if f64::from(whole) >= border { high } else { low }.sigma(7, "a", step);
            assert_eq!(whole, kept);
            assert!(high.sigma(7, "a", step) >= 0.875 && low.sigma(7, "a", step) < 0.875);
        }
        let narrow = Levels { within: high.within, ..levels(Sampling::LogitNormal { mean: -3.0, std: 0.1 }) };
        assert!(narrow.validated().unwrap_err().to_string().contains("0.875"));
    }

    #[test]
    fn mixing_is_decided_for_each_sample() {
        // A very narrow density at 0.5: every sample away from it was mixed.
        let mixed = Levels { mix_uniform_ratio: 0.25, ..levels(Sampling::LogitNormal { mean: 0.0, std: 1e-6 }) };
        let away = (0..N).filter(|i| (mixed.sigma(3, &format!("sample {i}"), 5) - 0.5).abs() > 1e-3).count();
        assert!((away as f64 / N as f64 - 0.25 * 0.998).abs() < 0.01, "{away}");
    }

    #[test]
    fn a_draw_is_a_function_of_seed_sample_and_step() {
        let rule = levels(Sampling::LogNorm);
        assert_eq!(rule.sigma(1, "a", 9), rule.sigma(1, "a", 9));
        assert_ne!(rule.sigma(1, "a", 9), rule.sigma(2, "a", 9));
        assert_ne!(rule.sigma(1, "a", 9), rule.sigma(1, "b", 9));
        assert_ne!(rule.sigma(1, "a", 9), rule.sigma(1, "a", 8));
    }

    #[test]
    fn an_unknown_name_is_refused() {
        let error = Sampling::from_name("logitnormal", 0.0, 1.0, 2.5, 1.5).unwrap_err();
        assert_eq!(error.to_string(), "unknown timestep sampling `logitnormal`");
        assert!(Sampling::from_name("beta", 0.0, 1.0, 0.0, 1.5).is_err());
        assert!(Levels { window: (0.5, 0.5), ..levels(Sampling::Uniform) }.validated().is_err());
    }
}

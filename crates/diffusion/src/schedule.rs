//! The sampler's table of noise levels, from a diffusers `scheduler_config.json`.
//!
//! Mirrors `FlowMatchEulerDiscreteScheduler.set_timesteps` of diffusers 0.42, called as its pipelines call it (see
//! [`Spacing`]), in the same f32 arithmetic, so that tables are equal to the last bit. An option that would change the
//! numbers and has no formula here is refused by name.

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::unipc::{Rule, UniPc};

/// A scheduler of a class that is known here.
#[derive(Debug, Clone, PartialEq)]
pub enum Scheduler {
    /// `FlowMatchEulerDiscreteScheduler`.
    Euler(FlowMatchEuler),
    /// `UniPCMultistepScheduler`.
    UniPc(UniPc),
}

impl Scheduler {
    /// Reads `scheduler_config.json`.
    pub fn from_config(json: &Value) -> Result<Self> {
        match json.get("_class_name").and_then(Value::as_str).unwrap_or("") {
            "FlowMatchEulerDiscreteScheduler" => FlowMatchEuler::from_config(json).map(Self::Euler),
            "UniPCMultistepScheduler" => UniPc::from_config(json).map(Self::UniPc),
            class => Err(Error::SchedulerClass { class: class.to_owned() }),
        }
    }

    /// Levels for `steps` steps on a latent of `tokens` tokens.
    pub fn schedule(&self, steps: usize, tokens: usize, spacing: Spacing) -> Result<Schedule> {
        if steps == 0 {
            return Err(Error::OutOfRange { name: "steps", value: 0.0, expected: "1 or more" });
        }
        Ok(match self {
            Self::Euler(euler) => euler.schedule(steps, tokens, spacing),
            Self::UniPc(unipc) => unipc.schedule(steps),
        })
    }
}

/// How a pipeline asks `FlowMatchEulerDiscreteScheduler` for levels before the shift.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spacing {
    /// It gives `linspace(1, 1/n, n)`.
    Even,
    /// It gives the number of steps only: between the ends of the trained range, which are shifted already.
    Trained,
}

/// The scheduler's configuration, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct FlowMatchEuler {
    config: Config,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "the file's own fields")]
struct Config {
    num_train_timesteps: u32,
    shift: f64,
    use_dynamic_shifting: bool,
    base_shift: Option<f64>,
    max_shift: Option<f64>,
    base_image_seq_len: u32,
    max_image_seq_len: u32,
    invert_sigmas: bool,
    shift_terminal: Option<f64>,
    use_karras_sigmas: bool,
    use_exponential_sigmas: bool,
    use_beta_sigmas: bool,
    use_flow_sigmas: bool,
    time_shift_type: TimeShift,
    stochastic_sampling: bool,
}

/// Defaults of the class in diffusers.
impl Default for Config {
    fn default() -> Self {
        Self {
            num_train_timesteps: 1000,
            shift: 1.0,
            use_dynamic_shifting: false,
            base_shift: Some(0.5),
            max_shift: Some(1.15),
            base_image_seq_len: 256,
            max_image_seq_len: 4096,
            invert_sigmas: false,
            shift_terminal: None,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            use_flow_sigmas: false,
            time_shift_type: TimeShift::Exponential,
            stochastic_sampling: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TimeShift {
    Exponential,
    Linear,
}

/// Levels of one run of the sampler.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Noise levels, from most to least, and 0 at the end: one more than there are steps.
    pub sigmas: Vec<f32>,
    /// Times given to the model, `sigma * num_train_timesteps`: one for each step.
    pub timesteps: Vec<f32>,
    /// `num_train_timesteps`: what a time is divided by to give a sigma again.
    pub train_timesteps: f32,
    /// How a step is taken.
    pub solver: Solver,
}

/// How a step is taken.
#[derive(Debug, Clone, PartialEq)]
pub enum Solver {
    /// Along the velocity.
    Euler,
    /// With the predictions of earlier steps.
    UniPc(Rule),
}

impl FlowMatchEuler {
    fn from_config(json: &Value) -> Result<Self> {
        let config: Config =
            serde_json::from_value(json.clone()).map_err(|e| Error::SchedulerConfig { detail: e.to_string() })?;
        let refused = [
            ("use_beta_sigmas", config.use_beta_sigmas),
            ("use_flow_sigmas", config.use_flow_sigmas),
            ("invert_sigmas", config.invert_sigmas),
            ("stochastic_sampling", config.stochastic_sampling),
        ];
        if let Some((option, _)) = refused.into_iter().find(|(_, on)| *on) {
            return Err(Error::SchedulerOption { option });
        }
        if config.use_karras_sigmas && config.use_exponential_sigmas {
            let detail = "`use_karras_sigmas` and `use_exponential_sigmas` exclude each other".to_owned();
            return Err(Error::SchedulerConfig { detail });
        }
        Ok(Self { config })
    }

    /// Shift for a picture of `image_seq_len` tokens: linear between the two ends, and beyond them.
    pub fn mu(&self, image_seq_len: usize) -> f64 {
        let Config { base_image_seq_len, max_image_seq_len, .. } = self.config;
        let (base, max) = (self.config.base_shift.unwrap_or(0.5), self.config.max_shift.unwrap_or(1.15));
        let slope = (max - base) / (f64::from(max_image_seq_len) - f64::from(base_image_seq_len));
        image_seq_len as f64 * slope + (base - slope * f64::from(base_image_seq_len))
    }

    fn schedule(&self, steps: usize, image_seq_len: usize, spacing: Spacing) -> Schedule {
        let mu = self.mu(image_seq_len);
        let mut sigmas: Vec<f32> = match spacing {
            Spacing::Even => {
                linspace(1.0, 1.0 / steps as f64, steps).map(|sigma| self.shifted(sigma as f32, mu)).collect()
            }
            Spacing::Trained => {
                let train = f64::from(self.config.num_train_timesteps);
                let dynamic = self.config.use_dynamic_shifting;
                let end = |sigma: f32| f64::from(if dynamic { sigma } else { self.shifted(sigma, mu) });
                let times = linspace(end(1.0) * train, end(1.0 / train as f32) * train, steps);
                times.map(|time| self.shifted_wide(time / train, mu) as f32).collect()
            }
        };
        if let Some(terminal) = self.config.shift_terminal.filter(|t| *t != 0.0) {
            let scale = (1.0 - sigmas[steps - 1]) / (1.0 - terminal) as f32;
            for sigma in &mut sigmas {
                *sigma = 1.0 - (1.0 - *sigma) / scale;
            }
        }
        let (first, last) = (f64::from(sigmas[0]), f64::from(sigmas[steps - 1]));
        if self.config.use_karras_sigmas {
            // Karras et al. 2022, equation 5 with rho = 7.
            let ends = (first.powf(1.0 / 7.0), last.powf(1.0 / 7.0));
            sigmas = linspace(0.0, 1.0, steps).map(|r| (ends.0 + r * (ends.1 - ends.0)).powi(7) as f32).collect();
        } else if self.config.use_exponential_sigmas {
            sigmas = linspace(first.ln(), last.ln(), steps).map(|s| s.exp() as f32).collect();
        }
        let train_timesteps = self.config.num_train_timesteps as f32;
        let timesteps = sigmas.iter().map(|s| s * train_timesteps).collect();
        sigmas.push(0.0);
        Schedule { sigmas, timesteps, train_timesteps, solver: Solver::Euler }
    }

    fn shifted(&self, sigma: f32, mu: f64) -> f32 {
        if !self.config.use_dynamic_shifting {
            let shift = self.config.shift;
            return shift as f32 * sigma / (1.0 + (shift - 1.0) as f32 * sigma);
        }
        let s = match self.config.time_shift_type {
            TimeShift::Exponential => mu.exp() as f32,
            TimeShift::Linear => mu as f32,
        };
        s / (s + (1.0 / sigma - 1.0))
    }

    /// As [`shifted`](Self::shifted) in f64, as diffusers shifts levels that it laid out itself.
    fn shifted_wide(&self, sigma: f64, mu: f64) -> f64 {
        let s = match (self.config.use_dynamic_shifting, self.config.time_shift_type) {
            (false, _) => return self.config.shift * sigma / (1.0 + (self.config.shift - 1.0) * sigma),
            (true, TimeShift::Exponential) => mu.exp(),
            (true, TimeShift::Linear) => mu,
        };
        s / (s + (1.0 / sigma - 1.0))
    }
}

/// As numpy: `start + i * step` in double precision, the last value exact.
pub(crate) fn linspace(start: f64, stop: f64, count: usize) -> impl Iterator<Item = f64> {
    let step = if count > 1 { (stop - start) / (count - 1) as f64 } else { 0.0 };
    (0..count).map(move |i| if i > 0 && i + 1 == count { stop } else { i as f64 * step + start })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn scheduler(options: &Value) -> FlowMatchEuler {
        let mut config = json!({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000});
        config.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        FlowMatchEuler::from_config(&config).unwrap()
    }

    // Expected: scheduler.set_timesteps(sigmas=np.linspace(1, 1 / n, n), mu=...).
    #[test]
    fn tables_equal_diffusers_bit_for_bit() {
        for case in crate::schedule_golden::golden() {
            let scheduler = scheduler(&serde_json::from_str(case.options).unwrap());
            let schedule = scheduler.schedule(case.steps, case.image_seq_len, case.spacing);
            assert_eq!(schedule.sigmas, case.sigmas, "{}", case.options);
            assert_eq!(schedule.timesteps, case.timesteps, "{}", case.options);
        }
    }

    #[test]
    fn the_published_flux_table_of_four_steps() {
        let flux =
            scheduler(&json!({"use_dynamic_shifting": true, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}));
        assert!((flux.mu(4096) - 1.15).abs() < 1e-12);
        let schedule = flux.schedule(4, 15, Spacing::Even);
        // As the denoiser saw them in diffusers: time / 1000 in f32.
        let seen: Vec<f32> = schedule.timesteps.iter().map(|time| time / 1000.0).collect();
        assert_eq!(seen, [1.0, 0.826_04, 0.612_825_75, 0.345_380_7]);
    }

    #[test]
    fn an_option_without_formula_is_refused_by_name() {
        for option in ["use_beta_sigmas", "invert_sigmas", "stochastic_sampling", "use_flow_sigmas"] {
            let config = json!({"_class_name": "FlowMatchEulerDiscreteScheduler", option: true});
            let error = Scheduler::from_config(&config).unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
        let error = Scheduler::from_config(&json!({"_class_name": "PNDMScheduler"})).unwrap_err();
        assert!(error.to_string().contains("PNDMScheduler"));
    }
}

//! The loop: from noise to clean latents, with distilled guidance and, when asked, true classifier-free guidance.
//!
//! Rounds where diffusers rounds: the time is cast to the kind of the noise before it is divided by 1000, an Euler step is
//! added in f32 and its result cast to the model's kind.

use std::ops::ControlFlow;

use nn::Recompute;
use nn::transformer::{Conditions, Inputs, Transformer};
use tch::{Kind, Tensor, no_grad};

use crate::error::Result;
use crate::schedule::{Schedule, Solver};
use crate::unipc;

/// The velocity at an input, wherever it is computed.
pub type Predict<'a> = Box<dyn Fn(&Inputs) -> nn::Result<Tensor> + 'a>;

/// A denoiser with the levels that it is for.
pub struct Denoiser<'a> {
    /// It.
    pub predict: Predict<'a>,
    /// The lowest level (time over training times) that it takes, unless one before it does.
    pub from: f64,
    /// Scale of true classifier-free guidance while it works.
    pub scale: f64,
}

impl<'a> Denoiser<'a> {
    /// One that is here.
    pub fn new(model: &'a dyn Transformer, from: f64, scale: f64) -> Self {
        Self { predict: Box::new(|inputs| model.forward(inputs, Recompute::default())), from, scale }
    }
}

/// What steers a run.
#[derive(Debug)]
pub struct Guidance<'a> {
    /// Conditions of the prompt.
    pub positive: &'a Conditions,
    /// Conditions of the negative prompt, with which there is true classifier-free guidance; doubles the cost.
    pub negative: Option<&'a Conditions>,
    /// Distilled guidance scale, for models that embed it.
    pub distilled: Option<f32>,
}

/// Runs the whole schedule on `initial` (noise, [B, ...], in the kind in which the pipeline keeps latents); each step goes
/// through the first of `denoisers` that takes its level, and the last takes what none before it does. They compute in `compute`.
///
/// `on_step` is told (steps done, steps in all) after each step; when it breaks, the run ends with `None`.
pub fn sample(
    denoisers: &[Denoiser<'_>],
    schedule: &Schedule,
    initial: Tensor,
    guidance: &Guidance<'_>,
    compute: Kind,
    on_step: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Option<Tensor>> {
    let mut latents = initial;
    let (kind, device, batch) = (latents.kind(), latents.device(), latents.size()[0]);
    let steps = schedule.timesteps.len();
    let mut unipc = match &schedule.solver {
        Solver::Euler => None,
        Solver::UniPc(rule) => Some(unipc::Run::new(rule, &schedule.sigmas)),
    };
    for step in 0..steps {
        let Some(denoiser) = denoisers.iter().find(|denoiser| takes(denoiser, schedule, step)).or(denoisers.last())
        else {
            return Err(nn::Error::Invalid("there is no denoiser to sample with".to_owned()).into());
        };
        let predict = |conditions: &Conditions, latents: &Tensor| {
            let inputs = Inputs {
                latents: latents.shallow_clone(),
                sigma: level(schedule, step, kind).expand([batch], false).to_device(device),
                conditions: conditions.iter().map(|(k, v)| (k.clone(), v.shallow_clone())).collect(),
                guidance: guidance.distilled.map(|g| Tensor::full([batch], f64::from(g), (Kind::Float, device))),
                compute,
            };
            (denoiser.predict)(&inputs)
        };
        let next = no_grad(|| -> Result<Tensor> {
            let mut velocity = predict(guidance.positive, &latents)?;
            if let Some(conditions) = guidance.negative {
                let unconditional = predict(conditions, &latents)?;
                velocity = &unconditional + denoiser.scale * (velocity - &unconditional);
            }
            if let Some(run) = &mut unipc {
                return Ok(run.step(step, &velocity, latents.shallow_clone()));
            }
            // The difference is taken in f32, as diffusers does on its f32 table.
            let dt = Tensor::from(schedule.sigmas[step + 1] - schedule.sigmas[step]);
            let stepped = latents.to_kind(Kind::Float) + &velocity * dt;
            Ok(stepped.to_kind(velocity.kind()))
        })?;
        latents = next;
        if on_step(step + 1, steps).is_break() {
            return Ok(None);
        }
    }
    Ok(Some(latents))
}

/// Whether a step's time is at or above the denoiser's first, compared in f32 as diffusers compares it.
fn takes(denoiser: &Denoiser<'_>, schedule: &Schedule, step: usize) -> bool {
    schedule.timesteps[step] >= (denoiser.from * f64::from(schedule.train_timesteps)) as f32
}

/// What the model is told of a step's time, `[1]`. Times of UniPC are whole numbers that the model gets as they are: in f64, so
/// that 1000 times the level is the time again.
fn level(schedule: &Schedule, step: usize, kind: Kind) -> Tensor {
    let time = Tensor::from_slice(&[schedule.timesteps[step]]);
    match schedule.solver {
        Solver::Euler => (time.to_kind(kind) / f64::from(schedule.train_timesteps)).to_kind(Kind::Float),
        Solver::UniPc(_) => time.to_kind(Kind::Double) / f64::from(schedule.train_timesteps),
    }
}

#[cfg(test)]
mod tests {
    use nn::transformer::{SharedBlock, State};

    use super::*;
    use crate::schedule::{Scheduler, Spacing};

    /// Predicts `x - c` (or `c`, for a condition of shape []), so that Euler's result is known in closed form.
    struct Linear;

    impl Transformer for Linear {
        fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
            let sigma = inputs.sigma.view([-1, 1]);
            let stream = vec![inputs.latents.shallow_clone(), inputs.conditions["c"].shallow_clone(), sigma];
            Ok(State { stream, shared: vec![], by_token: vec![], latent_size: vec![] })
        }

        fn blocks(&self) -> &[SharedBlock] {
            &[]
        }

        // For x = (1 - s) c + s e the velocity is (x - c) / s.
        fn head(&self, state: State) -> nn::Result<Tensor> {
            Ok((&state.stream[0] - &state.stream[1]) / &state.stream[2])
        }
    }

    fn conditions(value: f32) -> Conditions {
        Conditions::from([("c".to_owned(), Tensor::from(value))])
    }

    fn schedule(steps: usize) -> Schedule {
        let config = serde_json::json!({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0});
        Scheduler::from_config(&config).unwrap().schedule(steps, 64, Spacing::Even).unwrap()
    }

    fn run(negative: Option<(&Conditions, f64)>, stop_after: usize) -> Option<Vec<f32>> {
        let (negative, scale) = negative.unzip();
        run_with(&[Denoiser::new(&Linear, 0.0, scale.unwrap_or(1.0))], negative, stop_after)
    }

    fn run_with(denoisers: &[Denoiser<'_>], negative: Option<&Conditions>, stop_after: usize) -> Option<Vec<f32>> {
        let initial = Tensor::from_slice(&[-1f32, 0.5, 2.0]).view([3, 1]);
        let guidance = Guidance { positive: &conditions(0.25), negative, distilled: None };
        let mut on_step = |done, _| if done == stop_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let latents = sample(denoisers, &schedule(5), initial, &guidance, Kind::Float, &mut on_step).unwrap()?;
        Some(Vec::try_from(latents.view(-1)).unwrap())
    }

    #[test]
    fn a_straight_flow_ends_exactly_in_its_target() {
        for value in run(None, usize::MAX).unwrap() {
            assert!((value - 0.25).abs() < 1e-6, "{value}");
        }
    }

    #[test]
    fn true_guidance_extrapolates_from_the_negative_prompt() {
        // Velocities differ by (neg - pos) / s, so the flow ends in neg + scale (pos - neg).
        for value in run(Some((&conditions(1.25), 3.0)), usize::MAX).unwrap() {
            assert!((value - (1.25 - 3.0)).abs() < 1e-5, "{value}");
        }
    }

    /// Predicts what [`Linear`] does, and notes the levels that it is asked for.
    struct Noted(std::cell::RefCell<Vec<f32>>);

    impl Transformer for Noted {
        fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
            self.0.borrow_mut().push(inputs.sigma.double_value(&[0]) as f32);
            Linear.embed(inputs)
        }

        fn blocks(&self) -> &[SharedBlock] {
            &[]
        }

        fn head(&self, state: State) -> nn::Result<Tensor> {
            Linear.head(state)
        }
    }

    #[test]
    fn each_step_goes_through_the_denoiser_of_its_level_with_its_guidance() {
        let levels: Vec<f32> = schedule(5).timesteps.iter().map(|time| time / 1000.0).collect();
        let [high, low] = [0, 0].map(|_| Noted(std::cell::RefCell::default()));
        // The border itself belongs to the noisier one.
        let two = [Denoiser::new(&high, f64::from(levels[1]), 2.0), Denoiser::new(&low, 0.0, 3.0)];
        // Both steer away: what guides the last step decides where a straight flow ends.
        for value in run_with(&two, Some(&conditions(1.25)), usize::MAX).unwrap() {
            assert!((value - (1.25 - 3.0)).abs() < 1e-5, "{value}");
        }
        let twice = |levels: &[f32]| levels.iter().flat_map(|level| [*level; 2]).collect::<Vec<_>>();
        assert_eq!((high.0.borrow().clone(), low.0.borrow().clone()), (twice(&levels[..2]), twice(&levels[2..])));
    }

    #[test]
    fn whole_times_reach_the_model_exactly() {
        let config = serde_json::json!({"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction",
            "use_flow_sigmas": true});
        let mut schedule = Scheduler::from_config(&config).unwrap().schedule(1, 64, Spacing::Trained).unwrap();
        for time in 0..1000 {
            schedule.timesteps[0] = time as f32;
            let told = (level(&schedule, 0, Kind::Float) * 1000.0).to_kind(Kind::Float).double_value(&[0]);
            assert_eq!(told, f64::from(time));
        }
    }

    #[test]
    fn a_break_stops_the_run() {
        assert_eq!(run(None, 2), None);
    }
}

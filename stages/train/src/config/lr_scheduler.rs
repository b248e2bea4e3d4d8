//! `lr_scheduler`: learning rate and weight decay as functions of the step.
//!
//! Formulas are those of NeMo Automodel's `OptimizerParamScheduler` (from Megatron-LM): linear warm-up, then a decay that
//! reaches `min_lr` at `lr_decay_steps`. Step `k` (from 0) is taken with the rate at `k`. No block: a constant rate.

use std::f64::consts::PI;

use serde::Serialize;
use serde_json::json;
use spec::Problem;

use super::optimizer::Optimizer;
use super::reader::Block;

/// The block as written; `None` is derived from the run by `Rates::new`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LrScheduler {
    pub(crate) style: Decay,
    pub(crate) warmup_steps: Option<u64>,
    pub(crate) decay_steps: Option<u64>,
    pub(crate) init_lr: Option<f64>,
    pub(crate) max_lr: Option<f64>,
    pub(crate) min_lr: Option<f64>,
    pub(crate) start_wd: Option<f64>,
    pub(crate) end_wd: Option<f64>,
    pub(crate) wd_incr_steps: Option<u64>,
    pub(crate) wd_style: Ramp,
}

/// Shape of the decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Decay {
    Constant,
    Linear,
    Cosine,
    InverseSquareRoot,
    /// Warm-up, stable, decay: the rate falls over the last `steps` steps only.
    Wsd {
        steps: u64,
        anneal: Anneal,
    },
}

/// Shape of the last part of [`Decay::Wsd`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Anneal {
    Linear,
    Cosine,
    Exponential,
    MinusSqrt,
}

/// How weight decay goes from its start to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ramp {
    Constant,
    Linear,
    Cosine,
}

impl LrScheduler {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let anneal = block.name("lr_wsd_decay_style", &["linear", "cosine", "exponential", "minus_sqrt"]);
        let wsd_steps = block.positive("wsd_decay_steps");
        let styles = ["constant", "linear", "cosine", "inverse-square-root", "WSD"];
        let style = match block.name("lr_decay_style", &styles) {
            Some("constant") => Decay::Constant,
            Some("linear") => Decay::Linear,
            Some("inverse-square-root") => Decay::InverseSquareRoot,
            Some("WSD") => {
                if wsd_steps.is_none() {
                    block.problem("wsd_decay_steps", Problem::new("`lr_decay_style: WSD` needs `wsd_decay_steps`"));
                }
                let anneal = match anneal {
                    Some("cosine") => Anneal::Cosine,
                    Some("exponential") => Anneal::Exponential,
                    Some("minus_sqrt") => Anneal::MinusSqrt,
                    _ => Anneal::Linear,
                };
                Decay::Wsd { steps: wsd_steps.unwrap_or(1), anneal }
            }
            _ => Decay::Cosine,
        };
        let wd_style = match block.name("wd_incr_style", &["constant", "linear", "cosine"]) {
            Some("linear") => Ramp::Linear,
            Some("cosine") => Ramp::Cosine,
            _ => Ramp::Constant,
        };
        let scheduler = Self {
            style,
            warmup_steps: block.count("lr_warmup_steps"),
            decay_steps: block.positive("lr_decay_steps"),
            init_lr: block.number("init_lr"),
            max_lr: block.number("max_lr"),
            min_lr: block.number("min_lr"),
            start_wd: block.number("start_wd"),
            end_wd: block.number("end_wd"),
            wd_incr_steps: block.positive("wd_incr_steps"),
            wd_style,
        };
        if wd_style == Ramp::Constant && scheduler.start_wd != scheduler.end_wd {
            block.problem("end_wd", Problem::new("`start_wd` and `end_wd` differ, but `wd_incr_style` is `constant`"));
        }
        let derived = "the schedule is a function of the step, so nothing is restored";
        block.without_effect("use_checkpoint_opt_param_scheduler", &[json!(true)], derived);
        block.without_effect("override_opt_param_scheduler", &[json!(false)], derived);
        block.finish();
        scheduler
    }

    /// Mistakes that only show against the optimizer's numbers.
    pub(crate) fn ranges(&self, optimizer: &Optimizer) -> Option<(&'static str, Problem)> {
        let max = self.max_lr.unwrap_or(optimizer.lr);
        let (init, min) = (self.init_lr.unwrap_or(max * 0.1), self.min_lr.unwrap_or(max * 0.01));
        let problem = |key, text: String| Some((key, Problem::new(text)));
        if min < 0.0 || min > max {
            return problem("min_lr", format!("`lr_scheduler.min_lr` is {min}, expected 0 to the highest rate {max}"));
        }
        if init < 0.0 || init > max {
            return problem(
                "init_lr",
                format!("`lr_scheduler.init_lr` is {init}, expected 0 to the highest rate {max}"),
            );
        }
        None
    }
}

/// The schedule of a run of known length.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rates {
    style: Decay,
    warmup: u64,
    decay: u64,
    init_lr: f64,
    max_lr: f64,
    min_lr: f64,
    wd: (f64, f64),
    wd_steps: u64,
    wd_style: Ramp,
}

impl Rates {
    /// Fills in what the block leaves out, for a run of `total` steps.
    pub(crate) fn new(block: Option<&LrScheduler>, optimizer: &Optimizer, total: u64) -> Self {
        let Optimizer { lr, weight_decay, .. } = *optimizer;
        let Some(block) = block else {
            return Self {
                style: Decay::Constant,
                warmup: 0,
                decay: total.max(1),
                init_lr: lr,
                max_lr: lr,
                min_lr: lr,
                wd: (weight_decay, weight_decay),
                wd_steps: total,
                wd_style: Ramp::Constant,
            };
        };
        Self {
            style: block.style,
            warmup: block.warmup_steps.unwrap_or((total / 10).min(1000)),
            decay: block.decay_steps.unwrap_or(total).max(1),
            init_lr: block.init_lr.unwrap_or(lr * 0.1),
            max_lr: block.max_lr.unwrap_or(lr),
            min_lr: block.min_lr.unwrap_or(lr * 0.01),
            wd: (block.start_wd.unwrap_or(weight_decay), block.end_wd.unwrap_or(weight_decay)),
            wd_steps: block.wd_incr_steps.unwrap_or(total).max(1),
            wd_style: block.wd_style,
        }
    }

    /// Steps of warm-up.
    pub(crate) fn warmup(&self) -> u64 {
        self.warmup
    }

    /// Learning rate of step `step`.
    pub(crate) fn lr(&self, step: u64) -> f64 {
        if self.warmup > 0 && step <= self.warmup {
            return self.init_lr + (self.max_lr - self.init_lr) * step as f64 / self.warmup as f64;
        }
        let fall = |part: f64| self.min_lr + part * (self.max_lr - self.min_lr);
        if self.style == Decay::Constant {
            return self.max_lr;
        }
        if step > self.decay {
            return self.min_lr;
        }
        let progress = (step - self.warmup) as f64 / (self.decay - self.warmup).max(1) as f64;
        match self.style {
            Decay::Constant => self.max_lr,
            Decay::Linear => fall(1.0 - progress),
            Decay::Cosine => fall(half_cosine(progress)),
            Decay::InverseSquareRoot => {
                let (warmup, step) = (self.warmup.max(1) as f64, step.max(1) as f64);
                (self.max_lr * warmup.sqrt() / step.sqrt()).max(self.min_lr)
            }
            Decay::Wsd { steps, anneal } => {
                let start = self.decay.saturating_sub(steps);
                let progress = step.saturating_sub(start) as f64 / steps as f64;
                fall(match anneal {
                    _ if step <= start => 1.0,
                    Anneal::Linear => 1.0 - progress,
                    Anneal::Cosine => half_cosine(progress),
                    Anneal::Exponential => 2.0 * 0.5f64.powf(progress) - 1.0,
                    Anneal::MinusSqrt => 1.0 - progress.sqrt(),
                })
            }
        }
    }

    /// Weight decay of step `step`.
    pub(crate) fn weight_decay(&self, step: u64) -> f64 {
        let (start, end) = self.wd;
        if step > self.wd_steps {
            return end;
        }
        let progress = step as f64 / self.wd_steps.max(1) as f64;
        match self.wd_style {
            Ramp::Constant => end,
            Ramp::Linear => start + (end - start) * progress,
            Ramp::Cosine => start + (end - start) * half_cosine(1.0 - progress),
        }
    }
}

/// 1 at 0, 0 at 1.
fn half_cosine(progress: f64) -> f64 {
    0.5 * ((PI * progress).cos() + 1.0)
}

#[cfg(test)]
mod tests {
    use nn::optim::Keeping;

    use super::*;
    use crate::config::State;
    use crate::config::lr_golden::{GOLDEN_LR, GOLDEN_WD};

    const ADAMW: Optimizer = Optimizer {
        lr: 1e-3,
        weight_decay: 0.01,
        betas: (0.9, 0.999),
        eps: 1e-8,
        state: State { exp_avg: Keeping::Float32, exp_avg_sq: Keeping::Float32 },
    };

    fn block(style: Decay) -> LrScheduler {
        LrScheduler {
            style,
            warmup_steps: Some(10),
            decay_steps: Some(100),
            init_lr: Some(1e-4),
            max_lr: None,
            min_lr: Some(1e-5),
            start_wd: Some(0.0),
            end_wd: Some(0.1),
            wd_incr_steps: Some(50),
            wd_style: Ramp::Linear,
        }
    }

    // Values printed by the peer's OptimizerParamScheduler (nemo-automodel 0.7.0) for the same arguments, at these steps.
    const STEPS: [u64; 7] = [0, 5, 10, 30, 70, 100, 101];

    #[test]
    fn rates_equal_the_peers() {
        for (style, expected) in GOLDEN_LR {
            let rates = Rates::new(Some(&block(style)), &ADAMW, 100);
            for (step, expected) in STEPS.into_iter().zip(expected) {
                assert!(
                    (rates.lr(step) - expected).abs() < 1e-15,
                    "{style:?} at {step}: {} {expected}",
                    rates.lr(step)
                );
            }
        }
        for (style, expected) in GOLDEN_WD {
            let rates = Rates::new(Some(&LrScheduler { wd_style: style, ..block(Decay::Linear) }), &ADAMW, 100);
            for (step, expected) in STEPS.into_iter().zip(expected) {
                assert!((rates.weight_decay(step) - expected).abs() < 1e-15, "{style:?} at {step}");
            }
        }
    }

    #[test]
    fn without_a_block_the_rate_is_constant() {
        let rates = Rates::new(None, &ADAMW, 100);
        assert_eq!((rates.lr(0), rates.lr(99), rates.weight_decay(50)), (1e-3, 1e-3, 0.01));
    }

    #[test]
    fn defaults_come_from_the_run() {
        let open = LrScheduler {
            warmup_steps: None,
            decay_steps: None,
            init_lr: None,
            min_lr: None,
            start_wd: None,
            end_wd: None,
            wd_incr_steps: None,
            wd_style: Ramp::Constant,
            ..block(Decay::Cosine)
        };
        let rates = Rates::new(Some(&open), &ADAMW, 200);
        assert_eq!((rates.warmup(), rates.lr(0), rates.lr(20)), (20, 1e-4, 1e-3));
        assert!((rates.lr(200) - 1e-5).abs() < 1e-12);
    }

    #[test]
    fn a_warm_up_longer_than_the_run_only_rises() {
        let long = LrScheduler { warmup_steps: Some(100), decay_steps: None, ..block(Decay::Cosine) };
        let rates = Rates::new(Some(&long), &ADAMW, 20);
        assert!((0..19).all(|step| rates.lr(step) < rates.lr(step + 1)));
    }
}

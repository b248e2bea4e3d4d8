//! UniPC (Zhao et al. 2023, "UniPC: a unified predictor-corrector framework"): a multistep solver that corrects each step
//! with the prediction made after it.
//!
//! Mirrors `UniPCMultistepScheduler` of diffusers 0.42 for flow models: data prediction, B(h) = e^h - 1, the levels of
//! `set_timesteps(n)`. Coefficients are f32 in the reference's order of operations. Options with other formulas are refused.

use serde::Deserialize;
use serde_json::Value;
use tch::Tensor;

use crate::error::{Error, Result};
use crate::schedule::{Schedule, Solver, linspace};

/// The scheduler's configuration, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct UniPc {
    config: Config,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "the file's own fields")]
struct Config {
    num_train_timesteps: u32,
    solver_order: usize,
    prediction_type: String,
    thresholding: bool,
    predict_x0: bool,
    solver_type: String,
    lower_order_final: bool,
    disable_corrector: Vec<usize>,
    solver_p: Option<Value>,
    use_karras_sigmas: bool,
    use_exponential_sigmas: bool,
    use_beta_sigmas: bool,
    use_flow_sigmas: bool,
    flow_shift: f64,
    final_sigmas_type: FinalSigma,
    use_dynamic_shifting: bool,
    shift_terminal: Option<f64>,
}

/// Defaults of the class in diffusers.
impl Default for Config {
    fn default() -> Self {
        Self {
            num_train_timesteps: 1000,
            solver_order: 2,
            prediction_type: "epsilon".into(),
            thresholding: false,
            predict_x0: true,
            solver_type: "bh2".into(),
            lower_order_final: true,
            disable_corrector: Vec::new(),
            solver_p: None,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            use_flow_sigmas: false,
            flow_shift: 1.0,
            final_sigmas_type: FinalSigma::Zero,
            use_dynamic_shifting: false,
            shift_terminal: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FinalSigma {
    Zero,
    SigmaMin,
}

impl UniPc {
    /// Reads `scheduler_config.json`.
    pub(crate) fn from_config(json: &Value) -> Result<Self> {
        let config: Config =
            serde_json::from_value(json.clone()).map_err(|e| Error::SchedulerConfig { detail: e.to_string() })?;
        if config.prediction_type != "flow_prediction" || !config.use_flow_sigmas {
            let detail = "UniPC is supported for flow models: `prediction_type` must be \"flow_prediction\" and \
                          `use_flow_sigmas` true"
                .to_owned();
            return Err(Error::SchedulerConfig { detail });
        }
        let refused = [
            ("thresholding", config.thresholding),
            ("predict_x0", !config.predict_x0),
            ("solver_type", config.solver_type == "bh1"),
            ("lower_order_final", !config.lower_order_final),
            ("solver_p", config.solver_p.as_ref().is_some_and(|value| !value.is_null())),
            ("use_karras_sigmas", config.use_karras_sigmas),
            ("use_exponential_sigmas", config.use_exponential_sigmas),
            ("use_beta_sigmas", config.use_beta_sigmas),
            ("use_dynamic_shifting", config.use_dynamic_shifting),
        ];
        if let Some((option, _)) = refused.into_iter().find(|(_, on)| *on) {
            return Err(Error::SchedulerOption { option });
        }
        if !(1..=3).contains(&config.solver_order) {
            let value = config.solver_order as f64;
            return Err(Error::OutOfRange { name: "solver_order", value, expected: "1, 2 or 3" });
        }
        Ok(Self { config })
    }

    /// Levels for `steps` steps.
    pub(crate) fn schedule(&self, steps: usize) -> Schedule {
        let Config { flow_shift: shift, num_train_timesteps: train, .. } = self.config;
        let mut sigmas: Vec<f64> = linspace(1.0, 1.0 / f64::from(train), steps + 1).take(steps).collect();
        for sigma in &mut sigmas {
            *sigma = shift * *sigma / (1.0 + (shift - 1.0) * *sigma);
        }
        if let Some(terminal) = self.config.shift_terminal.filter(|t| *t != 0.0) {
            let scale = (1.0 - sigmas[steps - 1]) / (1.0 - terminal);
            for sigma in &mut sigmas {
                *sigma = 1.0 - (1.0 - *sigma) / scale;
            }
        }
        // At 1 the signal's logarithm would be infinite.
        if (sigmas[0] - 1.0).abs() < 1e-6 {
            sigmas[0] -= 1e-6;
        }
        let timesteps = sigmas.iter().map(|sigma| (sigma * f64::from(train)).trunc() as f32).collect();
        let last = if self.config.final_sigmas_type == FinalSigma::Zero { 0.0 } else { sigmas[steps - 1] };
        sigmas.push(last);
        Schedule {
            sigmas: sigmas.into_iter().map(|sigma| sigma as f32).collect(),
            timesteps,
            train_timesteps: train as f32,
            solver: Solver::UniPc(Rule {
                order: self.config.solver_order,
                uncorrected: self.config.disable_corrector.clone(),
            }),
        }
    }
}

/// What the steps depend on beside the levels.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub(crate) order: usize,
    /// Steps whose result is not corrected.
    pub(crate) uncorrected: Vec<usize>,
}

/// A run in progress.
pub(crate) struct Run<'a> {
    rule: &'a Rule,
    sigmas: &'a [f32],
    /// Clean latents predicted so far, newest last, no more than the order needs.
    clean: Vec<Tensor>,
    /// Latents before the last step, and the order of that step.
    last: Option<(Tensor, usize)>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(rule: &'a Rule, sigmas: &'a [f32]) -> Self {
        Self { rule, sigmas, clean: Vec::new(), last: None }
    }

    /// Latents after step `step`, from what the model says about `latents`.
    pub(crate) fn step(&mut self, step: usize, velocity: &Tensor, latents: Tensor) -> Tensor {
        // A scalar tensor, so that the product is rounded to the kind of the prediction.
        let clean = &latents - velocity * Tensor::from(self.sigmas[step]);
        let latents = match self.last.take() {
            Some((before, order)) if !self.rule.uncorrected.contains(&(step - 1)) => {
                self.advance([step - 1, step], order, &before, Some(&clean))
            }
            _ => latents,
        };
        self.clean.push(clean);
        if self.clean.len() > self.rule.order {
            drop(self.clean.remove(0));
        }
        let left = self.sigmas.len() - 1 - step;
        let order = self.rule.order.min(left).min(step + 1);
        let next = self.advance([step, step + 1], order, &latents, None);
        self.last = Some((latents, order));
        next
    }

    /// From level `from` to level `to` with the `order` newest predictions, and, to correct a step, with that at its end.
    fn advance(&self, [from, to]: [usize; 2], order: usize, x: &Tensor, end: Option<&Tensor>) -> Tensor {
        let lambda = |i: usize| (1.0 - self.sigmas[i]).ln() - self.sigmas[i].ln();
        let (sigma_to, sigma_from, alpha) = (self.sigmas[to], self.sigmas[from], 1.0 - self.sigmas[to]);
        let h = lambda(to) - lambda(from);
        let newest = &self.clean[self.clean.len() - 1];

        let (mut ratios, mut slopes) = (Vec::new(), Vec::new());
        for i in 1..order {
            let ratio = (lambda(from - i) - lambda(from)) / h;
            ratios.push(ratio);
            slopes.push((&self.clean[self.clean.len() - 1 - i] - newest) / f64::from(ratio));
        }
        ratios.push(1.0);

        let growth = (-h).exp_m1();
        let (matrix, right) = conditions(&ratios, -h, growth);
        let residual = match end {
            None if order <= 2 => slopes.first().map(|slope| slope * 0.5),
            None => weighted(&solve(&matrix, &right, order - 1), &slopes),
            Some(end) => {
                let weights = if order == 1 { vec![0.5] } else { solve(&matrix, &right, order) };
                let mut slopes = slopes;
                slopes.push(end - newest);
                weighted(&weights, &slopes)
            }
        };
        let linear = x * f64::from(sigma_to / sigma_from) - newest * f64::from(alpha * growth);
        match residual {
            Some(residual) => linear - residual * f64::from(alpha * growth),
            None => linear,
        }
    }
}

/// The order conditions: row `i` holds the ratios to the power `i`, and the right side its moment.
fn conditions(ratios: &[f32], h: f32, growth: f32) -> (Vec<Vec<f32>>, Vec<f32>) {
    let (mut matrix, mut right, mut moment, mut factorial) = (Vec::new(), Vec::new(), growth / h - 1.0, 1.0);
    for i in 1..=ratios.len() {
        matrix.push(ratios.iter().map(|ratio| ratio.powi(i as i32 - 1)).collect());
        right.push(moment * factorial / growth);
        factorial *= (i + 1) as f32;
        moment = moment / h - 1.0 / factorial;
    }
    (matrix, right)
}

/// The leading `n` equations by elimination with row exchange.
fn solve(matrix: &[Vec<f32>], right: &[f32], n: usize) -> Vec<f32> {
    let mut rows: Vec<Vec<f32>> = (0..n).map(|i| matrix[i][..n].iter().copied().chain([right[i]]).collect()).collect();
    for column in 0..n {
        let pivot = (column..n).max_by(|a, b| rows[*a][column].abs().total_cmp(&rows[*b][column].abs()));
        rows.swap(column, pivot.unwrap_or(column));
        for below in column + 1..n {
            let factor = rows[below][column] / rows[column][column];
            let (above, rest) = rows.split_at_mut(below);
            for (value, pivot) in rest[0][column..].iter_mut().zip(&above[column][column..]) {
                *value -= factor * pivot;
            }
        }
    }
    let mut solution = vec![0.0; n];
    for row in (0..n).rev() {
        let known: f32 = (row + 1..n).map(|k| rows[row][k] * solution[k]).sum();
        solution[row] = (rows[row][n] - known) / rows[row][row];
    }
    solution
}

fn weighted(weights: &[f32], slopes: &[Tensor]) -> Option<Tensor> {
    weights.iter().zip(slopes).map(|(weight, slope)| slope * f64::from(*weight)).reduce(|a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equations_are_solved_whatever_their_order() {
        let matrix = [vec![0.0, 2.0, 1.0], vec![1.0, 1.0, 0.0], vec![2.0, 0.0, 4.0]];
        assert_eq!(solve(&matrix, &[7.0, 3.0, 14.0], 3), [1.0, 2.0, 3.0]);
    }

    fn run(steps: usize, options: &Value, velocity: impl Fn(&Tensor, f32) -> Tensor) -> Vec<f32> {
        let mut config =
            serde_json::json!({"prediction_type": "flow_prediction", "use_flow_sigmas": true, "flow_shift": 3.0});
        config.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        let schedule = UniPc::from_config(&config).unwrap().schedule(steps);
        let Solver::UniPc(rule) = &schedule.solver else { unreachable!() };
        let mut run = Run::new(rule, &schedule.sigmas);
        let mut x = Tensor::from_slice(&[1.5f32, -0.25, 0.75, -2.0]);
        for step in 0..steps {
            x = run.step(step, &velocity(&x, schedule.sigmas[step]), x);
        }
        Vec::try_from(x).unwrap()
    }

    // Expected: scheduler.step over the same velocities, sin(2 x) + sigma x.
    #[test]
    fn runs_end_where_those_of_diffusers_end() {
        for (steps, options, expected) in [
            (1, serde_json::json!({}), [-0.14111674f32, 0.4794246, -0.99749243, -0.7568058]),
            (50, serde_json::json!({}), [0.2638848, -0.020904735, 0.07129668, -1.0498481]),
            (6, serde_json::json!({"solver_order": 3}), [0.12827545, -0.005858708, 0.021300614, -1.0579529]),
            (8, serde_json::json!({"disable_corrector": [0, 3]}), [0.18461087, -0.0138417445, 0.047288276, -1.0501146]),
            (
                5,
                serde_json::json!({"final_sigmas_type": "sigma_min", "shift_terminal": 0.05}),
                [0.30784896, -0.0655805, 0.20974496, -1.1149765],
            ),
        ] {
            let ours = run(steps, &options, |x, sigma| (x * 2.0).sin() + x * f64::from(sigma));
            for (a, b) in ours.iter().zip(expected) {
                assert!((a - b).abs() < 2e-6, "{steps} {options}: {ours:?}");
            }
        }
    }

    #[test]
    fn a_straight_flow_ends_exactly_in_its_target_at_every_order() {
        for order in 1..=3 {
            let options = serde_json::json!({"solver_order": order});
            for value in run(7, &options, |x, sigma| (x - 0.25) / f64::from(sigma)) {
                assert!((value - 0.25).abs() < 1e-6, "{order}: {value}");
            }
        }
    }

    #[test]
    fn options_with_another_formula_are_refused_by_name() {
        let flow = serde_json::json!({"prediction_type": "flow_prediction", "use_flow_sigmas": true});
        let bh1 = Value::from("bh1");
        for (option, value) in [("thresholding", true.into()), ("predict_x0", false.into()), ("solver_type", bh1)] {
            let mut config = flow.clone();
            config[option] = value;
            let error = UniPc::from_config(&config).unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
        let error = UniPc::from_config(&serde_json::json!({})).unwrap_err().to_string();
        assert!(error.contains("flow_prediction"), "{error}");
    }
}

//! One optimizer step: gradients of the mean loss over the global batch, however it is split, then AdamW.

use std::collections::{BTreeMap, VecDeque};

use diffusion::flow;
use nn::Conditions;
use parallel::{Action, Flight, Pass};
use spec::Problem;
use spec::mesh::Axis;
use stage::{Exit, Failure};
use tch::{Kind, Tensor};

use crate::batch::{Batch, Draw};
use crate::between_ranks;
use crate::config::{Config, Rates};
use crate::experts::Expert;
use crate::plan::Item;
use crate::prefetch::{Amount, Start};
use crate::session::Session;

/// What a step did.
pub(crate) struct Stepped {
    /// Mean of the samples' weighted losses.
    pub(crate) loss: f64,
    pub(crate) lr: f64,
    /// Before clipping.
    pub(crate) grad_norm: f64,
    pub(crate) samples: Vec<Seen>,
}

/// One sample of a step.
pub(crate) struct Seen {
    pub(crate) sample: usize,
    pub(crate) draw: Draw,
    /// Weighted.
    pub(crate) loss: f32,
}

/// Gathers the gradients of one step, micro-batch by micro-batch.
pub(crate) struct Accumulation<'s> {
    session: &'s mut Session,
    start: Start,
    /// One for each expert that this rank holds.
    passages: Vec<Passage>,
    /// Experts whose gradients are complete.
    finished: usize,
}

/// The micro-batches of one expert.
struct Passage {
    /// What is left to do, in order.
    actions: VecDeque<Action>,
    /// Micro-batches added.
    added: usize,
    /// Those that have not gone forward everywhere on this rank, by number.
    given: BTreeMap<usize, Given>,
    /// Forward done, backward not; by chunk and number.
    under_way: BTreeMap<(usize, usize), UnderWay>,
    losses: Vec<Tensor>,
}

/// A micro-batch before its last forward on this rank.
struct Given {
    drawn: Drawn,
    conditions: Conditions,
    masks: Vec<u64>,
    stands_in: bool,
}

/// A micro-batch between forward and backward.
struct UnderWay {
    flight: Flight,
    /// Its part of the step's loss, where the prediction is.
    loss: Option<Tensor>,
    /// Keys of the adapter's dropout masks.
    masks: Vec<u64>,
}

impl<'s> Accumulation<'s> {
    pub(crate) fn begin(session: &'s mut Session, start: Start) -> Result<Self, Failure> {
        for expert in &session.experts {
            expert.optimizer.clear_gradients().map_err(Failure::from_diagnostic)?;
        }
        let passage = |(expert, amount): (&Expert, &Amount)| Passage {
            actions: expert.spread.begin(amount.batches).into(),
            added: 0,
            given: BTreeMap::new(),
            under_way: BTreeMap::new(),
            losses: Vec::new(),
        };
        let passages = session.experts.iter().zip(&start.work).map(passage).collect();
        Ok(Self { session, start, passages, finished: 0 })
    }

    /// Adds the gradients of `batch`, now or with a later one: those of the sum of its losses over the size of the *global* batch.
    pub(crate) fn add(&mut self, batch: Batch) -> Result<(), Failure> {
        self.finish_experts(batch.expert)?;
        let drawn = Drawn::of(self.session, &batch)?;
        let Batch { draws, conditions, stands_in, expert: number, .. } = batch;
        let masks = draws.iter().map(|draw| draw.mask).collect();
        let passage = &mut self.passages[number];
        passage.given.insert(passage.added, Given { drawn, conditions, masks, stands_in });
        passage.added += 1;
        let added = passage.added;
        while let Some(action) = self.passages[number].actions.pop_front_if(|action| action.batch < added) {
            match action.pass {
                Pass::Forward => self.forward(number, action)?,
                Pass::Backward => self.bring_back(number, action)?,
            }
        }
        self.session.experts[number].parameters.set_dropout_keys(None);
        Ok(())
    }

    /// Runs a forward of an expert.
    fn forward(&mut self, number: usize, action: Action) -> Result<(), Failure> {
        let session = &*self.session;
        let (expert, passage) = (&session.experts[number], &mut self.passages[number]);
        let Given { drawn, conditions, masks, stands_in } = &passage.given[&action.batch];
        expert.parameters.set_dropout_keys(Some(masks));
        let (velocity, flight) = session.forward(expert, drawn.noisy(), &drawn.sigma, conditions, action)?;
        let losses = velocity.map(|velocity| drawn.losses(&velocity));
        // A stand-in only keeps step with the other ranks; ranks that each end up with a sample's loss count once together.
        let weight = if *stands_in { 0.0 } else { 1.0 / self.start.samples.len() as f64 };
        let weight = weight / session.team.redundancy() as f64;
        let loss = losses.as_ref().map(|losses| losses.sum(Kind::Float) * weight);
        passage.losses.extend(losses.filter(|_| !stands_in).map(|losses| losses.detach()));
        passage.under_way.insert((action.chunk, action.batch), UnderWay { flight, loss, masks: masks.clone() });
        if !passage.actions.iter().any(|later| later.pass == Pass::Forward && later.batch == action.batch) {
            passage.given.remove(&action.batch);
        }
        Ok(())
    }

    /// Runs a backward of an expert.
    fn bring_back(&mut self, number: usize, action: Action) -> Result<(), Failure> {
        let session = &*self.session;
        let expert = &session.experts[number];
        let gone = || Failure::new(Exit::Bug, Problem::new(format!("{action:?} comes before its forward")));
        let found = self.passages[number].under_way.remove(&(action.chunk, action.batch));
        let UnderWay { flight, loss, masks } = found.ok_or_else(gone)?;
        // A block that runs again drops what it dropped before.
        expert.parameters.set_dropout_keys(Some(&masks));
        if action.batch + 1 == self.start.work[number].batches {
            expert.spread.before_last_backward(action);
        }
        expert.spread.backward(flight, loss).map_err(|error| session.lost(error))
    }

    /// Completes the gradients of the experts before `number`: one after the other, so that a rank without a sample for one makes
    /// the same calls in the same order as those that have some.
    fn finish_experts(&mut self, number: usize) -> Result<(), Failure> {
        for expert in self.session.experts.get(self.finished..number).unwrap_or_default() {
            expert.spread.finish().map_err(between_ranks)?;
        }
        self.finished = self.finished.max(number);
        Ok(())
    }

    /// Checks every loss and the gradient norm, and moves the parameters. Nothing moves if a number is not finite.
    pub(crate) fn finish(
        mut self,
        step: u64,
        config: &Config,
        rates: &Rates,
        items: &[Item],
    ) -> Result<Stepped, Failure> {
        self.finish_experts(self.session.experts.len())?;
        let samples = self.seen()?;
        let loss = samples.iter().map(|seen| f64::from(seen.loss)).sum::<f64>() / samples.len() as f64;
        if !loss.is_finite() {
            let bad = samples.iter().filter(|seen| !seen.loss.is_finite());
            return Err(not_finite(&format!("the loss is not finite at step {step}"), bad, items));
        }
        let grad_norm = match self.clip(config.clip_grad_norm).map_err(between_ranks)? {
            Ok(norm) => norm,
            Err(what) => return Err(not_finite(&format!("{what}, at step {step}"), samples.iter(), items)),
        };
        let lr = rates.lr(step);
        for expert in &mut self.session.experts {
            expert.optimizer.set_weight_decay(rates.weight_decay(step));
            expert.optimizer.step(lr).map_err(Failure::from_diagnostic)?;
            if let (Some(ema), Some(settings)) = (&mut expert.ema, &config.ema) {
                ema.update(settings.decay).map_err(Failure::from_diagnostic)?;
            }
        }
        Ok(Stepped { loss, lr, grad_norm, samples })
    }

    /// Clips the gradients of each expert on its own, as runs of one expert would: they share no parameter, and one that diverges
    /// does not slow down the other. The norm of all gradients together before, or what of them is not finite, on every rank.
    fn clip(&self, max: Option<f64>) -> parallel::Result<Result<f64, String>> {
        let (mut squares, mut named) = (0.0, None);
        for expert in &self.session.experts {
            match expert.clip(max) {
                Ok(norm) => squares += norm * norm,
                Err(parallel::Error::Nn(error @ nn::Error::NonFinite { .. })) => {
                    squares = f64::NAN;
                    named = Some(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        let norm = self.session.team.sum_along(Axis::Ep, squares)?.sqrt();
        Ok(if norm.is_finite() {
            Ok(norm)
        } else {
            Err(named.unwrap_or_else(|| format!("the gradient norm is {norm}")))
        })
    }

    /// The samples of all ranks with their losses.
    fn seen(&self) -> Result<Vec<Seen>, Failure> {
        let mut own = Vec::new();
        for ((expert, pass), amount) in self.session.experts.iter().zip(&self.passages).zip(&self.start.work) {
            let mut of_expert = Vec::new();
            for losses in &pass.losses {
                let losses = Vec::<f32>::try_from(losses.to_device(tch::Device::Cpu));
                of_expert.extend(losses.map_err(|error| Failure::from_error(error).exit(Exit::Bug))?);
            }
            own.extend(expert.spread.last_stage(of_expert, amount.samples).map_err(between_ranks)?);
        }
        let Start { samples, shares, .. } = &self.start;
        let counts: Vec<usize> = shares.iter().map(Vec::len).collect();
        let losses = self.session.team.gather(&own, &counts).map_err(between_ranks)?;
        let of: BTreeMap<usize, f32> = shares.concat().into_iter().zip(losses.concat()).collect();
        let seen =
            samples.iter().map(|(sample, draw)| Some(Seen { sample: *sample, draw: *draw, loss: *of.get(sample)? }));
        let gap = || Failure::new(Exit::Bug, Problem::new("a sample of the step is in no rank's share"));
        seen.collect::<Option<_>>().ok_or_else(gap)
    }
}

/// Weighted loss of every sample: f32 `[B]`, on the device, with its graph.
pub(crate) fn sample_losses(session: &Session, batch: &Batch) -> Result<Tensor, Failure> {
    let drawn = Drawn::of(session, batch)?;
    let expert = &session.experts[batch.expert];
    Ok(drawn.losses(&session.velocity(expert, drawn.noisy(), &drawn.sigma, &batch.conditions)?))
}

/// A batch on the device.
struct Drawn {
    clean: Tensor,
    noise: Tensor,
    /// f32 `[B]`.
    sigma: Tensor,
    weight: Tensor,
}

impl Drawn {
    fn of(session: &Session, batch: &Batch) -> Result<Self, Failure> {
        let upload =
            |tensor: &Tensor| torch::host::upload_beside(tensor, session.device).map_err(Failure::from_diagnostic);
        let column = |value: fn(&Draw) -> f32| {
            let values: Vec<f32> = batch.draws.iter().map(value).collect();
            upload(&Tensor::from_slice(&values))
        };
        let (sigma, weight) = (column(|draw| draw.sigma)?, column(|draw| draw.weight)?);
        Ok(Self { clean: upload(&batch.clean)?, noise: upload(&batch.noise)?, sigma, weight })
    }

    fn noisy(&self) -> Tensor {
        flow::interpolate(&self.clean, &self.noise, &self.sigma)
    }

    fn losses(&self, velocity: &Tensor) -> Tensor {
        flow::sample_losses(velocity, &flow::target(&self.clean, &self.noise)) * &self.weight
    }
}

/// The end of a run whose numbers went wrong, naming the samples in question.
fn not_finite<'a>(what: &str, samples: impl Iterator<Item = &'a Seen>, items: &[Item]) -> Failure {
    const SHOWN: usize = 16;
    let names: Vec<String> =
        samples.map(|seen| format!("`{}` (sigma {:.4})", items[seen.sample].sample_id, seen.draw.sigma)).collect();
    let list = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = names.len().saturating_sub(SHOWN);
    let list = if more > 0 { format!("{list} and {more} more") } else { list };
    let help =
        "look at these samples, or lower `optimizer.lr`; the run goes on from its last checkpoint when started again";
    Failure::new(Exit::Numbers, Problem::new(format!("{what}; samples: {list}")).help(help))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use models::ModelFolder;
    use nn::Weights;
    use serde_json::{Value, json};
    use spec::Bucket;

    use super::*;
    use crate::config::load;

    /// Three optimizer steps of diffusers + torch on the same weights, noise and levels: losses, gradient norms, weights.
    /// The two samples go through one by one (each has its own guidance), so accumulation is held to the same reference.
    #[test]
    fn three_steps_equal_diffusers() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures/flux-tiny");
        let golden = Weights::file(&folder.join("golden.safetensors")).unwrap();
        let expected: Value = serde_json::from_slice(&fs_err::read(folder.join("golden.json")).unwrap()).unwrap();
        let tensor = |name: &str| golden.tensor(name).unwrap();
        let table = json!({
            "model": {"torch_dtype": "float32", "compute_dtype": "float32"},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
            "clip_grad_norm": {"max_norm": 1.0},
        });
        let Value::Object(table) = table else { unreachable!() };
        let config = load(None, table, Path::new("/")).unwrap().config;
        let mut session = Session::build(
            &config,
            ModelFolder::open(&folder).unwrap(),
            tch::Device::Cpu,
            parallel::Team::alone().unwrap(),
        )
        .unwrap();
        let rates = Rates::new(None, &config.optimizer, 3);
        let bucket = Bucket { width: 80, height: 48, frames: 1 };
        let items = ["a", "b"].map(|id| Item { sample_id: id.to_owned(), bucket });

        for step in 0..3 {
            let (noise, levels) =
                (tensor(&format!("optim/noise/{step}/latents")), tensor(&format!("optim/level/{step}")));
            let draw = |sample| Draw {
                sigma: levels.double_value(&[sample]) as f32,
                expert: 0,
                weight: 1.0,
                dropped: false,
                mask: 0,
            };
            let work = vec![Amount { batches: 2, samples: 2 }];
            let start = Start { samples: vec![(0, draw(0)), (1, draw(1))], shares: vec![vec![0, 1]], work };
            let mut accumulation = Accumulation::begin(&mut session, start).unwrap();
            for sample in 0..2 {
                let one = |all: &Tensor| all.narrow(0, sample, 1);
                accumulation.session.guidance = Some(tensor("transformer/in/guidance").double_value(&[sample]));
                let conditions = Conditions::from([
                    ("t5".to_owned(), one(&tensor("transformer/in/encoder_hidden_states"))),
                    ("clip_pooled".to_owned(), one(&tensor("transformer/in/pooled_projections"))),
                ]);
                let batch = Batch {
                    expert: 0,
                    draws: vec![draw(sample)],
                    clean: one(&tensor("transformer/clean/latents")),
                    noise: one(&noise),
                    conditions,
                    stands_in: false,
                };
                accumulation.add(batch).unwrap();
            }
            let stepped = accumulation.finish(step, &config, &rates, &items).unwrap();
            let number = |name: &str| expected[name][step as usize].as_f64().unwrap();
            let near =
                |ours: f64, theirs: f64| assert!((ours - theirs).abs() <= 1e-4 * theirs, "{step}: {ours} {theirs}");
            near(stepped.loss, number("optim/losses"));
            near(stepped.grad_norm, number("optim/grad_norms_before_clip"));
        }
        let mut compared = 0;
        for named in session.experts[0].trained() {
            let theirs = tensor(&format!("optim/after3/{}", named.name));
            let far = (&named.tensor - &theirs).norm().double_value(&[]) / theirs.norm().double_value(&[]);
            assert!(far < 1e-4, "{}: {far}", named.name);
            compared += 1;
        }
        assert_eq!(compared, golden.names().filter(|name| name.starts_with("optim/after3/")).count());
    }
}

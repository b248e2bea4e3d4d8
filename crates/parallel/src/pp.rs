//! Pipeline parallel: each rank has a run of the blocks, or several of them, its chunks. Streams go from rank to rank, and their
//! gradients back; what all blocks share is made by every rank itself from the samples, so nothing of it travels.
//!
//! The order of a rank's forwards and backwards is that of its [`schedule`](crate::schedule). Between two ranks letters arrive in
//! the order in which they were sent, which is not always that in which they are needed; every rank knows all schedules, so it
//! knows which comes next, and keeps what comes early.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use comm::{Group, Pending};
use nn::{Inputs, Recompute, SharedBlock, State, Transformer};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::fsdp::Model;
use crate::schedule::{Action, Letter, Pass, Schedule};
use crate::trouble::Trouble;

/// The ranks that have the other blocks.
#[derive(Debug)]
pub(crate) struct Pipeline {
    group: Arc<Group>,
    /// This rank's runs of blocks, among its own.
    chunks: Vec<Range<usize>>,
    mail: Mutex<Mail>,
    /// Sent, and perhaps not yet taken.
    sent: Mutex<VecDeque<(Pending, Tensor)>>,
    trouble: Trouble,
    /// Where what is received goes.
    device: Device,
}

/// What other ranks send this one.
#[derive(Debug)]
struct Mail {
    schedule: Schedule,
    /// By rank, in order.
    coming: Vec<VecDeque<Letter>>,
    /// Came before it was needed.
    early: BTreeMap<Letter, Vec<Tensor>>,
    /// What the gradients that come back are like.
    forms: BTreeMap<Letter, Vec<Form>>,
}

/// A micro-batch between its forward and its backward.
#[derive(Debug)]
pub struct Flight {
    /// Its forward.
    pub(crate) action: Action,
    /// What came from the rank before.
    received: Vec<Tensor>,
    /// What went to the next rank.
    sent: Vec<Tensor>,
}

impl Flight {
    /// Of a model that one rank has whole.
    pub(crate) fn of(action: Action) -> Self {
        Self { action, received: Vec::new(), sent: Vec::new() }
    }
}

/// Cuts `costs`, one for each block, into `stages` runs so that the dearest is as cheap as can be. Runs have a cost above 0;
/// `None` if there are not enough blocks for that.
pub(crate) fn cuts(costs: &[f64], stages: usize) -> Option<Vec<Range<usize>>> {
    let mut sums = vec![0.0];
    sums.extend(costs.iter().scan(0.0, |sum, cost| {
        *sum += cost;
        Some(*sum)
    }));
    // best[n] = (cost of the dearest run, where the last run begins) for the first n blocks.
    let mut best: Vec<Vec<Option<(f64, usize)>>> = vec![vec![None; costs.len() + 1]; stages + 1];
    best[0][0] = Some((0.0, 0));
    for stage in 1..=stages {
        for end in 1..=costs.len() {
            let from = |start: usize| {
                let (before, _) = best[stage - 1][start]?;
                let cost = sums[end] - sums[start];
                (cost > 0.0).then_some((before.max(cost), start))
            };
            best[stage][end] = (0..end).filter_map(from).min_by(|a, b| a.0.total_cmp(&b.0));
        }
    }
    let (mut runs, mut end) = (Vec::new(), costs.len());
    for stage in (1..=stages).rev() {
        let (_, start) = best[stage][end]?;
        runs.push(start..end);
        end = start;
    }
    runs.reverse();
    Some(runs)
}

impl Pipeline {
    /// Of the ranks of `group`, of which this one has the runs `chunks` of its own blocks.
    pub(crate) fn new(group: Arc<Group>, chunks: Vec<Range<usize>>, device: Device) -> Self {
        let mail = Mail::new(Schedule::new(group.size(), chunks.len(), 0), group.index());
        let (sent, trouble) = (Mutex::default(), Trouble::default());
        Self { group, chunks, mail: Mutex::new(mail), sent, trouble, device }
    }

    /// Begins a step of so many micro-batches: what this rank is to do.
    pub(crate) fn begin(&self, batches: usize) -> Vec<Action> {
        self.follow(Schedule::new(self.group.size(), self.chunks.len(), batches))
    }

    fn follow(&self, schedule: Schedule) -> Vec<Action> {
        let actions = schedule.of(self.group.index()).to_vec();
        *self.mail() = Mail::new(schedule, self.group.index());
        actions
    }

    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this rank has the last blocks.
    pub(crate) fn is_last(&self) -> bool {
        self.group.index() + 1 == self.group.size()
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        self.trouble.take()
    }

    /// Runs a chunk on a micro-batch: the prediction after the last run of blocks.
    pub(crate) fn forward(
        &self,
        model: &dyn Transformer,
        inputs: &Inputs,
        recompute: Recompute,
        action: Action,
    ) -> nn::Result<(Option<Tensor>, Flight)> {
        let layer = |error| self.trouble.layer(error);
        let mut state = model.embed(inputs)?;
        let mut flight = Flight::of(action);
        let mut mail = self.mail();
        if let Some(awaited) = mail.schedule.awaits(self.group.index(), action) {
            flight.received = self.take(&mut mail, awaited).map_err(layer)?;
            state.stream = flight.received.iter().map(Tensor::shallow_clone).collect();
        }
        model.advance(self.chunks[action.chunk].clone(), &mut state, recompute)?;
        let Some((after, letter)) = mail.schedule.sends(self.group.index(), action) else {
            return Ok((Some(model.head(state)?), flight));
        };
        self.send(&state.stream, after).map_err(layer)?;
        let forms = state.stream.iter().filter(|tensor| tensor.requires_grad()).map(Form::of);
        let back = Letter { pass: Pass::Backward, run: letter.run - 1, ..letter };
        mail.forms.insert(back, forms.collect::<Result<_>>().map_err(layer)?);
        flight.sent = state.stream;
        Ok((None, flight))
    }

    /// Brings a micro-batch back: from `loss` after the last run of blocks, elsewhere from the gradients that come.
    pub(crate) fn backward(&self, flight: Flight, loss: Option<Tensor>) -> Result<()> {
        let Flight { action, received, sent } = flight;
        let action = Action { pass: Pass::Backward, ..action };
        let mut mail = self.mail();
        match (loss, mail.schedule.awaits(self.group.index(), action)) {
            (Some(loss), _) => torch::autograd::backward(&[loss], &[], false)?,
            (None, Some(awaited)) => {
                let roots: Vec<Tensor> = sent.into_iter().filter(Tensor::requires_grad).collect();
                let gradients = self.take(&mut mail, awaited)?;
                // Nothing is trained up to here: nothing comes back.
                if !roots.is_empty() {
                    torch::autograd::backward(&roots, &gradients, false)?;
                }
            }
            (None, None) => return Err(Error::Unfit("a backward without a loss".to_owned())),
        }
        if let Some((before, _)) = mail.schedule.sends(self.group.index(), action) {
            for tensor in received.iter().filter(|tensor| tensor.requires_grad()) {
                let gradient = tensor.grad();
                let gradient = if gradient.defined() { gradient.f_contiguous()? } else { tensor.f_zeros_like()? };
                self.start(gradient, before)?;
            }
        }
        Ok(())
    }

    /// Waits for what was sent to be taken.
    pub(crate) fn settle(&self) -> Result<()> {
        let sent = std::mem::take(&mut *self.sent.lock().unwrap_or_else(PoisonError::into_inner));
        sent.into_iter().try_for_each(|(pending, _)| Ok(pending.wait()?))
    }

    /// The last rank's `tensor` on every rank.
    pub(crate) fn last(&self, tensor: Option<Tensor>) -> Result<Tensor> {
        let last = self.group.size() - 1;
        let form = match &tensor {
            Some(tensor) => Form::of(tensor)?.numbers(),
            None => Tensor::f_zeros([Form::NUMBERS], (Kind::Int64, Device::Cpu))?,
        };
        self.group.broadcast(&form, last)?.wait()?;
        let tensor = match tensor {
            Some(tensor) => tensor.f_detach()?.f_contiguous()?,
            None => Form::read(&form)?.empty(self.device)?,
        };
        self.group.broadcast(&tensor, last)?.wait()?;
        Ok(tensor)
    }

    /// The last rank's numbers on every rank, which brings as many of its own. They are the host's, wherever the model computes.
    pub(crate) fn last_numbers(&self, own: &[f32]) -> Result<Vec<f32>> {
        let numbers = Tensor::f_from_slice(own)?;
        self.group.broadcast(&numbers, self.group.size() - 1)?.wait()?;
        Ok(Vec::<f32>::try_from(numbers)?)
    }

    /// The tensors of a letter from a rank, now or earlier.
    fn take(&self, mail: &mut Mail, (from, letter): (usize, Letter)) -> Result<Vec<Tensor>> {
        if let Some(tensors) = mail.early.remove(&letter) {
            return Ok(tensors);
        }
        loop {
            let unknown = || Error::Unfit(format!("rank {from} of the pipeline sends no {letter:?}"));
            let next = mail.coming[from].pop_front().ok_or_else(unknown)?;
            let tensors = match next.pass {
                Pass::Forward => self.receive(from)?,
                Pass::Backward => {
                    let forms = mail.forms.remove(&next).ok_or_else(unknown)?;
                    let one = |form: &Form| {
                        let gradient = form.empty(self.device)?;
                        self.group.receive(&gradient, from)?.wait()?;
                        Ok(gradient)
                    };
                    forms.iter().map(one).collect::<Result<_>>()?
                }
            };
            if next == letter {
                return Ok(tensors);
            }
            mail.early.insert(next, tensors);
        }
    }

    fn start(&self, tensor: Tensor, to: usize) -> Result<()> {
        let pending = self.group.send(&tensor, to)?;
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).push_back((pending, tensor));
        Ok(())
    }

    /// Sends tensors that may be of any shapes: how many, what each is like, then each.
    fn send(&self, stream: &[Tensor], to: usize) -> Result<()> {
        self.start(Tensor::f_from_slice(&[stream.len() as i64])?, to)?;
        for tensor in stream {
            self.start(Form::of(tensor)?.numbers(), to)?;
            self.start(tensor.f_detach()?.f_contiguous()?, to)?;
        }
        Ok(())
    }

    fn receive(&self, from: usize) -> Result<Vec<Tensor>> {
        let take = |tensor: Tensor| -> Result<Tensor> {
            self.group.receive(&tensor, from)?.wait()?;
            Ok(tensor)
        };
        let numbers = |count: i64| Tensor::f_zeros([count], (Kind::Int64, Device::Cpu));
        let count = i64::try_from(take(numbers(1)?)?.f_get(0)?)?;
        let each = (0..count).map(|_| {
            let form = Form::read(&take(numbers(Form::NUMBERS)?)?)?;
            Ok(take(form.empty(self.device)?)?.f_set_requires_grad(form.requires_grad)?)
        });
        each.collect()
    }
}

impl Mail {
    /// What rank `own` gets when all do as `schedule` says.
    fn new(schedule: Schedule, own: usize) -> Self {
        let coming = (0..schedule.ranks()).map(|from| schedule.letters(from, own).collect()).collect();
        Self { schedule, coming, early: BTreeMap::new(), forms: BTreeMap::new() }
    }
}

/// What a tensor is like.
#[derive(Debug)]
struct Form {
    kind: Kind,
    requires_grad: bool,
    shape: Vec<i64>,
}

/// Kinds of activations.
const KINDS: [Kind; 4] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double];

impl Form {
    /// Kind, whether it needs a gradient, number of dims, and up to six of them.
    const NUMBERS: i64 = 9;

    fn of(tensor: &Tensor) -> Result<Self> {
        let (kind, shape) = (tensor.kind(), tensor.size());
        if !KINDS.contains(&kind) || shape.len() > 6 {
            return Err(Error::Unfit(format!("a stage cannot pass on {kind:?} {shape:?}")));
        }
        Ok(Self { kind, requires_grad: tensor.requires_grad(), shape })
    }

    fn numbers(&self) -> Tensor {
        let kind = KINDS.iter().position(|kind| *kind == self.kind).unwrap_or(0) as i64;
        let mut numbers = vec![kind, i64::from(self.requires_grad), self.shape.len() as i64];
        numbers.extend(&self.shape);
        numbers.resize(Self::NUMBERS as usize, 0);
        Tensor::from_slice(&numbers)
    }

    fn read(numbers: &Tensor) -> Result<Self> {
        let numbers = Vec::<i64>::try_from(numbers)?;
        let kind = KINDS.get(numbers[0] as usize).copied();
        let kind = kind.ok_or_else(|| Error::Unfit("a tensor of no known kind came".to_owned()))?;
        let shape = numbers[3..].iter().take(numbers[2] as usize).copied().collect();
        Ok(Self { kind, requires_grad: numbers[1] == 1, shape })
    }

    fn empty(&self, device: Device) -> Result<Tensor> {
        Ok(Tensor::f_empty(self.shape.as_slice(), (self.kind, device))?)
    }
}

/// The model with the blocks of one rank.
pub(crate) struct Stage {
    inner: Model,
    blocks: Vec<SharedBlock>,
}

impl Stage {
    /// With these runs, one after the other.
    pub(crate) fn new(inner: Model, runs: &[Range<usize>]) -> Self {
        let blocks = runs.iter().flat_map(|run| &inner.blocks()[run.clone()]).map(SharedBlock::clone).collect();
        Self { inner, blocks }
    }
}

impl Transformer for Stage {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
        self.inner.embed(inputs)
    }

    fn blocks(&self) -> &[SharedBlock] {
        &self.blocks
    }

    fn head(&self, state: State) -> nn::Result<Tensor> {
        self.inner.head(state)
    }
}

/// A stage that stands for the whole model: its prediction comes from the last rank, without a graph.
pub(crate) struct Piped {
    pub(crate) inner: Model,
    pub(crate) pipeline: Arc<Pipeline>,
}

impl Transformer for Piped {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
        self.inner.embed(inputs)
    }

    fn blocks(&self) -> &[SharedBlock] {
        self.inner.blocks()
    }

    fn head(&self, state: State) -> nn::Result<Tensor> {
        self.inner.head(state)
    }

    fn forward(&self, inputs: &Inputs, recompute: Recompute) -> nn::Result<Tensor> {
        let layer = |error| self.pipeline.trouble.layer(error);
        let ranks = self.pipeline.group.size();
        let actions = self.pipeline.follow(Schedule::forward(ranks, self.pipeline.chunks.len()));
        let mut prediction = None;
        for action in actions {
            let run = || self.pipeline.forward(self.inner.as_ref(), inputs, recompute, action);
            (prediction, _) = tch::no_grad(run)?;
        }
        self.pipeline.settle().map_err(layer)?;
        self.pipeline.last(prediction).map_err(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dearest_stage_is_as_cheap_as_can_be() {
        let even = [1.0; 6];
        assert_eq!(cuts(&even, 2), Some(vec![0..3, 3..6]));
        assert_eq!(cuts(&even, 4).unwrap().iter().map(Range::len).max(), Some(2));
        // Two blocks, a join without cost, three blocks.
        assert_eq!(cuts(&[1.0, 1.0, 0.0, 1.0, 1.0, 1.0], 5).map(|runs| runs.len()), Some(5));
        assert_eq!(cuts(&[4.0, 1.0, 1.0, 1.0, 1.0], 2), Some(vec![0..1, 1..5]));
        assert_eq!(cuts(&[1.0, 0.0], 2), None);
    }
}

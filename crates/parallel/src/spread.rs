//! The order in which techniques are applied to a model, and the one way in which a training step talks to them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use nn::{Builder, Inputs, Named, Parameters, Part, Recompute, Share, Transformer, block_of};
use spec::mesh::Axis;
use tch::{Device, Kind, Tensor};

use crate::ddp::{BUCKET_BYTES, Reducer};
use crate::error::{Error, Result};
use crate::fsdp::{self, Model, Options, Shards};
use crate::outline::Outline;
use crate::pp::{Flight, Piped, Pipeline, Stage};
use crate::schedule::{Action, Schedule};
use crate::team::Team;
use crate::tokens::Tokens;

/// What this rank is to have of a model, before it is built.
#[derive(Debug)]
pub struct Frame {
    outline: Outline,
    /// Runs of blocks; none if this rank has them all.
    chunks: Option<Vec<Range<usize>>>,
    tokens: Option<Arc<Tokens>>,
    part: Option<Part>,
    options: Options,
    /// Whether what is held lies in host memory.
    in_host_memory: bool,
}

impl Frame {
    /// This rank's share of the model that `outline` is of. All ranks must ask at the same point.
    pub fn new(team: &Team, outline: Outline) -> Result<Self> {
        let chunks = chunks(team, &outline, 1)?;
        Ok(Self {
            outline,
            chunks,
            tokens: Tokens::new(team)?,
            part: part(team)?,
            options: Options::default(),
            in_host_memory: false,
        })
    }

    /// With `count` runs of blocks on each rank of a pipeline, in place of one.
    pub fn interleaved(self, team: &Team, count: usize) -> Result<Self> {
        Ok(Self { chunks: chunks(team, &self.outline, count)?, ..self })
    }

    /// With other options of `fsdp`.
    #[must_use]
    pub fn with(self, options: Options) -> Self {
        Self { options, ..self }
    }

    /// What is held of the weights, with its gradients and optimizer state, lies in host memory, where the optimizer steps; blocks
    /// come to the device for each use, even on one rank. Adapters stay on the device.
    #[must_use]
    pub fn in_host_memory(self) -> Self {
        Self { part: self.part.or(Some(Part { index: 0, count: 1 })), in_host_memory: true, ..self }
    }

    /// Makes `builder` build no more than that; layers compute in `compute`.
    pub fn on(&self, team: &Team, mut builder: Builder, compute: Kind) -> Builder {
        if let Some(division) = self.tokens.as_ref().and_then(|tokens| tokens.division(team.mesh())) {
            builder = builder.divided(division);
        }
        if let Some(chunks) = &self.chunks {
            builder = builder.only(chunks.iter().flat_map(|run| self.outline.paths(run.clone())).collect());
        }
        match self.part {
            Some(part) if self.in_host_memory => builder.split(part, compute).held_in_host_memory(),
            Some(part) => builder.split(part, compute),
            None => builder,
        }
    }

    /// Spreads the model that was built so.
    pub fn spread(self, team: &Team, mut model: Model, parameters: &Parameters) -> Result<(Model, Spread)> {
        let (mut shards, mut pipeline) = (None, None);
        if let Some(tokens) = &self.tokens {
            model = tokens.apply(model);
        }
        if let Some(chunks) = &self.chunks {
            model = Box::new(Stage::new(model, chunks));
        }
        let all = 0..model.blocks().len();
        let runs = self.chunks.as_deref().map_or_else(|| vec![all], end_to_end);
        if self.part.is_some() {
            let (sharded, held) = fsdp::apply(model, parameters, team.along(&FSDP)?, self.options, &runs)?;
            (model, shards) = (sharded, Some(held));
        }
        let (stage, stages) = team.place(Axis::Pp);
        if stages > 1 {
            let piped = Arc::new(Pipeline::new(team.along(&[Axis::Pp])?, runs, team.device()));
            model = Box::new(Piped { inner: model, pipeline: Arc::clone(&piped) });
            pipeline = Some(piped);
        }
        let trained_in_parts = shards.is_some() && parameters.adapter_spec().is_none();
        let mut held: BTreeMap<String, Held> = BTreeMap::new();
        // Group of ranks → what they hold alike. Every rank makes its groups in the order of their ranks.
        let mut alike: BTreeMap<Vec<usize>, Vec<Named>> = BTreeMap::new();
        for named in parameters.trainable() {
            let share = parameters.shares.get(&named.name).cloned();
            let share = share.ok_or_else(|| Error::Unfit(format!("nothing is known about `{}`", named.name)))?;
            let axes = copied(&named.name, &share, trained_in_parts);
            let first = axes.iter().all(|axis| team.place(*axis).0 == 0);
            held.insert(named.name.clone(), Held { share, first });
            alike.entry(team.ranks(&axes)).or_default().push(named);
        }
        let mut copies = Vec::new();
        for (ranks, named) in alike {
            let reducer = Reducer::new(team.group(&ranks)?, &named, BUCKET_BYTES, self.options.reduce)?;
            // Stages come to the end of their backwards one after the other: what they share waits for all of them.
            let staged = ranks.iter().any(|rank| team.mesh().coordinates(*rank)[Axis::Pp as usize] != stage);
            copies.push(Copies { reducer, early: !trained_in_parts && !staged });
        }
        let in_part = |held: &Held| held.share != Share::whole(held.share.whole_shape());
        let divided = pipeline.is_some() || held.values().any(in_part);
        let leads = Axis::ALL.into_iter().filter(|axis| *axis != Axis::Pp).all(|axis| team.place(axis).0 == 0);
        let Self { outline, tokens, .. } = self;
        let spread = Spread { outline, pipeline, tokens, shards, copies, held, trained_in_parts, divided, leads };
        Ok((model, spread))
    }
}

/// This rank's runs of blocks in a pipeline, `count` of them; none if it has all blocks.
fn chunks(team: &Team, outline: &Outline, count: usize) -> Result<Option<Vec<Range<usize>>>> {
    let (place, stages) = team.place(Axis::Pp);
    if stages == 1 {
        return Ok(None);
    }
    outline.runs(place, stages, count).map(Some)
}

/// The same runs without what is between them.
fn end_to_end(runs: &[Range<usize>]) -> Vec<Range<usize>> {
    let place = |from: &mut usize, run: &Range<usize>| {
        let first = *from;
        *from += run.len();
        Some(first..*from)
    };
    runs.iter().scan(0, place).collect()
}

/// Axes along which parameters are split by runs of elements: ranks with other samples, or other tokens of them.
pub(crate) const FSDP: [Axis; 2] = [Axis::DpShard, Axis::Cp];

/// Which part of each parameter is this rank's, if parameters are split.
fn part(team: &Team) -> Result<Option<Part>> {
    let group = team.along(&FSDP)?;
    Ok((group.size() > 1).then(|| Part { index: group.index(), count: group.size() }))
}

/// Axes along which ranks hold the same of a trained parameter, each with its own gradient.
fn copied(name: &str, share: &Share, in_parts: bool) -> Vec<Axis> {
    // What is in no block, every stage has.
    let mut axes: Vec<Axis> = block_of(name).is_none().then_some(Axis::Pp).into_iter().collect();
    axes.push(Axis::DpReplicate);
    axes.extend(FSDP.into_iter().filter(|_| !in_parts));
    axes.extend((!share.is_cut()).then_some(Axis::Tp));
    axes
}

/// Gradients of parameters that some ranks hold alike.
#[derive(Debug)]
struct Copies {
    reducer: Reducer,
    /// Whether they may be added up as they come, during the last backward.
    early: bool,
}

/// How a model is spread over the ranks.
#[derive(Debug)]
pub struct Spread {
    outline: Outline,
    pipeline: Option<Arc<Pipeline>>,
    tokens: Option<Arc<Tokens>>,
    /// Parameters in parts; none if every rank has all of its own.
    shards: Option<Shards>,
    /// Add up the gradients of what several ranks hold alike.
    copies: Vec<Copies>,
    /// Trained parameter → what is held of it.
    held: BTreeMap<String, Held>,
    /// Whether what is trained is held in parts.
    trained_in_parts: bool,
    /// Whether of any trained parameter less than all is held.
    divided: bool,
    /// Whether this rank is the first of those that hold anything of the same blocks.
    leads: bool,
}

#[derive(Debug)]
struct Held {
    share: Share,
    /// Whether this rank is the first of those that hold the same.
    first: bool,
}

impl Spread {
    /// What this rank holds of a trained parameter, or of what is kept for its elements (`<name>.exp_avg`).
    pub fn share(&self, name: &str) -> Option<Share> {
        let share = &self.held(name)?.share;
        match name.rsplit_once('.') {
            Some((parameter, suffix)) if !self.held.contains_key(name) && self.held.contains_key(parameter) => {
                nn::optim::state_share(suffix, share).ok()
            }
            _ => Some(share.clone()),
        }
    }

    fn held(&self, name: &str) -> Option<&Held> {
        self.held.get(name).or_else(|| self.held.get(name.rsplit_once('.')?.0))
    }

    /// Whether this rank writes down what it holds of `name`.
    pub(crate) fn is_first(&self, name: &str) -> bool {
        self.held(name).is_some_and(|held| held.first)
    }

    /// Whether this rank is the first of those that hold anything of the same blocks.
    pub(crate) fn leads(&self) -> bool {
        self.leads
    }

    /// Whether no rank has the whole model, so that all must run it as often as each other.
    pub fn in_step(&self) -> bool {
        self.shards.is_some() || self.tokens.is_some() || self.pipeline.is_some()
    }

    /// All that is trained, whoever holds it: name and shape.
    pub fn trained(&self) -> &[(String, Vec<i64>)] {
        self.outline.trained()
    }

    /// Whether the model keeps that parameter in f32 whatever the others are in.
    pub(crate) fn is_wide(&self, name: &str) -> bool {
        self.outline.is_wide(name)
    }

    /// Begins a step of so many micro-batches: what this rank does, in order, by [`forward`](Self::forward) and
    /// [`backward`](Self::backward).
    pub fn begin(&self, batches: usize) -> Vec<Action> {
        match &self.pipeline {
            Some(pipeline) => pipeline.begin(batches),
            None => Schedule::new(1, 1, batches).of(0).to_vec(),
        }
    }

    /// Runs the model, or a chunk of it, on a micro-batch. The prediction is where the last block is.
    pub fn forward(
        &self,
        model: &dyn Transformer,
        inputs: &Inputs,
        recompute: Recompute,
        action: Action,
    ) -> nn::Result<(Option<Tensor>, Flight)> {
        match &self.pipeline {
            Some(pipeline) => pipeline.forward(model, inputs, recompute, action),
            None => Ok((Some(model.forward(inputs, recompute)?), Flight::of(action))),
        }
    }

    /// Gradients of a micro-batch: from `loss`, where its prediction was.
    pub fn backward(&self, flight: Flight, loss: Option<Tensor>) -> Result<()> {
        let chunk = flight.action.chunk;
        self.shards.as_ref().map_or(Ok(()), Shards::begin_backward)?;
        match (&self.pipeline, loss) {
            (Some(pipeline), loss) => pipeline.backward(flight, loss)?,
            (None, Some(loss)) => torch::autograd::backward(&[loss], &[], false)?,
            (None, None) => return Err(Error::Unfit("a backward without a loss".to_owned())),
        }
        self.shards.as_ref().map_or(Ok(()), |shards| shards.end_backward(chunk))
    }

    /// Between steps, before or after this rank's parts get other values than an optimizer's: what others made of them goes.
    pub fn release(&self) -> Result<()> {
        self.shards.as_ref().map_or(Ok(()), Shards::release)
    }

    /// The last stage's numbers, `count` of them, on all stages.
    pub fn last_stage(&self, own: Vec<f32>, count: usize) -> Result<Vec<f32>> {
        let Some(pipeline) = self.pipeline.as_ref().filter(|_| count > 0) else { return Ok(own) };
        if pipeline.is_last() && own.len() != count {
            return Err(Error::Unfit(format!("{} losses came, not {count}", own.len())));
        }
        pipeline.last_numbers(&if pipeline.is_last() { own } else { vec![0.0; count] })
    }

    /// Before a step's last backward through the chunk of `action`.
    pub fn before_last_backward(&self, action: Action) {
        if let Some(shards) = &self.shards {
            shards.before_last_backward(action.chunk);
        }
        // The first chunk comes back last.
        if action.chunk == 0 {
            self.copies.iter().filter(|copies| copies.early).for_each(|copies| copies.reducer.arm());
        }
    }

    /// After the last backward: gradients are those of the global batch.
    pub fn finish(&self) -> Result<()> {
        if let Some(shards) = self.shards.as_ref().filter(|_| self.trained_in_parts) {
            shards.finish()?;
        }
        if let Some(pipeline) = &self.pipeline {
            pipeline.settle()?;
        }
        self.copies.iter().try_for_each(|copies| copies.reducer.finish())
    }

    /// The global l2 norm of the gradients.
    pub fn gradient_norm(&self, team: &Team, trained: &[Named]) -> Result<f64> {
        if !self.divided {
            return Ok(nn::optim::gradient_norm(trained)?);
        }
        let counted: Vec<Named> = trained.iter().filter(|named| self.is_first(&named.name)).cloned().collect();
        let own = nn::optim::gradient_norm(&counted)?;
        Ok(team.total(own * own)?.sqrt())
    }

    /// See [`nn::optim::clip_gradients`].
    pub fn clip(&self, team: &Team, trained: &[Named], max_norm: f64) -> Result<f64> {
        if !self.divided {
            return Ok(nn::optim::clip_gradients(trained, max_norm)?);
        }
        let norm = self.gradient_norm(team, trained)?;
        if !norm.is_finite() {
            // Names this rank's own, if it has any.
            nn::optim::clip_gradients(trained, max_norm)?;
            return Err(nn::Error::NonFinite { norm, names: "parts that other ranks hold".to_owned() }.into());
        }
        nn::optim::clip_part(trained, norm, max_norm)?;
        Ok(norm)
    }

    /// Whole tensors, on every rank, of all that is trained, of which each rank holds some: `named`. For small ones, such as
    /// adapters.
    pub fn whole(&self, team: &Team, named: &[Named]) -> Result<Vec<Named>> {
        if !self.divided {
            return Ok(named.to_vec());
        }
        let whole = |(name, shape): &(String, Vec<i64>)| {
            let flat = Tensor::f_zeros([shape.iter().product::<i64>()], (Kind::Float, Device::Cpu))?;
            let own = named.iter().find(|own| own.name == *name).zip(self.held(name).filter(|held| held.first));
            if let Some((own, held)) = own {
                let (own, mut from) = (own.tensor.f_detach()?.f_reshape([-1])?, 0);
                for run in held.share.runs() {
                    let (first, length) = (run.first as i64, run.length as i64);
                    flat.f_narrow(0, first, length)?.f_copy_(&own.f_narrow(0, from, length)?)?;
                    from += length;
                }
            }
            team.add_up(&flat)?;
            Ok(Named { name: name.clone(), tensor: flat.f_view(shape.as_slice())? })
        };
        self.trained().iter().map(whole).collect()
    }

    /// Of the trained parameters and what is kept for their elements, in the order of the model, what any rank holds: name, shape
    /// and kind. `held`: what this rank holds.
    pub(crate) fn held_by_any(&self, team: &Team, held: &[Named]) -> Result<Vec<(String, Vec<i64>, Kind)>> {
        const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Uint8];
        let own: BTreeMap<&str, Kind> = held.iter().map(|named| (named.name.as_str(), named.tensor.kind())).collect();
        let all = self.trained().iter().flat_map(|(name, shape)| {
            let kept = nn::optim::SUFFIXES
                .iter()
                .map(move |suffix| (format!("{name}.{suffix}"), nn::optim::state_shape(suffix, shape)));
            std::iter::once((name.clone(), shape.clone())).chain(kept)
        });
        let all: Vec<_> = all.collect();
        let number = |(name, _): &(String, Vec<i64>)| match own.get(name.as_str()) {
            None => Ok(0.0),
            Some(kind) => match KINDS.iter().position(|known| known == kind) {
                Some(at) => Ok(1.0 + at as f32),
                None => Err(Error::Unfit(format!("`{name}` is {kind:?}, which no state is kept in"))),
            },
        };
        let numbers = Tensor::f_from_slice(&all.iter().map(number).collect::<Result<Vec<f32>>>()?)?;
        team.most(&numbers)?;
        let kinds =
            Vec::<f32>::try_from(numbers)?.into_iter().map(|number| KINDS.get((number as usize).wrapping_sub(1)));
        Ok(all.into_iter().zip(kinds).filter_map(|((name, shape), kind)| Some((name, shape, *kind?))).collect())
    }

    /// The failure between ranks behind an error of forward or backward, which only pass texts on.
    pub fn failure(&self) -> Option<Error> {
        let copies = self.copies.iter().find_map(|copies| copies.reducer.failure());
        let shards = || self.shards.as_ref().and_then(Shards::failure);
        let tokens = || self.tokens.as_ref().and_then(|tokens| tokens.failure());
        let pipeline = || self.pipeline.as_ref().and_then(|pipeline| pipeline.failure());
        copies.or_else(shards).or_else(tokens).or_else(pipeline)
    }
}

//! Fully sharded data parallel: every rank holds a part of each parameter, its gradient and its optimizer state. A block's
//! parameters are gathered before it runs, forward and backward, and given up after; the next blocks' come meanwhile.
//!
//! Zhao et al. 2023, "PyTorch FSDP"; per parameter and per block as in FSDP2. Parts are flat runs of elements rather than
//! rows, so that any shape divides as evenly as can be and a part is one stretch of a weight file.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use comm::{Group, Reduction};
use nn::{Block, Inputs, Named, Parameters, SharedBlock, State, Transformer, block_of};
use spec::counted;
use tch::{Device, Kind, Tensor};
use torch::autograd::{custom_node, in_backward};

use crate::error::{Error, Result};
use crate::trouble::Trouble;
use crate::unit::Unit;

/// A denoiser that threads may share.
pub type Model = Box<dyn Transformer + Send + Sync>;

/// When parameters and gradients travel. Defaults are those of the peer's `fsdp` block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whether a block's parameters are given up between its forward and its backward (`reshard_after_forward`); `None`: all but
    /// the last block's, whose backward is next.
    pub reshard: Option<bool>,
    /// Blocks gathered ahead of the one that runs forward (`fsdp2_forward_prefetch_depth`).
    pub forward_ahead: usize,
    /// Blocks gathered ahead of the one that runs backward (`fsdp2_backward_prefetch_depth`).
    pub backward_ahead: usize,
    /// Whether gradients stay whole in f32 until the step's last backward and go to the parts once (`defer_fsdp_grad_sync`), or
    /// after each backward.
    pub defer: bool,
    /// Kind in which gradients are added up between ranks (`reduce_dtype`); each rank's own sums are f32 in any case.
    pub reduce: Kind,
}

impl Default for Options {
    fn default() -> Self {
        Self { reshard: None, forward_ahead: 1, backward_ahead: 2, defer: true, reduce: Kind::Float }
    }
}

/// The parts that this rank holds.
#[derive(Debug)]
pub struct Shards {
    group: Arc<Group>,
    /// What is in no block.
    root: Arc<Unit>,
    /// Run by run, block by block.
    runs: Vec<Vec<Arc<Unit>>>,
    course: Arc<Course>,
    trouble: Trouble,
}

/// Where the step is.
#[derive(Debug)]
struct Course {
    options: Options,
    /// The forward under way has a graph, so a backward comes.
    recording: AtomicBool,
    /// For each run: its backward under way is the step's last.
    last: Vec<AtomicBool>,
}

impl Course {
    /// Whether the gradients of the backward of a run go to the parts.
    fn sends(&self, run: usize) -> bool {
        !self.options.defer || self.last[run].load(Ordering::Relaxed)
    }

    /// Whether a block is given up after its forward; `is_last`: no block comes after it.
    fn gives_up(&self, is_last: bool) -> bool {
        !self.recording.load(Ordering::Relaxed) || self.options.reshard.unwrap_or(!is_last)
    }
}

/// Spreads `model`, built in parts of as many as `group` has ranks, over it. `runs`: its blocks, by stretches that go forward and
/// backward one at a time.
pub fn apply(
    model: Model,
    parameters: &Parameters,
    group: Arc<Group>,
    options: Options,
    runs: &[Range<usize>],
) -> Result<(Model, Shards)> {
    if parameters.parts.len() != parameters.weights.len() {
        return Err(Error::Unfit("the model was not built in parts".to_owned()));
    }
    if let Some(scalar) = parameters.weights.iter().find(|named| named.tensor.dim() == 0) {
        return Err(Error::Unfit(format!("`{}` is one number, which has no parts", scalar.name)));
    }
    let pairs = parameters.weights.iter().cloned().zip(parameters.parts.iter().cloned());
    let (mut root, mut lists) = (Vec::new(), Vec::<(String, Vec<(Named, Named)>)>::new());
    for (whole, part) in pairs {
        match block_of(&whole.name) {
            None => root.push((whole, part)),
            Some(module) => match lists.last_mut() {
                Some((last, list)) if last == module => list.push((whole, part)),
                _ => lists.push((module.to_owned(), vec![(whole, part)])),
            },
        }
    }
    let with_parameters = model.blocks().iter().filter(|block| block.has_parameters()).count();
    if lists.len() != with_parameters {
        let message = format!("the model has {}, but parameters of {}", counted(with_parameters, "block"), lists.len());
        return Err(Error::Unfit(message));
    }
    let unit = |list: &[(Named, Named)]| Arc::new(Unit::new(Arc::clone(&group), list, options.reduce));
    let root = unit(&root);
    let course = Course {
        options,
        recording: AtomicBool::new(false),
        last: runs.iter().map(|_| AtomicBool::new(false)).collect(),
    };
    let (course, trouble) = (Arc::new(course), Trouble::default());
    let (mut lists, mut blocks, mut units) = (lists.iter(), Vec::new(), Vec::new());
    for (number, run) in runs.iter().enumerate() {
        let run = &model.blocks()[run.clone()];
        let own = lists.by_ref().take(run.iter().filter(|block| block.has_parameters()).count());
        let own: Vec<_> = own.map(|(_, list)| unit(list)).collect();
        let mut at = 0;
        for block in run {
            if !block.has_parameters() {
                blocks.push(SharedBlock::clone(block));
                continue;
            }
            let those = |units: &mut dyn Iterator<Item = &Arc<Unit>>| units.map(Arc::downgrade).collect();
            blocks.push(Arc::new(ShardedBlock {
                inner: SharedBlock::clone(block),
                unit: Arc::clone(&own[at]),
                after: own.get(at + 1).map(Arc::downgrade).unwrap_or_default(),
                ahead_forward: those(&mut own[at + 1..].iter().take(options.forward_ahead)),
                ahead_backward: those(&mut own[..at].iter().rev().take(options.backward_ahead)),
                run: number,
                is_last: number + 1 == runs.len() && at + 1 == own.len(),
                course: Arc::clone(&course),
                trouble: trouble.clone(),
            }));
            at += 1;
        }
        units.push(own);
    }
    let shards =
        Shards { group, root: Arc::clone(&root), runs: units, course: Arc::clone(&course), trouble: trouble.clone() };
    Ok((Box::new(ShardedTransformer { inner: model, root, blocks, course, trouble }), shards))
}

impl Shards {
    /// Begins a backward, perhaps after other forwards and backwards than its own: what is in no block is here again.
    pub fn begin_backward(&self) -> Result<()> {
        self.root.need()
    }

    /// The next backward of `run` is the last one of the step.
    pub fn before_last_backward(&self, run: usize) {
        self.course.last[run].store(true, Ordering::Relaxed);
    }

    /// Ends a backward of `run`: gradients are in the parts, or wait whole for the last one. All ranks must run as many backwards.
    pub fn end_backward(&self, run: usize) -> Result<()> {
        // In the order in which backward goes, so that ranks whose graphs reach less make the same calls.
        let sends = self.course.sends(run);
        self.runs[run].iter().rev().try_for_each(|unit| unit.end_backward(sends))?;
        // The first run comes back last.
        self.root.end_backward(!self.course.options.defer || sends && run == 0)
    }

    /// Ends the step's backwards: gradients are in the parts, and a parameter without one on all ranks stays without one.
    pub fn finish(&self) -> Result<()> {
        // Nothing is left to send after a last backward that was announced.
        self.units().rev().try_for_each(|unit| unit.send_the_rest())?;
        self.course.last.iter().for_each(|last| last.store(false, Ordering::Relaxed));
        let (parts, touched): (Vec<Tensor>, Vec<i64>) =
            self.units().flat_map(|unit| unit.take_touched()).map(|(part, touched)| (part, i64::from(touched))).unzip();
        let flags = Tensor::f_from_slice(&touched)?;
        self.group.all_reduce(&flags, Reduction::Max)?.wait()?;
        for (part, _) in parts.iter().zip(Vec::<i64>::try_from(flags)?).filter(|(_, touched)| *touched == 0) {
            torch::autograd::set_gradient(part, None)?;
        }
        Ok(())
    }

    /// Gives up what is gathered of the parameters, whose parts are about to be others.
    pub fn release(&self) -> Result<()> {
        self.units().try_for_each(|unit| unit.release())
    }

    fn units(&self) -> impl DoubleEndedIterator<Item = &Arc<Unit>> {
        std::iter::once(&self.root).chain(self.runs.iter().flatten())
    }

    /// What went wrong between ranks inside forward or backward, if anything did.
    pub fn failure(&self) -> Option<Error> {
        self.trouble.take()
    }
}

/// Gathers what is in no block for the whole pass.
struct ShardedTransformer {
    inner: Model,
    root: Arc<Unit>,
    blocks: Vec<SharedBlock>,
    course: Arc<Course>,
    trouble: Trouble,
}

impl Transformer for ShardedTransformer {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
        // Asked here, as a checkpointed block runs without a graph at first.
        self.course.recording.store(recording()?, Ordering::Relaxed);
        self.root.need().map_err(|error| self.trouble.layer(error))?;
        self.inner.embed(inputs)
    }

    fn blocks(&self) -> &[SharedBlock] {
        &self.blocks
    }

    fn head(&self, state: State) -> nn::Result<Tensor> {
        self.inner.head(state)
    }
}

/// A block whose parameters come for it and go after it.
struct ShardedBlock {
    inner: SharedBlock,
    unit: Arc<Unit>,
    after: Weak<Unit>,
    /// Gathered while it runs forward, the next first.
    ahead_forward: Vec<Weak<Unit>>,
    /// Gathered while it runs backward, the next first.
    ahead_backward: Vec<Weak<Unit>>,
    /// The run that it is in.
    run: usize,
    /// Whether its backward comes next after its forward.
    is_last: bool,
    course: Arc<Course>,
    trouble: Trouble,
}

impl Block for ShardedBlock {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        // A checkpointed block runs again inside backward, which then goes on to the block before.
        let again = in_backward();
        let layer = |error| self.trouble.layer(error);
        self.unit.need().map_err(layer)?;
        start(if again { &self.ahead_backward } else { &self.ahead_forward }).map_err(layer)?;

        // After the backward of the block: gradients to the parts. The ones of the block after have had its time to come.
        let (unit, after) = (Arc::clone(&self.unit), Weak::clone(&self.after));
        let (course, run) = (Arc::clone(&self.course), self.run);
        let inputs = stream.iter().chain(shared).map(Tensor::shallow_clone).collect();
        let inputs = through("Reduce", inputs, self.trouble.clone(), move || {
            after.upgrade().map_or(Ok(()), |after| after.settle())?;
            unit.reduce(course.sends(run))
        })?;
        let outputs = self.inner.forward(&inputs[..stream.len()], &inputs[stream.len()..])?;
        // Before it: the parameters must be here again.
        let (unit, ahead) = (Arc::clone(&self.unit), self.ahead_backward.clone());
        let outputs = through("Gather", outputs, self.trouble.clone(), move || {
            unit.need()?;
            start(&ahead)
        })?;
        if !again && self.course.gives_up(self.is_last) {
            self.unit.release().map_err(layer)?;
        }
        Ok(outputs)
    }
}

fn start(units: &[Weak<Unit>]) -> Result<()> {
    units.iter().filter_map(Weak::upgrade).try_for_each(|unit| unit.start())
}

/// Whether what is computed now gets a graph.
fn recording() -> Result<bool, tch::TchError> {
    let leaf = Tensor::f_zeros([1], (Kind::Float, Device::Cpu))?.f_set_requires_grad(true)?;
    Ok(leaf.f_neg()?.requires_grad())
}

/// The same tensors; when backward comes by those that need gradients, `act` runs first.
fn through(
    name: &str,
    tensors: Vec<Tensor>,
    trouble: Trouble,
    mut act: impl FnMut() -> Result<()> + Send + 'static,
) -> nn::Result<Vec<Tensor>> {
    let inputs: Vec<Tensor> = tensors.iter().filter(|t| t.requires_grad()).map(Tensor::shallow_clone).collect();
    if inputs.is_empty() {
        return Ok(tensors);
    }
    let outputs: Vec<Tensor> = inputs.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
    let joined = custom_node(name, &inputs, &outputs, move |gradients| {
        act().map_err(|error| trouble.note(error))?;
        Ok(gradients.iter().map(|gradient| gradient.as_ref().map(Tensor::shallow_clone)).collect())
    })?;
    if !joined {
        return Ok(tensors);
    }
    let mut outputs = outputs.into_iter();
    // As many as were taken out.
    Ok(tensors.into_iter().map(|t| if t.requires_grad() { outputs.next().unwrap_or(t) } else { t }).collect())
}

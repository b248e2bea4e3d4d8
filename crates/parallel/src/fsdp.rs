//! Fully sharded data parallel: every rank holds a part of each parameter, its gradient and its optimizer state. A block's
//! parameters are gathered before it runs, forward and backward, and given up after; the next block's come meanwhile.
//!
//! Zhao et al. 2023, "PyTorch FSDP"; per parameter and per block as in FSDP2. Parts are flat runs of elements rather than
//! rows, so that any shape divides as evenly as can be and a part is one stretch of a weight file.

use std::sync::{Arc, Weak};

use comm::{Group, Reduction};
use nn::{Block, Inputs, Named, Parameters, SharedBlock, State, Transformer, block_of};
use spec::counted;
use tch::Tensor;
use torch::autograd::{custom_node, in_backward};

use crate::error::{Error, Result};
use crate::trouble::Trouble;
use crate::unit::Unit;

/// A denoiser that threads may share.
pub type Model = Box<dyn Transformer + Send + Sync>;

/// The parts that this rank holds.
#[derive(Debug)]
pub struct Shards {
    group: Arc<Group>,
    /// What is in no block first, then block by block.
    units: Vec<Arc<Unit>>,
    trouble: Trouble,
}

/// Spreads `model`, built in parts of as many as `group` has ranks, over it.
pub fn apply(model: Model, parameters: &Parameters, group: Arc<Group>) -> Result<(Model, Shards)> {
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
    let unit = |list: &[(Named, Named)]| Arc::new(Unit::new(Arc::clone(&group), list));
    let units: Vec<_> = std::iter::once(unit(&root)).chain(lists.iter().map(|(_, list)| unit(list))).collect();
    let (trouble, mut next) = (Trouble::default(), 1);
    let blocks = model.blocks().iter().map(|block| -> SharedBlock {
        if !block.has_parameters() {
            return SharedBlock::clone(block);
        }
        let at = next;
        next += 1;
        let neighbour = |index: usize| units.get(index).map(Arc::downgrade).unwrap_or_default();
        Arc::new(ShardedBlock {
            inner: SharedBlock::clone(block),
            unit: Arc::clone(&units[at]),
            before: if at > 1 { neighbour(at - 1) } else { Weak::new() },
            after: neighbour(at + 1),
            trouble: trouble.clone(),
        })
    });
    let blocks = blocks.collect();
    let model = ShardedTransformer { inner: model, root: Arc::clone(&units[0]), blocks, trouble: trouble.clone() };
    Ok((Box::new(model), Shards { group, units, trouble }))
}

impl Shards {
    /// Begins a backward, perhaps after other forwards and backwards than its own: what is in no block is here again.
    pub fn begin_backward(&self) -> Result<()> {
        self.units[0].need()
    }

    /// Ends a backward: gradients are in the parts. All ranks must run as many backwards.
    pub fn end_backward(&self) -> Result<()> {
        // In the order in which backward goes, so that ranks whose graphs reach less make the same calls.
        self.units.iter().rev().try_for_each(|unit| unit.end_backward())
    }

    /// Ends the step's backwards: a parameter without a gradient on all ranks stays without one.
    pub fn finish(&self) -> Result<()> {
        let (parts, touched): (Vec<Tensor>, Vec<i64>) = self
            .units
            .iter()
            .flat_map(|unit| unit.take_touched())
            .map(|(part, touched)| (part, i64::from(touched)))
            .unzip();
        let flags = Tensor::f_from_slice(&touched)?;
        self.group.all_reduce(&flags, Reduction::Max)?.wait()?;
        for (part, _) in parts.iter().zip(Vec::<i64>::try_from(flags)?).filter(|(_, touched)| *touched == 0) {
            torch::autograd::set_gradient(part, None)?;
        }
        Ok(())
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
    trouble: Trouble,
}

impl Transformer for ShardedTransformer {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
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
    before: Weak<Unit>,
    after: Weak<Unit>,
    trouble: Trouble,
}

impl Block for ShardedBlock {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        // A checkpointed block runs again inside backward, which then goes on to the block before.
        let again = in_backward();
        let layer = |error| self.trouble.layer(error);
        self.unit.need().map_err(layer)?;
        start(if again { &self.before } else { &self.after }).map_err(layer)?;

        // After the backward of the block: gradients to the parts. The ones of the block after have had its time to come.
        let (unit, after) = (Arc::clone(&self.unit), Weak::clone(&self.after));
        let inputs = stream.iter().chain(shared).map(Tensor::shallow_clone).collect();
        let inputs = through("Reduce", inputs, self.trouble.clone(), move || {
            after.upgrade().map_or(Ok(()), |after| after.settle())?;
            unit.reduce()
        })?;
        let outputs = self.inner.forward(&inputs[..stream.len()], &inputs[stream.len()..])?;
        // Before it: the parameters must be here again.
        let (unit, before) = (Arc::clone(&self.unit), Weak::clone(&self.before));
        let outputs = through("Gather", outputs, self.trouble.clone(), move || {
            unit.need()?;
            start(&before)
        })?;
        if !again {
            self.unit.release().map_err(layer)?;
        }
        Ok(outputs)
    }
}

fn start(unit: &Weak<Unit>) -> Result<()> {
    unit.upgrade().map_or(Ok(()), |unit| unit.start())
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

//! A model whose stream is spread over ranks: the tokens are dealt out after `embed` and collected before `head`, which every
//! rank runs on all of them. In between, layers meet at the [seam](nn::Seam): `tp` and `cp` say how.
//!
//! Where the tokens are travels with the tensors that all blocks share, as the last of them.

use std::sync::{Arc, Mutex, PoisonError};

use nn::{Block, Division, Inputs, Part, Seam, SharedBlock, State, Transformer};
use spec::Mesh;
use spec::mesh::Axis;
use tch::Tensor;

use crate::cp::Context;
use crate::error::{Error, Result};
use crate::exchange::Exchange;
use crate::fsdp::Model;
use crate::layout::Layout;
use crate::team::Team;
use crate::tp;
use crate::trouble::Trouble;

/// The ranks between which one model's stream and layers are divided.
#[derive(Debug)]
pub struct Tokens {
    features: Exchange,
    context: Context,
    /// Both together, in the order of their chunks.
    all: Exchange,
    /// Of the block that runs.
    layout: Mutex<Layout>,
    trouble: Trouble,
}

/// How the layers of a model on `mesh` are divided; to be looked at, not to be run.
pub fn division(mesh: &Mesh) -> Option<Division> {
    let (tp, cp) = (mesh.degree(Axis::Tp), mesh.degree(Axis::Cp));
    let features = Part { index: 0, count: tp };
    (tp * cp > 1).then(|| Division { features, head_groups: tp * mesh.ulysses(), seam: None })
}

impl Tokens {
    /// Of the ranks of `team` that work on the same samples, if there are several.
    pub fn new(team: &Team) -> Result<Option<Arc<Self>>> {
        if division(team.mesh()).is_none() {
            return Ok(None);
        }
        let trouble = Trouble::default();
        let exchange = |axes: &[Axis]| Ok::<_, Error>(Exchange::new(team.along(axes)?, trouble.clone()));
        let features = exchange(&[Axis::Tp])?;
        let context = Context::new(team, &trouble)?;
        let all = exchange(&[Axis::Cp, Axis::Tp])?;
        Ok(Some(Arc::new(Self { features, context, all, layout: Mutex::default(), trouble })))
    }

    /// How the layers are divided.
    pub fn division(self: &Arc<Self>, mesh: &Mesh) -> Option<Division> {
        let features = Part { index: self.features.index(), count: self.features.size() };
        Some(Division { features, seam: Some(Arc::clone(self) as Arc<dyn Seam>), ..division(mesh)? })
    }

    /// Spreads the stream of `model`, which was built so divided.
    pub fn apply(self: &Arc<Self>, model: Model) -> Model {
        let block = |block: &SharedBlock| -> SharedBlock {
            Arc::new(DividedBlock { inner: SharedBlock::clone(block), tokens: Arc::clone(self) })
        };
        let blocks = model.blocks().iter().map(block).collect();
        Box::new(DividedTransformer { inner: model, blocks, tokens: Arc::clone(self) })
    }

    /// What went wrong between ranks inside forward or backward, if anything did.
    pub fn failure(&self) -> Option<Error> {
        self.trouble.take()
    }

    fn layout(&self) -> Layout {
        self.layout.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn layout_of(&self, lengths: Vec<i64>) -> Layout {
        Layout { lengths, outer: self.context.size(), inner: self.features.size() }
    }

    fn layer(&self) -> impl Fn(Error) -> nn::Error + '_ {
        |error| self.trouble.layer(error)
    }
}

impl Seam for Tokens {
    fn enter(&self, x: &Tensor) -> nn::Result<Tensor> {
        tp::enter(&self.features, &self.layout(), x)
    }

    fn leave(&self, x: &Tensor) -> nn::Result<Tensor> {
        tp::leave(&self.features, &self.layout(), x)
    }

    fn join(&self, x: &Tensor) -> nn::Result<Tensor> {
        tp::join(&self.features, x)
    }

    fn sum(&self, x: &Tensor) -> nn::Result<Tensor> {
        self.features.sum(x)
    }

    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> nn::Result<Tensor> {
        self.context.attend([q, k, v], &self.layout())
    }
}

/// Deals the tokens out and collects them.
struct DividedTransformer {
    inner: Model,
    blocks: Vec<SharedBlock>,
    tokens: Arc<Tokens>,
}

impl DividedTransformer {
    fn dealt(&self, state: State) -> Result<State> {
        let State { stream, mut shared, by_token, latent_size } = state;
        let lengths: Vec<i64> = stream.iter().map(|tokens| tokens.size()[1]).collect();
        let layout = self.tokens.layout_of(lengths.clone());
        let place = self.tokens.all.index();
        let own = stream.iter().enumerate().map(|(i, tokens)| layout.chunk(tokens, i, 1, place, 1));
        let stream = own.collect::<Result<Vec<_>>>()?;
        // Attention sees all tokens of an outer group.
        for at in &by_token {
            let table = &mut shared[*at];
            let rows = table.f_split_with_sizes(lengths.as_slice(), 0)?;
            let first = place - self.tokens.features.index();
            let own = rows.iter().enumerate().map(|(i, rows)| layout.chunk(rows, i, 0, first, layout.inner));
            *table = Tensor::f_cat(&own.collect::<Result<Vec<_>>>()?, 0)?;
        }
        shared.push(Tensor::f_from_slice(&lengths)?);
        Ok(State { stream, shared, by_token, latent_size })
    }

    fn collected(&self, mut state: State) -> nn::Result<State> {
        let lengths = lengths_of(state.shared.pop())?;
        let (layout, streams) = (self.tokens.layout_of(lengths), state.stream.len());
        if streams != layout.lengths.len() && streams != 1 {
            return Err(nn::Error::Invalid(format!("{} streams became {streams}", layout.lengths.len())));
        }
        let joined = streams != layout.lengths.len();
        let whole = |(i, tokens): (usize, &Tensor)| {
            let all = self.tokens.all.gather(tokens)?;
            let whole = layout.together(&all).map_err(self.tokens.layer())?;
            layout.without_fillers(&whole, (!joined).then_some(i)).map_err(self.tokens.layer())
        };
        let stream = state.stream.iter().enumerate().map(whole).collect::<nn::Result<_>>()?;
        Ok(State { stream, ..state })
    }
}

impl Transformer for DividedTransformer {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
        self.dealt(self.inner.embed(inputs)?).map_err(self.tokens.layer())
    }

    fn blocks(&self) -> &[SharedBlock] {
        &self.blocks
    }

    fn head(&self, state: State) -> nn::Result<Tensor> {
        self.inner.head(self.collected(state)?)
    }
}

/// A block that runs on this rank's tokens.
struct DividedBlock {
    inner: SharedBlock,
    tokens: Arc<Tokens>,
}

impl Block for DividedBlock {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        let (lengths, shared) = shared.split_last().map_or((None, shared), |(last, rest)| (Some(last), rest));
        let layout = self.tokens.layout_of(lengths_of(lengths.map(Tensor::shallow_clone))?);
        *self.tokens.layout.lock().unwrap_or_else(PoisonError::into_inner) = layout;
        self.inner.forward(stream, shared)
    }

    fn has_parameters(&self) -> bool {
        self.inner.has_parameters()
    }
}

fn lengths_of(tensor: Option<Tensor>) -> nn::Result<Vec<i64>> {
    let tensor = tensor.ok_or_else(|| nn::Error::Invalid("the lengths of the streams are lost".to_owned()))?;
    Ok(Vec::try_from(tensor)?)
}

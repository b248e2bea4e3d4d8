//! From weights, or a seed, to layers whose paths are the checkpoint's keys.
//!
//! A model is written once against [`Builder`]; the same code then loads, initialises or merely checks it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use torch::Shared;

use crate::division::Division;
use crate::error::{Error, Result, nearest, some_of};
use crate::init::Init;
use crate::lora::{self, Controls};
use crate::part::Part;
use crate::share::Share;
use crate::transformer::block_of;
use crate::weights::Weights;

/// How parameters are held.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// Where they live.
    pub device: Device,
    /// Kind of the stored weights (f32 for a full fine-tune's master weights). Adapters are always f32.
    pub storage: Kind,
    /// Whether something is trained: the adapter if there is one, all weights otherwise.
    pub trainable: bool,
    /// Adds LoRA to linear layers.
    pub adapter: Option<lora::Spec>,
}

impl BuildOptions {
    /// Frozen weights without an adapter.
    pub fn frozen(device: Device, storage: Kind) -> Self {
        Self { device, storage, trainable: false, adapter: None }
    }

    /// Trained weights in f32 (a full fine-tune).
    pub fn trained(device: Device) -> Self {
        Self { device, storage: Kind::Float, trainable: true, adapter: None }
    }
}

/// A parameter and its checkpoint key.
#[derive(Debug)]
pub struct Named {
    /// Key, such as `transformer_blocks.0.attn.to_q.weight`.
    pub name: String,
    /// The layer's own tensor (the same autograd leaf).
    pub tensor: Tensor,
}

impl Clone for Named {
    fn clone(&self) -> Self {
        Self { name: self.name.clone(), tensor: self.tensor.shallow_clone() }
    }
}

/// Everything a built model holds, in the order in which it was defined.
#[derive(Debug)]
pub struct Parameters {
    /// The checkpoint's tensors.
    pub weights: Vec<Named>,
    /// `<module>.lora_A.weight` and `<module>.lora_B.weight`; empty without an adapter.
    pub adapter: Vec<Named>,
    /// Of a [split](Builder::split) build, what is held of each of `weights`: flat, `[elements]`. Else empty.
    pub parts: Vec<Named>,
    /// Parameter → what its tensor in [`trainable`](Self::trainable) is of the checkpoint's.
    pub shares: BTreeMap<String, Share>,
    /// Those of `weights` that the model keeps [in f32](Builder::in_f32) whatever the others are in, on the disk, too.
    pub wide: BTreeSet<String>,
    pub(crate) spec: Option<lora::Spec>,
    pub(crate) controls: Arc<Controls>,
}

impl Parameters {
    /// Those that require a gradient.
    pub fn trainable(&self) -> Vec<Named> {
        let held = if self.parts.is_empty() { &self.weights } else { &self.parts };
        held.iter().chain(&self.adapter).filter(|named| named.tensor.requires_grad()).cloned().collect()
    }

    /// The same adapter with these tensors for its parameters, and no weights: to be written to a file.
    #[must_use]
    pub fn with_adapter(&self, adapter: Vec<Named>) -> Self {
        let (spec, controls) = (self.spec.clone(), Arc::clone(&self.controls));
        let (weights, parts) = (Vec::new(), Vec::new());
        Self { weights, adapter, parts, shares: BTreeMap::new(), wide: BTreeSet::new(), spec, controls }
    }

    /// The adapter's settings, if there is one.
    pub fn adapter_spec(&self) -> Option<&lora::Spec> {
        self.spec.as_ref()
    }

    /// Multiplies the adapter's effect from now on: 1 as trained, 0 as if it were not there.
    pub fn set_adapter_strength(&self, strength: f64) {
        self.controls.set_strength(strength);
    }

    /// Turns LoRA dropout on, with one key per row of the batch, or off. A row's mask depends on its key, the layer and the
    /// adapter's seed alone, so neither the batch's split nor recomputing changes it.
    pub fn set_dropout_keys(&self, keys: Option<&[u64]>) {
        self.controls.set_dropout_keys(keys);
    }
}

enum Source {
    Weights(Weights),
    Random(u64),
    Zeros,
    Meta,
}

struct Construction {
    source: Source,
    options: BuildOptions,
    weights: Vec<Named>,
    adapter: Vec<Named>,
    parts: Vec<Named>,
    shares: BTreeMap<String, Share>,
    split: Option<Split>,
    division: Option<Division>,
    kept: Option<BTreeSet<String>>,
    controls: Arc<Controls>,
    /// Keys asked for or declared to be ignored.
    known: BTreeSet<String>,
    wide: BTreeSet<String>,
    linears: Vec<String>,
}

impl Construction {
    fn keeps(&self, name: &str) -> bool {
        self.kept.as_ref().is_none_or(|kept| keeps(kept, name))
    }
}

/// Whether a parameter is of one of the blocks `kept`, or of none.
fn keeps(kept: &BTreeSet<String>, name: &str) -> bool {
    block_of(name).is_none_or(|block| kept.contains(block))
}

/// See [`Builder::split`].
#[derive(Clone, Copy)]
struct Split {
    part: Part,
    compute: Kind,
    /// Where parts lie.
    device: Device,
}

/// A place in the tree of modules; cheap to clone, all clones feed the same [`Parameters`].
#[derive(Clone)]
pub struct Builder {
    path: String,
    /// Whether parameters are held in f32 whatever the storage kind.
    wide: bool,
    shared: Rc<RefCell<Construction>>,
}

impl Builder {
    /// Takes every parameter from a checkpoint.
    pub fn from_weights(weights: Weights, options: BuildOptions) -> Self {
        Self::new(Source::Weights(weights), options)
    }

    /// Initialises every parameter by (seed, name).
    pub fn random(seed: u64, options: BuildOptions) -> Self {
        Self::new(Source::Random(seed), options)
    }

    /// Every parameter zero, with its memory: for measuring what a model takes.
    pub fn zeros(options: BuildOptions) -> Self {
        Self::new(Source::Zeros, options)
    }

    /// Placeholders of the right shape that take no memory: for checking a recipe against a model. Never for numbers.
    pub fn meta(options: BuildOptions) -> Self {
        Self::new(Source::Meta, options)
    }

    fn new(source: Source, options: BuildOptions) -> Self {
        let shared = Construction {
            source,
            options,
            weights: Vec::new(),
            adapter: Vec::new(),
            parts: Vec::new(),
            shares: BTreeMap::new(),
            split: None,
            division: None,
            kept: None,
            controls: Arc::default(),
            known: BTreeSet::new(),
            wide: BTreeSet::new(),
            linears: Vec::new(),
        };
        Self { path: String::new(), wide: false, shared: Rc::new(RefCell::new(shared)) }
    }

    /// Holds, and reads, only `part` of each tensor. Layers get tensors without memory, to be filled for each use:
    /// in `compute` where they are trained, in the storage kind where not. Adapters are held whole.
    #[must_use]
    pub fn split(self, part: Part, compute: Kind) -> Self {
        {
            let mut shared = self.shared.borrow_mut();
            shared.split = Some(Split { part, compute, device: shared.options.device });
        }
        self
    }

    /// What is held of a [split](Self::split) build lies in host memory, which a GPU can read by itself, wherever layers compute.
    #[must_use]
    pub fn held_in_host_memory(self) -> Self {
        if let Some(split) = &mut self.shared.borrow_mut().split {
            split.device = Device::Cpu;
        }
        self
    }

    /// Divides the layers that say how they may be divided: each gets, and reads, only its share.
    #[must_use]
    pub fn divided(self, division: Division) -> Self {
        self.shared.borrow_mut().division = Some(division);
        self
    }

    /// Builds, and reads, of the blocks only `kept` (see [`block_of`]); the others may not run.
    #[must_use]
    pub fn only(self, kept: BTreeSet<String>) -> Self {
        self.shared.borrow_mut().kept = Some(kept);
        self
    }

    /// How the layers are divided.
    pub(crate) fn division(&self) -> Option<Division> {
        self.shared.borrow().division.clone()
    }

    /// The child module `segment` (which may hold dots: `norm.linear`).
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "callers pass literals and block numbers")]
    pub fn pp(&self, segment: impl ToString) -> Self {
        Self { path: self.name(&segment.to_string()), ..self.clone() }
    }

    /// This module with its parameters in f32, for the parts that a model keeps wide under half precision.
    #[must_use]
    pub fn in_f32(&self) -> Self {
        Self { wide: true, ..self.clone() }
    }

    /// Path of this module, without a trailing dot; empty at the root.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Where the parameters live.
    pub fn device(&self) -> Device {
        self.shared.borrow().options.device
    }

    /// Whether the checkpoint has this tensor; always true without a checkpoint. For parts that some files lack.
    pub fn has(&self, name: &str) -> bool {
        match &self.shared.borrow().source {
            Source::Weights(weights) => weights.shape(&self.name(name)).is_some(),
            Source::Random(_) | Source::Zeros | Source::Meta => true,
        }
    }

    /// Declares a key that the checkpoint may hold and this model does not use (tied or derived tensors).
    pub fn ignore(&self, name: &str) {
        let name = self.name(name);
        self.shared.borrow_mut().known.insert(name);
    }

    /// The parameter `name` of this module. A missing key or another shape is an error at once.
    pub fn param(&self, name: &str, shape: &[i64], init: Init) -> Result<Shared> {
        self.held(name, &Share::whole(shape), init)
    }

    /// As [`param`](Self::param), of which a divided model has equal shares of each of `segments` of `dim`, end to end.
    pub(crate) fn cut_param(&self, name: &str, shape: &[i64], cut: (usize, &[i64]), init: Init) -> Result<Shared> {
        let share = share_of(self.shared.borrow().division.as_ref(), shape, cut)?;
        self.held(name, &share, init)
    }

    fn held(&self, name: &str, share: &Share, init: Init) -> Result<Shared> {
        let name = self.name(name);
        let mut shared = self.shared.borrow_mut();
        let shape = &share.shape();
        if !shared.keeps(&name) {
            shared.known.insert(name);
            return Ok(Tensor::f_zeros([1], (Kind::Float, Device::Cpu))?.f_expand(shape, false)?.into());
        }
        let share = match shared.split {
            Some(Split { part, .. }) if !shape.is_empty() => share.clone().run(part),
            _ => share.clone(),
        };
        let BuildOptions { device, storage, trainable, ref adapter } = shared.options;
        let trained = trainable && adapter.is_none();
        let storage = if self.wide { Kind::Float } else { storage };
        let home = shared.split.map_or(device, |split| split.device);
        let placed = |tensor: Tensor| -> Result<Tensor> {
            tch::no_grad(|| {
                let placed = tensor.f_to_device(home)?.f_to_kind(storage)?;
                // Where a GPU fetches it from.
                if home == device { Ok(placed) } else { Ok(torch::host::pinned(&placed, device)?) }
            })
        };
        let held = match &shared.source {
            Source::Weights(weights) => placed(weights.share(&name, &share)?)?,
            Source::Random(seed) => placed(share.of(&init.values(*seed, &name, share.whole_shape())?)?)?,
            Source::Zeros => placed(Tensor::f_zeros(share.held_shape(), (storage, Device::Cpu))?)?,
            Source::Meta => Tensor::f_zeros([1], (storage, Device::Cpu))?.f_expand(shape, false)?,
        };
        if !shared.known.insert(name.clone()) {
            return Err(Error::Invalid(format!("parameter `{name}` is defined twice")));
        }
        if self.wide {
            shared.wide.insert(name.clone());
        }
        let held = held.f_set_requires_grad(trained)?;
        let tensor = match shared.split {
            None => held,
            Some(Split { compute, .. }) => {
                shared.parts.push(Named { name: name.clone(), tensor: held });
                let kind = if trained && !self.wide { compute } else { storage };
                let empty = Tensor::f_empty(shape, (kind, device))?;
                torch::storage::free(&empty)?;
                empty.f_set_requires_grad(trained)?
            }
        };
        shared.weights.push(Named { name: name.clone(), tensor: tensor.shallow_clone() });
        shared.shares.insert(name, share);
        Ok(tensor.into())
    }

    /// LoRA for the linear layer at this path, if the options ask for it. `input` and `output`: segments in which the layer's
    /// features are cut, or none where they are not.
    pub(crate) fn adapter(
        &self,
        [input, output]: [i64; 2],
        [inputs, outputs]: [Option<&[i64]>; 2],
    ) -> Result<Option<lora::Adapter>> {
        let shared = &mut *self.shared.borrow_mut();
        shared.linears.push(self.path.clone());
        let Some(spec) = shared.options.adapter.as_ref().filter(|spec| spec.selects(&self.path)) else {
            return Ok(None);
        };
        if shared.kept.as_ref().is_some_and(|kept| !keeps(kept, &format!("{}.weight", self.path))) {
            return Ok(None);
        }
        let share = |shape: [i64; 2], dim: usize, segments: Option<&[i64]>| match segments {
            Some(segments) => share_of(shared.division.as_ref(), &shape, (dim, segments)),
            None => Ok(Share::whole(&shape)),
        };
        let rank = spec.rank_of(&self.path);
        let place = lora::Place {
            path: &self.path,
            a: share([rank, input], 1, inputs)?,
            b: share([output, rank], 0, outputs)?,
            device: shared.options.device,
            trainable: shared.options.trainable,
            meta: matches!(shared.source, Source::Meta),
        };
        let adapter = spec.adapter(&place, Arc::clone(&shared.controls))?;
        let named = adapter.named(&self.path);
        shared.shares.extend(named.iter().map(|named| named.name.clone()).zip([place.a, place.b]));
        shared.adapter.extend(named);
        Ok(Some(adapter))
    }

    /// What was built. Fails if the checkpoint holds tensors that nothing asked for, or if an adapter pattern fits no layer.
    pub fn finish(&self) -> Result<Parameters> {
        let shared = self.shared.borrow();
        if let Source::Weights(weights) = &shared.source {
            let extra: Vec<_> = weights.names().filter(|name| !shared.known.contains(*name)).collect();
            if !extra.is_empty() {
                let (origin, count) = (weights.origin().to_owned(), extra.len());
                return Err(Error::Unexpected { origin, count, names: some_of(extra) });
            }
        }
        if let Some(spec) = &shared.options.adapter {
            spec.check(&shared.linears)?;
        }
        Ok(Parameters {
            weights: shared.weights.clone(),
            adapter: shared.adapter.clone(),
            parts: shared.parts.clone(),
            shares: shared.shares.clone(),
            wide: shared.wide.clone(),
            spec: shared.options.adapter.clone(),
            controls: Arc::clone(&shared.controls),
        })
    }

    fn name(&self, segment: &str) -> String {
        if self.path.is_empty() { segment.to_owned() } else { format!("{}.{segment}", self.path) }
    }
}

/// What a model so divided has of a parameter that is cut along a dim in segments.
fn share_of(division: Option<&Division>, shape: &[i64], (dim, segments): (usize, &[i64])) -> Result<Share> {
    match division {
        Some(Division { features, .. }) if features.count > 1 => Share::cut(shape, dim, segments, *features),
        _ => Ok(Share::whole(shape)),
    }
}

/// The error for a key that `origin` lacks.
pub(crate) fn missing<'a>(origin: &str, name: &str, shape: &[i64], names: impl IntoIterator<Item = &'a str>) -> Error {
    Error::Missing {
        origin: origin.to_owned(),
        name: name.to_owned(),
        shape: shape.to_vec(),
        help: nearest(name, names),
    }
}

//! The shape every denoiser has: `embed`, then an ordered list of blocks over a state, then `head`.
//!
//! From this one shape follow activation checkpointing, sharding by block, pipeline cuts and adapters, with no code per
//! model. Nothing here knows a particular model, a loss, or a rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::remat;

/// What conditions a batch, by name (FLUX: `t5` [B, S, D] and `clip_pooled` [B, P]).
pub type Conditions = BTreeMap<String, Tensor>;

/// One call of a denoiser.
#[derive(Debug)]
pub struct Inputs {
    /// Noisy latents in the cache's layout: [B, C, H, W] for pictures, [B, C, F, H, W] for clips; any float kind.
    pub latents: Tensor,
    /// Noise level of each sample, sigma in [0, 1], `[B]`: f32, or f64 where 1000 times it must be a certain f32.
    pub sigma: Tensor,
    /// Text and other conditions.
    pub conditions: Conditions,
    /// Distilled guidance scale for each sample, f32 `[B]`; a model with a guidance embedding refuses `None`.
    pub guidance: Option<Tensor>,
    /// Kind the blocks compute in.
    pub compute: Kind,
}

/// What flows between blocks.
#[derive(Debug)]
pub struct State {
    /// Tensors each block rewrites (FLUX: image and text tokens, later both joined).
    pub stream: Vec<Tensor>,
    /// Tensors every block reads and none writes (time embedding, rotary tables).
    pub shared: Vec<Tensor>,
    /// Latent size that `head` needs to undo the packing.
    pub latent_size: Vec<i64>,
}

/// One unit of the chain: of checkpointing, of sharding, of a pipeline cut.
pub trait Block {
    /// The next stream; gradients flow through both arguments.
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> Result<Vec<Tensor>>;
    /// Whether it has parameters; their paths then begin with its module's, `<list>.<number>.`.
    fn has_parameters(&self) -> bool {
        true
    }
}

/// A block that backward may hold on to and run again on another thread.
pub type SharedBlock = Arc<dyn Block + Send + Sync>;

/// A denoiser.
pub trait Transformer {
    /// Packs latents, embeds time and text.
    fn embed(&self, inputs: &Inputs) -> Result<State>;
    /// The chain, in order.
    fn blocks(&self) -> &[SharedBlock];
    /// The prediction in the latents' layout, in the compute kind.
    fn head(&self, state: State) -> Result<Tensor>;

    /// `embed`, all blocks, `head`. With `recompute`, activations inside blocks are not kept for backward.
    fn forward(&self, inputs: &Inputs, recompute: bool) -> Result<Tensor> {
        let mut state = self.embed(inputs)?;
        for block in self.blocks() {
            state.stream = if recompute {
                remat::checkpoint(block, &state)?
            } else {
                block.forward(&state.stream, &state.shared)?
            };
        }
        self.head(state)
    }
}

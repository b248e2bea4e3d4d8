//! The shape every denoiser has: `embed`, then an ordered list of blocks over a state, then `head`.
//!
//! From this one shape follow activation checkpointing, sharding by block, pipeline cuts and adapters, with no code per
//! model. Nothing here knows a particular model, a loss, or a rank.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::remat::{self, Recompute};

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
    /// Tokens [B, T, D] that each block rewrites (FLUX: text and image tokens, later both joined, text first). A block may put
    /// streams end to end; it moves no token otherwise, and what it does to a token depends on others by self-attention alone.
    pub stream: Vec<Tensor>,
    /// Tensors every block reads and none writes (time embedding, rotary tables).
    pub shared: Vec<Tensor>,
    /// Places in `shared` of tensors with a row (dim 0) for each token: those of the first stream, then of the next.
    pub by_token: Vec<usize>,
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
    /// The work of running it, next to the model's other blocks.
    fn cost(&self) -> f64 {
        f64::from(u8::from(self.has_parameters()))
    }
}

/// The block that a parameter belongs to, by its path: `transformer_blocks.3` of `transformer_blocks.3.attn.to_q.weight`; none
/// for a parameter outside of blocks.
pub fn block_of(name: &str) -> Option<&str> {
    let list = name.find('.')?;
    let end = list + 1 + name[list + 1..].find('.')?;
    name[list + 1..end].bytes().all(|byte| byte.is_ascii_digit()).then_some(&name[..end])
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

    /// `embed`, all blocks, `head`. Of the blocks that `recompute` covers, activations are not kept for backward.
    fn forward(&self, inputs: &Inputs, recompute: Recompute) -> Result<Tensor> {
        let mut state = self.embed(inputs)?;
        self.advance(0..self.blocks().len(), &mut state, recompute)?;
        self.head(state)
    }

    /// These blocks of the chain, one after the other.
    fn advance(&self, blocks: Range<usize>, state: &mut State, recompute: Recompute) -> Result<()> {
        for index in blocks {
            let block = &self.blocks()[index];
            state.stream = if recompute.covers(index) {
                remat::checkpoint(block, state, recompute.offload)?
            } else {
                block.forward(&state.stream, &state.shared)?
            };
        }
        Ok(())
    }
}

//! Activation checkpointing: a block keeps its inputs only, on its device or in host memory, and runs again in backward.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::transformer::{SharedBlock, State};

/// What a backward finds of a pass, and what it computes again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recompute {
    /// Of so many blocks one is computed again, whole, beginning with the first; 0: none, 1: all.
    pub every: usize,
    /// Whether the inputs that such a block keeps wait in host memory.
    pub offload: bool,
}

impl Recompute {
    /// Every block.
    pub const ALL: Self = Self { every: 1, offload: false };

    /// Whether block `index` of the chain is computed again.
    pub fn covers(self, index: usize) -> bool {
        self.every > 0 && index.is_multiple_of(self.every)
    }
}

impl From<bool> for Recompute {
    fn from(all: bool) -> Self {
        Self { every: usize::from(all), offload: false }
    }
}

/// The block's next stream. Its activations are freed at once; backward runs it again and continues through it.
///
/// Gradients are bitwise those of calling the block, if each shared tensor that requires one is used once per block (else the
/// sum over its uses is taken in another order). The block must give the same result when it runs again.
///
/// With `offload`, the stream that it keeps is copied to host memory, behind what the device is doing, and comes back before the
/// block runs again; what all blocks share stays.
pub fn checkpoint(block: &SharedBlock, state: &State, offload: bool) -> Result<Vec<Tensor>> {
    let outputs = tch::no_grad(|| block.forward(&state.stream, &state.shared))?;
    // An output may be an input that the block passes on; a node must not become that tensor's history.
    let outputs: Vec<_> = outputs.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;

    // Parameters are no inputs of the node, so with frozen inputs it would be left out; the anchor keeps it in.
    let anchor = Tensor::f_zeros([1], (Kind::Float, Device::Cpu))?.f_set_requires_grad(true)?;
    let width = state.stream.len();
    let inputs: Vec<_> = state.stream.iter().chain(&state.shared).chain([&anchor]).map(Tensor::shallow_clone).collect();
    let keep = |(place, x): (usize, &Tensor)| -> Result<Kept> {
        let (tensor, device) = (x.f_detach()?, x.device());
        // To memory that a GPU can write by itself, so that nobody waits.
        let away = |tensor: &Tensor| tensor.f_to_device_(Device::Cpu, tensor.kind(), true, false);
        let tensor = if offload && place < width { away(&tensor)? } else { tensor };
        Ok(Kept { tensor, device, requires_grad: x.requires_grad() })
    };
    let saved: Vec<Kept> = inputs[..inputs.len() - 1].iter().enumerate().map(keep).collect::<Result<_>>()?;
    let block = SharedBlock::clone(block);

    torch::autograd::custom_node("Checkpoint", &inputs, &outputs, move |gradients| {
        let leaves: Vec<_> = saved
            .iter()
            .map(|Kept { tensor, device, requires_grad }| {
                Ok(torch::host::upload(tensor, *device)?.f_detach()?.f_set_requires_grad(*requires_grad)?)
            })
            .collect::<torch::Result<_>>()?;
        let again = tch::with_grad(|| block.forward(&leaves[..width], &leaves[width..]))?;
        let (mut roots, mut seeds) = (Vec::new(), Vec::new());
        for (output, gradient) in again.into_iter().zip(gradients) {
            if let Some(gradient) = gradient.as_ref().filter(|_| output.requires_grad()) {
                roots.push(output);
                seeds.push(gradient.shallow_clone());
            }
        }
        torch::autograd::backward(&roots, &seeds, false)?;
        let due = leaves.iter().map(|leaf| Some(leaf.grad()).filter(Tensor::defined));
        Ok(due.chain([None]).collect())
    })?;
    Ok(outputs)
}

/// An input that waits for its block to run again.
struct Kept {
    tensor: Tensor,
    /// Where it is needed.
    device: Device,
    requires_grad: bool,
}

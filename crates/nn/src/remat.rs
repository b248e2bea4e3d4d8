//! Activation checkpointing: a block keeps its inputs only, and runs again in backward.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::transformer::{SharedBlock, State};

/// The block's next stream. Its activations are freed at once; backward runs it again and continues through it.
///
/// Gradients are bitwise those of calling the block, if each shared tensor that requires one is used once per block (else the
/// sum over its uses is taken in another order). The block must give the same result when it runs again.
pub fn checkpoint(block: &SharedBlock, state: &State) -> Result<Vec<Tensor>> {
    let outputs = tch::no_grad(|| block.forward(&state.stream, &state.shared))?;
    // An output may be an input that the block passes on; a node must not become that tensor's history.
    let outputs: Vec<_> = outputs.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;

    // Parameters are no inputs of the node, so with frozen inputs it would be left out; the anchor keeps it in.
    let anchor = Tensor::f_zeros([1], (Kind::Float, tch::Device::Cpu))?.f_set_requires_grad(true)?;
    let width = state.stream.len();
    let inputs: Vec<_> = state.stream.iter().chain(&state.shared).chain([&anchor]).map(Tensor::shallow_clone).collect();
    let saved: Vec<_> = inputs[..inputs.len() - 1].iter().map(|x| (x.detach(), x.requires_grad())).collect();
    let block = SharedBlock::clone(block);

    torch::autograd::custom_node("Checkpoint", &inputs, &outputs, move |gradients| {
        let leaves: Vec<_> = saved
            .iter()
            .map(|(x, requires)| x.f_detach()?.f_set_requires_grad(*requires))
            .collect::<Result<_, _>>()
            .map_err(torch::Error::from)?;
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

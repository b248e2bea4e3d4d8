//! Experts: whole models for different samples, each held by a group of ranks of its own ([`Team::apart`]). Training needs no
//! more than that; where all draw one picture together, each expert's prediction goes to the ranks without it.

use nn::Inputs;
use spec::mesh::Axis;
use tch::Tensor;

use crate::error::Result;
use crate::team::Team;

/// What the expert of the ranks at `place` along `ep` predicts, in the compute kind, on every rank; `own` runs it where it is held.
pub fn predict(
    team: &Team,
    place: usize,
    inputs: &Inputs,
    own: impl FnOnce(&Inputs) -> nn::Result<Tensor>,
) -> Result<Tensor> {
    let prediction = if team.place(Axis::Ep).0 == place {
        own(inputs)?.f_to_kind(inputs.compute)?.f_contiguous()?
    } else {
        inputs.latents.f_zeros_like()?.f_to_kind(inputs.compute)?.f_contiguous()?
    };
    team.along(&[Axis::Ep])?.broadcast(&prediction, place)?.wait()?;
    Ok(prediction)
}

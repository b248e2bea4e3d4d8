//! Tensor parallel with sequence parallel: every rank has a share of the features of the large layers, whole heads and hidden
//! channels, and between those layers a share of the tokens.
//!
//! Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation". Before a layer of columns
//! the tokens are gathered; after a layer of rows the ranks' summands are added up, each rank receiving its tokens of the
//! sum. That moves as much as the all-reduce of plain tensor parallel does, and nothing outside of the layers is done twice.

use tch::Tensor;

use crate::error::Result;
use crate::exchange::Exchange;
use crate::layout::Layout;

/// This rank's share of the tokens [B, t, D] to those of all ranks [B, T, D].
pub(crate) fn enter(ranks: &Exchange, layout: &Layout, x: &Tensor) -> nn::Result<Tensor> {
    if ranks.size() == 1 {
        return Ok(x.shallow_clone());
    }
    let all = ranks.gather(x)?;
    layout.together(&all).map_err(|error| ranks.trouble().layer(error))
}

/// The ranks' summands [B, T, D] to this rank's share of the tokens of the sum [B, t, D].
pub(crate) fn leave(ranks: &Exchange, layout: &Layout, x: &Tensor) -> nn::Result<Tensor> {
    if ranks.size() == 1 {
        return Ok(x.shallow_clone());
    }
    let apart = layout.apart(x, ranks.size()).map_err(|error| ranks.trouble().layer(error))?;
    ranks.scatter(&apart)
}

/// Features of this rank [.., d] to those of all [.., D].
pub(crate) fn join(ranks: &Exchange, x: &Tensor) -> nn::Result<Tensor> {
    let all = ranks.gather(x)?;
    let put = || -> Result<Tensor> { Ok(all.f_movedim_int(0, -2)?.f_flatten(-2, -1)?) };
    put().map_err(|error| ranks.trouble().layer(error))
}

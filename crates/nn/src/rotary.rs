//! Rotary position embedding over interleaved pairs, as `diffusers.models.embeddings`.

use tch::{Device, Kind, Tensor};

use crate::dtype::wide;
use crate::error::Result;

/// Cosines and sines of `positions` (any float kind, `[S]`) for one axis of `dim` channels: f32 [S, dim] each, every value
/// twice in a row. Frequencies are computed in f64 (`get_1d_rotary_pos_embed(freqs_dtype=float64, repeat_interleave_real=True)`).
pub fn table(positions: &Tensor, dim: i64, theta: f64) -> Result<(Tensor, Tensor)> {
    let exponent =
        Tensor::f_arange_start_step(0, dim, 2, (Kind::Double, positions.device()))?.f_div_scalar(dim as f64)?;
    let base = Tensor::f_full([1], theta, (Kind::Double, positions.device()))?;
    let frequencies = base.f_pow(&exponent)?.f_reciprocal()?;
    let angles = positions.f_to_kind(Kind::Double)?.f_outer(&frequencies)?;
    let spread = |x: Tensor| x.f_repeat_interleave_self_int(2, 1, None)?.f_to_kind(Kind::Float);
    Ok((spread(angles.f_cos()?)?, spread(angles.f_sin()?)?))
}

/// Tables of several axes side by side: `ids` [S, axes] with channel counts `dims`; f32 [S, sum of dims] each.
pub fn tables(ids: &Tensor, dims: &[i64], theta: f64) -> Result<(Tensor, Tensor)> {
    let axes = (0i64..).zip(dims).map(|(axis, &dim)| table(&ids.f_select(1, axis)?, dim, theta));
    let (cos, sin): (Vec<_>, Vec<_>) = axes.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    Ok((Tensor::f_cat(&cos, -1)?, Tensor::f_cat(&sin, -1)?))
}

/// Rotates each pair of neighbouring channels of `x` [B, heads, S, D] by tables [S, D], in f32
/// (`apply_rotary_emb(use_real=True, use_real_unbind_dim=-1)`); the result has the kind of `x`.
pub fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let mut pairs = x.size();
    let width = pairs.pop().unwrap_or(0);
    pairs.extend([width / 2, 2]);
    let parts = x.f_reshape(&pairs)?.f_unbind(-1)?;
    let turned = Tensor::f_stack(&[parts[1].f_neg()?, parts[0].shallow_clone()], -1)?.f_reshape(x.size())?;
    let wide = x.f_to_kind(Kind::Float)?.f_mul(cos)?.f_add(&turned.f_to_kind(Kind::Float)?.f_mul(sin)?)?;
    Ok(wide.f_to_kind(x.kind())?)
}

/// Turns neighbouring channels of `x` [B, T, heads, D] as complex numbers, in f32 (f64 for `x` of f64); `table` f32 [T, D / 2, 2] holds cosine
/// and sine of each pair. The result has the kind of `x`.
pub fn turn(x: &Tensor, table: &Tensor) -> Result<Tensor> {
    let pairs = x.f_to_kind(wide(x.kind()))?.f_unflatten(-1, [-1, 2])?.f_contiguous()?.f_view_as_complex()?;
    let turned = pairs.f_mul(&table.f_to_kind(wide(x.kind()))?.f_view_as_complex()?.f_unsqueeze(1)?)?;
    Ok(turned.f_view_as_real()?.f_flatten(-2, -1)?.f_to_kind(x.kind())?)
}

/// Positions of a grid in reading order, f32 [rows * columns, 3]: (0, row, column), as FLUX numbers its image tokens.
pub fn grid_ids(rows: i64, columns: i64, device: Device) -> Result<Tensor> {
    let options = (Kind::Float, device);
    let row = Tensor::f_arange(rows, options)?.f_view([rows, 1])?.f_expand([rows, columns], false)?;
    let column = Tensor::f_arange(columns, options)?.f_view([1, columns])?.f_expand([rows, columns], false)?;
    let zero = Tensor::f_zeros([rows, columns], options)?;
    Ok(Tensor::f_stack(&[zero, row, column], -1)?.f_reshape([rows * columns, 3])?)
}

//! A network over pictures or clips, tile by tile: overlapping tiles go through on their own and are blended where they meet.
//!
//! As the VAEs of diffusers do it (`enable_tiling`). Less memory, for a result that differs a little along the seams.

use tch::{Kind, Tensor};

use crate::error::Result;

/// Sizes in the units of what goes in, and by how much what comes out is larger or smaller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiles {
    /// Sides of a tile.
    pub(crate) side: i64,
    /// From one tile to the next.
    pub(crate) stride: i64,
    /// Output positions for `per` input positions.
    pub(crate) gives: i64,
    /// See `gives`.
    pub(crate) per: i64,
}

impl Tiles {
    fn out(self, length: i64) -> i64 {
        length * self.gives / self.per
    }

    /// Whether [.., H, W] is larger than a tile.
    pub(crate) fn matter(self, x: &Tensor) -> bool {
        x.size().iter().rev().take(2).any(|side| *side > self.side)
    }

    /// `f` of all of [.., H, W].
    pub(crate) fn map(self, x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let size = x.size();
        let &[height, width] = size.last_chunk().unwrap_or(&[0, 0]);
        let overlap = self.out(self.side) - self.out(self.stride);
        let cut =
            |x: &Tensor, dim: i64, start: i64, length: i64, side: i64| x.f_narrow(dim, start, side.min(length - start));
        let mut above: Vec<Tensor> = Vec::new();
        let mut rows = Vec::new();
        for top in (0..height).step_by(self.stride as usize) {
            let band = cut(x, -2, top, height, self.side)?;
            let mut row: Vec<Tensor> = Vec::new();
            for left in (0..width).step_by(self.stride as usize) {
                let mut tile = f(&cut(&band, -1, left, width, self.side)?)?;
                if let Some(above) = above.get(row.len()) {
                    tile = blend(above, &tile, overlap, -2)?;
                }
                if let Some(before) = row.last() {
                    tile = blend(before, &tile, overlap, -1)?;
                }
                row.push(tile);
            }
            let kept = row.iter().map(|tile| {
                let (h, w) = (tile.size()[tile.dim() - 2], tile.size()[tile.dim() - 1]);
                let stride = self.out(self.stride);
                tile.f_narrow(-2, 0, stride.min(h))?.f_narrow(-1, 0, stride.min(w))
            });
            rows.push(Tensor::f_cat(&kept.collect::<std::result::Result<Vec<_>, _>>()?, -1)?);
            above = row;
        }
        let whole = Tensor::f_cat(&rows, -2)?;
        Ok(whole.f_narrow(-2, 0, self.out(height))?.f_narrow(-1, 0, self.out(width))?)
    }
}

/// `b` with its first positions along `dim` faded in over the last of `a`.
fn blend(a: &Tensor, b: &Tensor, overlap: i64, dim: i64) -> Result<Tensor> {
    let length = |x: &Tensor| x.size()[(x.dim() as i64 + dim) as usize];
    let count = overlap.min(length(a)).min(length(b));
    if count == 0 {
        return Ok(b.shallow_clone());
    }
    let mut shape = vec![1; b.dim()];
    shape[(b.dim() as i64 + dim) as usize] = count;
    let share = Tensor::f_arange(count, (Kind::Float, b.device()))?.f_div_scalar(count as f64)?;
    let share = share.f_to_kind(b.kind())?.f_view(shape.as_slice())?;
    let old = a.f_narrow(dim, length(a) - count, count)?.f_mul(&share.f_neg()?.f_add_scalar(1.0)?)?;
    let faded = b.f_narrow(dim, 0, count)?.f_mul(&share)?.f_add(&old)?;
    Ok(Tensor::f_cat(&[faded, b.f_narrow(dim, count, length(b) - count)?], dim)?)
}

//! What is held of a tensor that several hold together: all of it, or a cut along one dim, and of that perhaps only a run of
//! elements. Knows no rank.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::part::{BLOCK, Part};

/// What is held of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    whole: Vec<i64>,
    cut: Option<Cut>,
    run: Option<Part>,
    /// Whether its elements stand for blocks of another tensor's.
    of_blocks: bool,
}

/// Along `dim`, `part` of each segment; what is held of the segments lies end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cut {
    dim: usize,
    segments: Vec<i64>,
    part: Part,
}

/// Consecutive elements of a tensor, in row-major order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first, in the whole tensor.
    pub first: usize,
    /// How many.
    pub length: usize,
}

impl Share {
    /// All of a tensor of this shape.
    pub fn whole(shape: &[i64]) -> Self {
        Self { whole: shape.to_vec(), cut: None, run: None, of_blocks: false }
    }

    /// `part` of each of the `segments` of `dim`, which sum to its length. Each must divide by the number of parts.
    pub fn cut(shape: &[i64], dim: usize, segments: &[i64], part: Part) -> Result<Self> {
        if let Some(segment) = segments.iter().find(|segment| *segment % part.count as i64 != 0) {
            return Err(Error::Indivisible { what: "features".to_owned(), count: *segment, shares: part.count });
        }
        if shape.get(dim) != Some(&segments.iter().sum()) {
            return Err(Error::Invalid(format!("segments {segments:?} do not make dim {dim} of {shape:?}")));
        }
        let cut = Cut { dim, segments: segments.to_vec(), part };
        Ok(Self { whole: shape.to_vec(), cut: Some(cut), run: None, of_blocks: false })
    }

    /// Of this, only `part`, flat.
    #[must_use]
    pub fn run(mut self, part: Part) -> Self {
        self.run = Some(part);
        self
    }

    /// Shape of the whole tensor.
    pub fn whole_shape(&self) -> &[i64] {
        &self.whole
    }

    /// Whether it is cut along a dim.
    pub fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// Shape of the cut, whatever run of it is held.
    pub fn shape(&self) -> Vec<i64> {
        let mut shape = self.whole.clone();
        if let Some(cut) = &self.cut {
            shape[cut.dim] /= cut.part.count as i64;
        }
        shape
    }

    /// Shape of what is held: that of the cut, or `[elements]` of a run.
    pub fn held_shape(&self) -> Vec<i64> {
        match self.run {
            Some(_) => vec![self.range().len() as i64],
            None => self.shape(),
        }
    }

    /// The elements of the cut that are held.
    fn range(&self) -> Range<usize> {
        let total = self.shape().iter().product::<i64>() as usize;
        match self.run {
            None => 0..total,
            Some(part) if self.of_blocks => part.range_of_units(total),
            Some(part) => part.range(total),
        }
    }

    /// What is held of one number for each block of [`BLOCK`] elements of the whole, in row-major order, the last one perhaps
    /// short. Fails where a block is divided.
    pub(crate) fn blocks(&self) -> Result<Self> {
        let divided =
            |count: i64, shares: usize| Error::Indivisible { what: "blocks of 256".to_owned(), count, shares };
        let block = BLOCK as i64;
        let count = (self.whole.iter().product::<i64>() as usize).div_ceil(BLOCK) as i64;
        let cut = match &self.cut {
            None => None,
            Some(Cut { dim, segments, part }) => {
                let outer: i64 = self.whole[..*dim].iter().product();
                let inner: i64 = self.whole[dim + 1..].iter().product();
                if let Some(segment) = segments.iter().find(|n| **n / part.count as i64 * inner % block != 0) {
                    return Err(divided(segment * inner / block, part.count));
                }
                let row: Vec<i64> = segments.iter().map(|segment| segment * inner / block).collect();
                Some(Cut { dim: 0, segments: row.repeat(outer as usize), part: *part })
            }
        };
        let blocks = Self { whole: vec![count], cut, run: self.run, of_blocks: true };
        let (range, held) = (blocks.range(), self.shape().iter().product::<i64>() as usize);
        if self.range() != ((range.start * BLOCK).min(held)..(range.end * BLOCK).min(held)) {
            return Err(divided(count, self.run.map_or(1, |part| part.count)));
        }
        Ok(blocks)
    }

    /// Where some of the elements that are held lie in the whole, i64 `[n]`: those from `range` of what is held.
    pub(crate) fn places(&self, range: Range<i64>, device: Device) -> Result<Tensor> {
        let start = self.range().start as i64;
        let held = Tensor::f_arange_start(start + range.start, start + range.end, (Kind::Int64, device))?;
        let Some(Cut { dim, segments, part }) = &self.cut else { return Ok(held) };
        let mut sides: Vec<i64> = Vec::new();
        let mut from = 0;
        for segment in segments {
            let width = segment / part.count as i64;
            sides.extend((0..width).map(|side| from + width * part.index as i64 + side));
            from += segment;
        }
        let (inner, side): (i64, i64) = (self.whole[dim + 1..].iter().product(), self.whole[*dim]);
        let row = inner * sides.len() as i64;
        let within = held.f_remainder(row)?;
        let sides = Tensor::f_from_slice(&sides)?.f_to_device(device)?;
        let sides = sides.f_index_select(0, &within.f_floor_divide_scalar(inner)?)?;
        let rows = held.f_floor_divide_scalar(row)?.f_mul_scalar(side)?.f_add(&sides)?;
        Ok(rows.f_mul_scalar(inner)?.f_add(&within.f_remainder(inner)?)?)
    }

    /// Where the elements that are held lie in the whole, in the order in which they are held.
    pub fn runs(&self) -> Vec<Run> {
        let range = self.range();
        if range.is_empty() {
            return Vec::new();
        }
        let Some(Cut { dim, segments, part }) = &self.cut else {
            return vec![Run { first: range.start, length: range.len() }];
        };
        let size = |dims: &[i64]| dims.iter().product::<i64>() as usize;
        let (outer, side, inner) = (size(&self.whole[..*dim]), self.whole[*dim] as usize, size(&self.whole[dim + 1..]));
        let mut runs: Vec<Run> = Vec::new();
        let mut at = 0;
        for row in 0..outer {
            let mut from = row * side;
            for segment in segments.iter().map(|segment| *segment as usize) {
                let (width, first) = (segment / part.count * inner, (from + segment / part.count * part.index) * inner);
                let (a, b) = (range.start.max(at), range.end.min(at + width));
                if a < b {
                    let run = Run { first: first + a - at, length: b - a };
                    match runs.last_mut() {
                        Some(last) if last.first + last.length == run.first => last.length += run.length,
                        _ => runs.push(run),
                    }
                }
                at += width;
                from += segment;
            }
        }
        runs
    }

    /// What is held of `whole`.
    pub fn of(&self, whole: &Tensor) -> Result<Tensor> {
        let mut held = whole.shallow_clone();
        if let Some(Cut { dim, segments, part }) = &self.cut {
            let mut from = 0;
            let mut pieces = Vec::with_capacity(segments.len());
            for segment in segments {
                let width = segment / part.count as i64;
                pieces.push(held.f_narrow(*dim as i64, from + width * part.index as i64, width)?);
                from += segment;
            }
            held = Tensor::f_cat(&pieces, *dim as i64)?;
        }
        if self.run.is_some() {
            let range = self.range();
            held = held.f_reshape([-1])?.f_narrow(0, range.start as i64, range.len() as i64)?;
        }
        // Of its own memory, so that the whole may go.
        Ok(if self.cut.is_none() && self.run.is_none() { held } else { held.f_contiguous()?.copy() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counted(shape: &[i64]) -> Tensor {
        Tensor::arange(shape.iter().product::<i64>(), (Kind::Int64, Device::Cpu)).view(shape)
    }

    proptest! {
        /// Runs and slices say the same, and all shares together are the whole.
        #[test]
        fn shares_make_the_whole(dim in 0usize..3, segments in prop::collection::vec(1i64..4, 1..3), cuts in 1usize..4, runs in 0usize..4) {
            let segments: Vec<i64> = segments.into_iter().map(|n| n * cuts as i64).collect();
            let mut shape = vec![2, 3, 2];
            shape[dim] = segments.iter().sum();
            let whole = counted(&shape);
            let mut seen: Vec<i64> = Vec::new();
            for cut in Part::all(cuts) {
                for run in 0..runs.max(1) {
                    let mut share = Share::cut(&shape, dim, &segments, cut).unwrap();
                    if runs > 0 {
                        share = share.run(Part { index: run, count: runs });
                    }
                    let held = share.of(&whole).unwrap();
                    prop_assert_eq!(held.size(), share.held_shape());
                    let held: Vec<i64> = Vec::try_from(held.reshape([-1])).unwrap();
                    let by_runs: Vec<i64> = share.runs().iter().flat_map(|run| run.first..run.first + run.length).map(|n| n as i64).collect();
                    prop_assert_eq!(&held, &by_runs);
                    let places = share.places(0..held.len() as i64, Device::Cpu).unwrap();
                    prop_assert_eq!(&held, &Vec::<i64>::try_from(places).unwrap());
                    seen.extend(held);
                }
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..whole.numel() as i64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn rows_of_a_matrix_are_one_run() {
        let part = Part { index: 1, count: 2 };
        let share = Share::cut(&[4, 6], 0, &[4], part).unwrap();
        assert_eq!(share.runs(), [Run { first: 12, length: 12 }]);
        // Two inputs side by side, of each the second half.
        let share = Share::cut(&[2, 6], 1, &[2, 4], part).unwrap();
        assert_eq!(share.shape(), [2, 3]);
        let at = |first, length| Run { first, length };
        assert_eq!(share.runs(), [at(1, 1), at(4, 2), at(7, 1), at(10, 2)]);
    }

    /// Blocks go with their elements, or the share says that it divides one.
    #[test]
    fn blocks_are_held_with_their_elements() {
        let (mut kept, mut refused) = (0, 0);
        let shapes =
            [(vec![40, 512], 1, vec![512]), (vec![96, 200], 0, vec![32, 64]), (vec![3, 1024, 5], 1, vec![512, 512])];
        for (shape, dim, segments) in shapes {
            let whole = counted(&shape);
            let owners: Vec<i64> = Vec::try_from(whole.floor_divide_scalar(BLOCK as i64).reshape([-1])).unwrap();
            for (cuts, runs) in [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1)] {
                let mut seen = Vec::new();
                for cut in Part::all(cuts) {
                    for run in Part::all(runs) {
                        let mut share = Share::cut(&shape, dim, &segments, cut).unwrap();
                        if cuts == 1 {
                            share = Share::whole(&shape);
                        }
                        if runs > 1 {
                            share = share.run(run);
                        }
                        let Ok(blocks) = share.blocks() else {
                            refused += 1;
                            continue;
                        };
                        let of =
                            |share: &Share| share.runs().into_iter().flat_map(|run| run.first..run.first + run.length);
                        let mut expected: Vec<i64> = of(&share).map(|element| owners[element]).collect();
                        expected.dedup();
                        let found: Vec<i64> = of(&blocks).map(|block| block as i64).collect();
                        assert_eq!(found, expected, "{shape:?} {cut:?} {run:?}");
                        seen.extend(found);
                        kept += 1;
                    }
                }
                seen.sort_unstable();
                assert!(seen.is_empty() || seen.len() == whole.numel().div_ceil(BLOCK), "no block is held twice");
            }
        }
        assert!(kept > 20 && refused > 3, "{kept} {refused}");
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        let error = Share::cut(&[6, 2], 0, &[6], Part { index: 0, count: 4 }).unwrap_err();
        assert_eq!(error.to_string(), "6 features do not divide into 4 shares");
    }
}

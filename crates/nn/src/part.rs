//! A share of a tensor: a run of its elements in row-major order. Every tensor is cut into shares of one width, but for the
//! last ones, which may be short or empty. Larger tensors are cut between blocks of elements, so that what is kept for a block
//! is never divided. Knows no rank.

use std::ops::Range;

/// Share `index` of `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// From 0.
    pub index: usize,
    /// Shares in all.
    pub count: usize,
}

/// Elements of a block.
pub(crate) const BLOCK: usize = 256;
/// Tensors of fewer elements have no blocks: they are cut anywhere.
pub(crate) const LARGE: usize = 16 * BLOCK;

impl Part {
    /// Elements of a full share of `total`.
    pub fn width(self, total: usize) -> usize {
        let width = total.div_ceil(self.count);
        if total < LARGE { width } else { width.next_multiple_of(BLOCK) }
    }

    /// The elements of this share.
    pub fn range(self, total: usize) -> Range<usize> {
        Self::run(self.index, self.width(total), total)
    }

    /// This share of `total` things that may be cut anywhere, such as blocks.
    pub(crate) fn range_of_units(self, total: usize) -> Range<usize> {
        Self::run(self.index, total.div_ceil(self.count), total)
    }

    fn run(index: usize, width: usize, total: usize) -> Range<usize> {
        let first = (index * width).min(total);
        first..(first + width).min(total)
    }

    /// All shares of `count`, in order.
    pub fn all(count: usize) -> impl Iterator<Item = Self> {
        (0..count).map(move |index| Self { index, count })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shares_are_the_whole_in_order(total in 0usize..1000, count in 1usize..9) {
            let mut next = 0;
            for part in Part::all(count) {
                let range = part.range(total);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len() <= part.width(total));
                // Short shares come last, so that whole widths put end to end hold the elements in place.
                prop_assert!(range.is_empty() || range.start == part.index * part.width(total));
                next = range.end;
            }
            prop_assert_eq!(next, total);
        }

        #[test]
        fn blocks_of_a_large_tensor_stay_together(total in LARGE..20 * LARGE, count in 1usize..40) {
            for part in Part::all(count) {
                let (range, blocks) = (part.range(total), part.range_of_units(total.div_ceil(BLOCK)));
                prop_assert_eq!((blocks.start * BLOCK).min(total)..(blocks.end * BLOCK).min(total), range);
            }
        }
    }
}

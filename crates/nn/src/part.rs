//! A share of a tensor: a run of its elements in row-major order. Every tensor is cut into shares of one width, but for the
//! last ones, which may be short or empty. Knows no rank.

use std::ops::Range;

/// Share `index` of `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// From 0.
    pub index: usize,
    /// Shares in all.
    pub count: usize,
}

impl Part {
    /// Elements of a full share of `total`.
    pub fn width(self, total: usize) -> usize {
        total.div_ceil(self.count)
    }

    /// The elements of this share.
    pub fn range(self, total: usize) -> Range<usize> {
        let width = self.width(total);
        let first = (self.index * width).min(total);
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
    }
}

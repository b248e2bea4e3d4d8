//! Which rows go into which shard: arithmetic only.

use crate::{Parameters, Remainder};

/// What becomes of the `rows` of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Rows kept, from the first.
    pub(crate) kept: usize,
    /// Rows repeated after them, from the first, around and around.
    pub(crate) repeated: usize,
    /// Rows held back, the last ones.
    pub(crate) held: usize,
    /// Rows of a shard on average; at most four times as many.
    pub(crate) shard_rows: usize,
    /// Batches, counting a short one.
    pub(crate) batches: usize,
}

/// Plans a bucket of `rows` rows of `row_bytes` each.
pub(crate) fn plan(rows: usize, row_bytes: usize, parameters: &Parameters) -> Plan {
    let batch = usize::try_from(parameters.batch_size).unwrap_or(usize::MAX).max(1);
    let rest = rows % batch;
    let missing = if rest == 0 { 0 } else { batch - rest };
    let (kept, repeated, held) = match parameters.remainder {
        Remainder::Pad => (rows, missing, 0),
        Remainder::Short => (rows, 0, 0),
        Remainder::Drop => (rows - rest, 0, rest),
    };
    let affordable = usize::try_from(parameters.shard_bytes).unwrap_or(usize::MAX) / row_bytes.max(1);
    let shard_rows = (affordable / 4).max(1);
    Plan { kept, repeated, held, shard_rows, batches: (kept + repeated).div_ceil(batch) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters() -> impl Strategy<Value = Parameters> {
        let remainder = prop_oneof![Just(Remainder::Pad), Just(Remainder::Short), Just(Remainder::Drop)];
        (1u64..40, remainder, 1u64..100_000).prop_map(|(batch_size, remainder, shard_bytes)| Parameters {
            batch_size,
            remainder,
            shard_bytes,
            condition: None,
        })
    }

    proptest! {
        #[test]
        fn every_row_is_kept_or_held_and_batches_are_whole(rows in 0usize..500, row_bytes in 1usize..5000, p in parameters()) {
            let plan = plan(rows, row_bytes, &p);
            let batch = p.batch_size as usize;
            prop_assert_eq!(plan.kept + plan.held, rows);
            prop_assert!(plan.held < batch && plan.repeated < batch);
            prop_assert!(plan.shard_rows == 1 || 4 * plan.shard_rows * row_bytes <= p.shard_bytes as usize);
            let packed = plan.kept + plan.repeated;
            match p.remainder {
                Remainder::Short => prop_assert_eq!((plan.repeated, plan.held), (0, 0)),
                Remainder::Pad => prop_assert!(packed.is_multiple_of(batch) && plan.held == 0),
                Remainder::Drop => prop_assert!(packed.is_multiple_of(batch) && plan.repeated == 0),
            }
            prop_assert_eq!(plan.batches, packed.div_ceil(batch));
        }
    }

    #[test]
    fn the_default_changes_nothing() {
        let plan = plan(78, 122_880, &Parameters::default());
        assert_eq!(plan, Plan { kept: 78, repeated: 0, held: 0, shard_rows: 546, batches: 78 });
    }
}

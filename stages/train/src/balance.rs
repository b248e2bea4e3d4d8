//! Which rank takes which samples of a step, and when, so that no rank waits long for another. Arithmetic only.
//!
//! A micro-batch holds samples of one bucket, but ranks need not be on the same bucket at the same time: what they exchange then is
//! parameters and gradients, whose shapes are those of the model. So micro-batches are cut no larger than some cost, the same
//! for all buckets, sorted by cost, and dealt out; the best of all such cuts is taken, and of buckets dealt out one by one.

/// Samples of one bucket in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) count: usize,
    /// Of one sample, in any unit: tokens of its latents.
    pub(crate) cost: u64,
}

/// Some samples of a run, in its order: a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Piece {
    pub(crate) run: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// Who deals with whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ranks {
    pub(crate) count: usize,
    /// Samples that a rank takes at once, at most.
    pub(crate) local: usize,
    /// Whether all of them must run the model as often: each round then takes as long as its dearest micro-batch. Otherwise they
    /// wait for each other once, at the end.
    pub(crate) in_step: bool,
}

/// By round and rank; `None`: the rank has nothing to do.
pub(crate) type Rounds = Vec<Vec<Option<Piece>>>;

/// Deals out all samples of `runs`. It costs no more than [`bucket_by_bucket`], in no more rounds if all ranks go in step, and no
/// more than all ranks together would take without waiting, plus one full micro-batch of the dearest bucket.
pub(crate) fn balanced(runs: &[Run], ranks: Ranks) -> Rounds {
    let plain = bucket_by_bucket(runs, ranks);
    let mut limits: Vec<u64> = runs.iter().flat_map(|run| (1..=ranks.local as u64).map(|n| n * run.cost)).collect();
    limits.sort_unstable();
    limits.dedup();
    // What each costs beside its samples: a round in step, parameters that travel; else a micro-batch, a small one as a large one.
    let calls = |rounds: &Rounds| {
        if ranks.in_step { rounds.len() } else { rounds.iter().flatten().flatten().count() }
    };
    let most = calls(&plain);
    let dealt = limits.into_iter().map(|limit| dealt(runs, cut(runs, ranks.local, limit), ranks));
    let candidates = std::iter::once(plain).chain(dealt.filter(|rounds| calls(rounds) <= most));
    // The first of equals; there is always one.
    candidates.min_by_key(|rounds| (cost(runs, rounds, ranks), calls(rounds))).unwrap_or_default()
}

/// Every rank gets a share of each bucket, in as many rounds as it takes.
pub(crate) fn bucket_by_bucket(runs: &[Run], ranks: Ranks) -> Rounds {
    let mut rounds = Rounds::new();
    for (run, Run { count, .. }) in runs.iter().enumerate() {
        let width = ranks.local * ranks.count;
        for start in (0..*count).step_by(width) {
            let length = width.min(count - start);
            let border = |rank: usize| length * rank / ranks.count;
            let piece = |rank| Piece { run, first: start + border(rank), count: border(rank + 1) - border(rank) };
            rounds.push((0..ranks.count).map(|rank| Some(piece(rank)).filter(|piece| piece.count > 0)).collect());
        }
    }
    rounds
}

/// How long a step takes with `rounds`.
pub(crate) fn cost(runs: &[Run], rounds: &Rounds, ranks: Ranks) -> u64 {
    let of = |piece: &Option<Piece>| piece.map_or(0, |piece| piece.count as u64 * runs[piece.run].cost);
    if ranks.in_step {
        rounds.iter().map(|round| round.iter().map(of).max().unwrap_or(0)).sum()
    } else {
        (0..ranks.count).map(|rank| rounds.iter().map(|round| of(&round[rank])).sum()).max().unwrap_or(0)
    }
}

/// Pieces of no more than `local` samples and, but for single samples, no more than `limit`; those of a run as even as can be.
fn cut(runs: &[Run], local: usize, limit: u64) -> Vec<Piece> {
    let of = |(run, Run { count, cost }): (usize, &Run)| {
        let most = usize::try_from(limit / cost.max(&1)).unwrap_or(local).clamp(1, local);
        let (count, pieces) = (*count, count.div_ceil(most));
        let border = move |at: usize| count * at / pieces;
        (0..pieces).map(move |at| Piece { run, first: border(at), count: border(at + 1) - border(at) })
    };
    runs.iter().enumerate().flat_map(of).collect()
}

/// The dearest first: in step, those of a round are neighbours in this order; the rank that had least takes the dearest.
fn dealt(runs: &[Run], mut pieces: Vec<Piece>, ranks: Ranks) -> Rounds {
    let of = |piece: &Piece| piece.count as u64 * runs[piece.run].cost;
    pieces.sort_by_key(|piece| (std::cmp::Reverse(of(piece)), *piece));
    let (mut loads, mut lists) = (vec![0u64; ranks.count], vec![Vec::new(); ranks.count]);
    let width = if ranks.in_step { ranks.count } else { 1 };
    for (round, together) in pieces.chunks(width).enumerate() {
        let mut free: Vec<usize> = (0..ranks.count).collect();
        free.sort_by_key(|rank| loads[*rank]);
        for (piece, rank) in together.iter().zip(free) {
            loads[rank] += of(piece);
            if ranks.in_step {
                lists[rank].resize(round, None);
            }
            lists[rank].push(Some(*piece));
        }
    }
    let rounds = lists.iter().map(Vec::len).max().unwrap_or(0);
    let at = |round: usize| lists.iter().map(|list| list.get(round).copied().flatten()).collect();
    (0..rounds).map(at).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs() -> impl Strategy<Value = Vec<Run>> {
        let run = (1usize..20, 1u64..30).prop_map(|(count, cost)| Run { count, cost });
        prop::collection::vec(run, 0..8)
    }

    fn ranks() -> impl Strategy<Value = Ranks> {
        (1usize..9, 1usize..5, any::<bool>()).prop_map(|(count, local, in_step)| Ranks { count, local, in_step })
    }

    proptest! {
        #[test]
        fn every_sample_is_taken_once(runs in runs(), ranks in ranks()) {
            let rounds = balanced(&runs, ranks);
            let mut seen: Vec<Vec<bool>> = runs.iter().map(|run| vec![false; run.count]).collect();
            for round in &rounds {
                prop_assert_eq!(round.len(), ranks.count);
                prop_assert!(round.iter().any(Option::is_some), "nobody does anything");
                for piece in round.iter().flatten() {
                    prop_assert!((1..=ranks.local).contains(&piece.count));
                    for seen in &mut seen[piece.run][piece.first..piece.first + piece.count] {
                        prop_assert!(!std::mem::replace(seen, true));
                    }
                }
            }
            prop_assert!(seen.into_iter().flatten().all(|seen| seen));
        }

        /// Without waiting, all ranks together take `ideal`.
        #[test]
        fn it_costs_no_more_than_bucket_by_bucket_and_little_more_than_the_ideal(runs in runs(), ranks in ranks()) {
            let (rounds, plain) = (balanced(&runs, ranks), bucket_by_bucket(&runs, ranks));
            let found = cost(&runs, &rounds, ranks);
            prop_assert!(found <= cost(&runs, &plain, ranks));
            prop_assert!(!ranks.in_step || rounds.len() <= plain.len());
            let ideal = runs.iter().map(|run| run.count as u64 * run.cost).sum::<u64>().div_ceil(ranks.count as u64);
            let dearest = runs.iter().map(|run| run.cost * ranks.local as u64).max().unwrap_or(0);
            prop_assert!((ideal..=ideal + dearest).contains(&found), "{found} {ideal} {dearest}");
        }
    }

    /// Buckets as pictures of many shapes fill them, a few often and many once: hardly longer than without any waiting, where every
    /// bucket by itself takes twice to three times as long.
    #[test]
    fn skewed_buckets_take_little_longer_than_without_waiting() {
        let counts = [13, 6, 4, 2, 2, 1, 1, 1, 1, 1];
        let runs: Vec<Run> = counts.into_iter().zip(8..).map(|(count, cost)| Run { count, cost }).collect();
        for (count, local, in_step, [plain, found, ideal]) in [
            (4, 4, true, [158, 84, 80]),
            (8, 4, true, [133, 45, 40]),
            (8, 1, true, [133, 45, 40]),
            (4, 4, false, [158, 80, 80]),
            (8, 1, false, [133, 42, 40]),
        ] {
            let ranks = Ranks { count, local, in_step };
            let costs = [bucket_by_bucket(&runs, ranks), balanced(&runs, ranks)];
            assert_eq!(costs.map(|rounds| cost(&runs, &rounds, ranks)), [plain, found], "{ranks:?}");
            assert_eq!(runs.iter().map(|run| run.count as u64 * run.cost).sum::<u64>().div_ceil(count as u64), ideal);
        }
    }
}

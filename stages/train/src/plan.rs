//! Which samples each optimizer step takes, and in which micro-batches they go through the model.
//!
//! The order of an epoch is a function of (seed, epoch, sample id, bucket) alone, and a step takes the next
//! `global_batch_size` samples of it. Only then is a step cut: at borders of buckets, and into micro-batches. So neither
//! the micro-batch size nor the number of ranks changes which samples a step sees. With buckets one after the other this
//! is the peer's arithmetic, `ceil(batches / accumulation)` steps an epoch, when the global batch holds whole local ones.

use std::collections::{BTreeMap, BTreeSet};

use nn::rng::Stream;
use spec::Bucket;

use crate::balance::{self, Ranks, Run};
use crate::config::Config;

/// What the plan needs to know of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) sample_id: String,
    pub(crate) bucket: Bucket,
}

/// The rule.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Indices of items, by bucket, in the order of their ids.
    buckets: Vec<(Bucket, Vec<usize>)>,
    ids: Vec<String>,
    rule: Rule,
}

/// What of the training recipe the plan depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) seed: u64,
    pub(crate) shuffle: bool,
    /// `Some(n)`: what does not fill a last batch of `n` of a bucket is left out of the epoch.
    pub(crate) drop_last: Option<u64>,
    pub(crate) global_batch: u64,
    pub(crate) local_batch: u64,
    /// Ranks that share what goes through one model.
    pub(crate) ranks: u64,
    /// Whether all ranks must run the model as often.
    pub(crate) in_step: bool,
    /// Frames for which one of a latent stands, after its first.
    pub(crate) stride: u32,
}

impl Rule {
    /// That of a training recipe. `ranks` share what goes through one model, and run it as often as each other if `in_step`; one frame
    /// of a latent stands for `stride`, after its first.
    pub(crate) fn new(config: &Config, ranks: usize, in_step: bool, stride: u32) -> Self {
        Self {
            seed: config.seed,
            shuffle: config.data.shuffle,
            drop_last: config.data.drop_last,
            global_batch: config.step_scheduler.global_batch_size,
            local_batch: config.step_scheduler.local_batch_size,
            ranks: ranks as u64,
            in_step,
            stride,
        }
    }

    /// The work of a sample next to another: what it has of latents, and so of tokens.
    fn cost(&self, bucket: Bucket) -> u64 {
        let Bucket { width, height, frames } = bucket;
        u64::from(width) * u64::from(height) * u64::from(1 + frames.saturating_sub(1) / self.stride.max(1))
    }

    /// Samples of a bucket of `count` that take part in an epoch.
    fn kept(&self, count: usize) -> usize {
        self.drop_last.map_or(count, |batch| count - count % batch as usize)
    }

    /// A place in the queue: random, but the same for the same name; equal draws are told apart by the stable order.
    fn ticket(&self, purpose: &str, epoch: u64, name: &str) -> u64 {
        let draw = Stream::new(self.seed, &[purpose.into(), epoch.into(), name.into()]).uniform();
        (draw * 9_007_199_254_740_992.0) as u64
    }

    /// What every rank does of a step that has so many samples of each bucket.
    fn dealt(&self, mix: &[(Bucket, usize)]) -> balance::Rounds {
        let Self { local_batch, ranks, in_step, .. } = *self;
        let runs: Vec<Run> =
            mix.iter().map(|(bucket, count)| Run { count: *count, cost: self.cost(*bucket) }).collect();
        balance::balanced(&runs, Ranks { count: ranks as usize, local: local_batch as usize, in_step })
    }

    /// The dearest micro-batch of the first epochs of a data set with so many samples of each bucket, as its bucket and samples, and
    /// the most micro-batches that a rank has in one step.
    pub(crate) fn dearest(&self, counts: &BTreeMap<Bucket, usize>) -> Option<(Bucket, usize, usize)> {
        let mixes: BTreeSet<_> = (0..EPOCHS_LOOKED_AT).flat_map(|epoch| self.mixes(counts, epoch)).collect();
        let dealt: Vec<_> = mixes.iter().map(|mix| (mix, self.dealt(mix))).collect();
        let rounds = dealt.iter().map(|(_, rounds)| rounds.len()).max()?;
        let pieces = dealt
            .iter()
            .flat_map(|(mix, rounds)| rounds.iter().flatten().flatten().map(|piece| (mix[piece.run].0, piece.count)));
        let (bucket, count) = pieces.max_by_key(|(bucket, count)| self.cost(*bucket) * *count as u64)?;
        Some((bucket, count, rounds))
    }

    /// The steps of an epoch, as how many samples each has of each bucket.
    fn mixes(&self, counts: &BTreeMap<Bucket, usize>, epoch: u64) -> BTreeSet<Vec<(Bucket, usize)>> {
        let mut order: Vec<(&Bucket, &usize)> = counts.iter().collect();
        if self.shuffle {
            order.sort_by_cached_key(|(bucket, _)| self.ticket(BUCKETS, epoch, &bucket.to_string()));
        }
        let (mut mixes, mut step, mut room) = (BTreeSet::new(), Vec::new(), self.global_batch as usize);
        for (bucket, count) in order {
            let mut left = self.kept(*count);
            while left > 0 {
                let taken = left.min(room);
                step.push((*bucket, taken));
                (left, room) = (left - taken, room - taken);
                if room == 0 {
                    mixes.insert(std::mem::take(&mut step));
                    room = self.global_batch as usize;
                }
            }
        }
        if !step.is_empty() {
            mixes.insert(step);
        }
        mixes
    }
}

/// The purpose of the draws that order buckets.
const BUCKETS: &str = "bucket order";

/// Each has other buckets next to each other, and so other mixes in the steps between.
const EPOCHS_LOOKED_AT: u64 = 8;

/// Indices of items of one bucket that go through the model together.
pub(crate) type MicroBatch = Vec<usize>;

/// What one rank does while each rank does one micro-batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Round {
    /// This rank's share; empty if there are more ranks than samples.
    pub(crate) share: MicroBatch,
    /// A sample that costs little, for a rank without a share that must run the model as often as the others.
    pub(crate) stand_in: usize,
}

impl Plan {
    pub(crate) fn new(items: &[Item], rule: Rule) -> Self {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by(|a, b| (items[*a].bucket, &items[*a].sample_id).cmp(&(items[*b].bucket, &items[*b].sample_id)));
        let mut buckets: Vec<(Bucket, Vec<usize>)> = Vec::new();
        for index in order {
            match buckets.last_mut() {
                Some((bucket, members)) if *bucket == items[index].bucket => members.push(index),
                _ => buckets.push((items[index].bucket, vec![index])),
            }
        }
        Self { buckets, ids: items.iter().map(|item| item.sample_id.clone()).collect(), rule }
    }

    /// Samples of one epoch.
    pub(crate) fn samples_per_epoch(&self) -> u64 {
        self.buckets.iter().map(|(_, members)| self.rule.kept(members.len()) as u64).sum()
    }

    /// Optimizer steps of one epoch; the last may take fewer samples.
    pub(crate) fn epoch_len(&self) -> u64 {
        self.samples_per_epoch().div_ceil(self.rule.global_batch)
    }

    /// The epoch's samples: buckets one after the other.
    pub(crate) fn epoch(&self, epoch: u64) -> Epoch<'_> {
        let mut order: Vec<&(Bucket, Vec<usize>)> = self.buckets.iter().collect();
        if self.rule.shuffle {
            order.sort_by_cached_key(|(bucket, _)| self.rule.ticket(BUCKETS, epoch, &bucket.to_string()));
        }
        let samples = order.into_iter().flat_map(|(bucket, members)| {
            let mut members = members.clone();
            if self.rule.shuffle {
                members.sort_by_cached_key(|index| self.rule.ticket("sample order", epoch, &self.ids[*index]));
            }
            members.truncate(self.rule.kept(members.len()));
            members.into_iter().map(move |index| (*bucket, index))
        });
        Epoch { samples: samples.collect(), rule: &self.rule }
    }
}

/// One epoch, in order.
pub(crate) struct Epoch<'p> {
    samples: Vec<(Bucket, usize)>,
    rule: &'p Rule,
}

impl Epoch<'_> {
    /// The samples of step `step` of the epoch, in order, on all ranks together.
    pub(crate) fn samples(&self, step: u64) -> impl Iterator<Item = usize> {
        self.group(step).iter().map(|(_, index)| *index)
    }

    fn group(&self, step: u64) -> &[(Bucket, usize)] {
        let first = (step * self.rule.global_batch) as usize;
        let last = (first + self.rule.global_batch as usize).min(self.samples.len());
        &self.samples[first.min(last)..last]
    }

    /// What each rank does for step `step` of the epoch with those of its samples that `takes` is true of, in as many rounds as
    /// the others.
    pub(crate) fn rounds(&self, step: u64, takes: impl Fn(usize) -> bool) -> Vec<Vec<Round>> {
        let taken: Vec<_> = self.group(step).iter().filter(|(_, index)| takes(*index)).copied().collect();
        let samples: Vec<&[(Bucket, usize)]> = taken.chunk_by(|(a, _), (b, _)| a == b).collect();
        let mix: Vec<_> = samples.iter().map(|samples| (samples[0].0, samples.len())).collect();
        let cheapest =
            samples.iter().min_by_key(|samples| self.rule.cost(samples[0].0)).map_or(0, |samples| samples[0].1);
        let round = |piece: &Option<balance::Piece>| {
            let share = piece.map_or(&[][..], |at| &samples[at.run][at.first..][..at.count]);
            Round { share: share.iter().map(|(_, index)| *index).collect(), stand_in: cheapest }
        };
        let dealt = self.rule.dealt(&mix);
        (0..self.rule.ranks as usize).map(|rank| dealt.iter().map(|all| round(&all[rank])).collect()).collect()
    }

    /// The micro-batches of `rank` in step `step` of the epoch, and how many samples the step has on all ranks.
    #[cfg(test)]
    pub(crate) fn step(&self, step: u64, rank: u64) -> (Vec<MicroBatch>, u64) {
        let shares = self.rounds(step, |_| true).swap_remove(rank as usize).into_iter().map(|round| round.share);
        (shares.filter(|share| !share.is_empty()).collect(), self.group(step).len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn items(counts: &[usize]) -> Vec<Item> {
        let bucket = |i: usize| Bucket { width: 64 * (i as u32 + 1), height: 64, frames: 1 };
        let item = |bucket_index, i| Item { sample_id: format!("{bucket_index}-{i}"), bucket: bucket(bucket_index) };
        counts.iter().enumerate().flat_map(|(b, count)| (0..*count).map(move |i| item(b, i))).collect()
    }

    fn rule(global_batch: u64, local_batch: u64) -> Rule {
        Rule { seed: 3, shuffle: true, drop_last: None, global_batch, local_batch, ranks: 1, in_step: true, stride: 4 }
    }

    fn step_sets(plan: &Plan, epoch: u64) -> Vec<Vec<usize>> {
        let order = plan.epoch(epoch);
        (0..plan.epoch_len()).map(|step| order.step(step, 0).0.concat()).collect()
    }

    #[test]
    fn the_tarot_walk_through_ends_in_epoch_66_step_199() {
        let plan = Plan::new(&items(&[78]), rule(32, 4));
        assert_eq!(plan.epoch_len(), 3);
        let step = 199;
        assert_eq!(step / plan.epoch_len(), 66);
        let sizes: Vec<u64> = (0..3).map(|step| plan.epoch(0).step(step, 0).1).collect();
        assert_eq!(sizes, [32, 32, 14]);
        let (batches, _) = plan.epoch(0).step(2, 0);
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4, 2]);
    }

    #[test]
    fn epochs_differ_and_repeat_themselves() {
        let plan = Plan::new(&items(&[20, 30]), rule(8, 4));
        assert_eq!(step_sets(&plan, 4), step_sets(&plan, 4));
        assert_ne!(step_sets(&plan, 4), step_sets(&plan, 5));
        let other = Plan::new(&items(&[20, 30]), Rule { seed: 4, ..rule(8, 4) });
        assert_ne!(step_sets(&plan, 4), step_sets(&other, 4));
    }

    #[test]
    fn without_shuffle_the_order_is_that_of_ids() {
        let plan = Plan::new(&items(&[3, 2]), Rule { shuffle: false, ..rule(2, 2) });
        assert_eq!(step_sets(&plan, 7), [vec![0, 1], vec![2, 3], vec![4]]);
    }

    proptest! {
        #[test]
        fn every_sample_is_seen_once_an_epoch(counts in prop::collection::vec(1usize..20, 1..4), local in 1u64..5, accumulate in 1u64..4, epoch in 0u64..50) {
            let items = items(&counts);
            let plan = Plan::new(&items, rule(local * accumulate, local));
            let mut seen: Vec<usize> = step_sets(&plan, epoch).concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..items.len()).collect::<Vec<_>>());
        }

        #[test]
        fn micro_batches_hold_one_bucket_and_no_more_than_asked(counts in prop::collection::vec(1usize..20, 1..4), local in 1u64..5) {
            let items = items(&counts);
            let plan = Plan::new(&items, rule(local * 2, local));
            let epoch = plan.epoch(1);
            for batch in (0..plan.epoch_len()).flat_map(|step| epoch.step(step, 0).0) {
                prop_assert!(batch.len() as u64 <= local);
                prop_assert_eq!(batch.iter().map(|i| items[*i].bucket).collect::<BTreeSet<_>>().len(), 1);
            }
        }

        #[test]
        fn neither_split_nor_ranks_change_what_a_step_sees(counts in prop::collection::vec(1usize..20, 1..4), epoch in 0u64..9, ranks in 1u64..4) {
            let items = items(&counts);
            let whole = Plan::new(&items, rule(8, 8));
            let split = Plan::new(&items, Rule { ranks, ..rule(8, 2) });
            prop_assert_eq!(whole.epoch_len(), split.epoch_len());
            let (a, b) = (whole.epoch(epoch), split.epoch(epoch));
            for step in 0..whole.epoch_len() {
                let set = |batches: Vec<MicroBatch>| batches.concat().into_iter().collect::<BTreeSet<_>>();
                let shares: Vec<_> = (0..ranks).map(|rank| b.step(step, rank)).collect();
                prop_assert!(shares.iter().all(|(_, total)| *total == a.step(step, 0).1));
                let all = shares.into_iter().flat_map(|(batches, _)| batches).collect();
                prop_assert_eq!(set(a.step(step, 0).0), set(all));
            }
        }

        #[test]
        fn all_ranks_run_the_model_as_often(counts in prop::collection::vec(1usize..20, 1..4), ranks in 1u64..5) {
            let items = items(&counts);
            let plan = Plan::new(&items, Rule { ranks, ..rule(8, 2) });
            let epoch = plan.epoch(2);
            for step in 0..plan.epoch_len() {
                let rounds = epoch.rounds(step, |_| true);
                prop_assert_eq!(rounds.len() as u64, ranks);
                prop_assert!(rounds.iter().all(|own| own.len() == rounds[0].len()));
                // Whoever stands in has the least to do.
                for round in rounds.concat().iter().filter(|round| round.share.is_empty()) {
                    let width = |index: usize| items[index].bucket.width;
                    prop_assert!(epoch.samples(step).all(|index| width(round.stand_in) <= width(index)));
                }
            }
        }

        /// What an estimate of memory goes by is what the steps themselves do.
        #[test]
        fn the_dearest_micro_batch_is_that_of_the_steps(counts in prop::collection::vec(1usize..20, 1..4), ranks in 1u64..4, in_step: bool, local in 1u64..6, drop in prop::option::of(1u64..4)) {
            let items = items(&counts);
            let rule = Rule { ranks, in_step, drop_last: drop, ..rule(8, local) };
            let plan = Plan::new(&items, rule);
            let (mut dearest, mut most) = (0, 0);
            for (epoch, step) in (0..EPOCHS_LOOKED_AT).flat_map(|epoch| (0..plan.epoch_len()).map(move |step| (epoch, step))) {
                for rounds in plan.epoch(epoch).rounds(step, |_| true) {
                    most = most.max(rounds.len());
                    let costs = rounds.iter().map(|round| round.share.iter().map(|i| rule.cost(items[*i].bucket)).sum::<u64>());
                    dearest = dearest.max(costs.max().unwrap_or(0));
                }
            }
            let mut by_bucket = BTreeMap::new();
            for item in &items {
                *by_bucket.entry(item.bucket).or_default() += 1;
            }
            let found = rule.dearest(&by_bucket).map_or((0, 0), |(bucket, count, rounds)| (rule.cost(bucket) * count as u64, rounds));
            prop_assert_eq!(found, (dearest, most));
        }

        #[test]
        fn drop_last_leaves_whole_batches(counts in prop::collection::vec(1usize..20, 1..4), local in 1u64..5) {
            let plan = Plan::new(&items(&counts), Rule { drop_last: Some(local), ..rule(local, local) });
            let epoch = plan.epoch(0);
            let batches: Vec<_> = (0..plan.epoch_len()).flat_map(|step| epoch.step(step, 0).0).collect();
            prop_assert!(batches.iter().all(|batch| batch.len() as u64 == local));
            prop_assert_eq!(batches.len() as u64, counts.iter().map(|c| *c as u64 / local).sum::<u64>());
        }
    }
}

//! Prepares the next micro-batches on a thread of its own while the device works on the present one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use stage::Failure;

use crate::batch::{Batch, Draw, Recipe};
use crate::dataset::Dataset;
use crate::experts::Division;
use crate::plan::{Plan, Round};

/// Micro-batches made ahead of their use.
pub(crate) const AHEAD: usize = 2;

/// What comes out, in order: for each step its start, then its micro-batches.
pub(crate) enum Piece {
    Step(Start),
    Batch(Box<Batch>),
}

/// The start of a step, the same on all ranks but for `work`.
pub(crate) struct Start {
    /// Samples of the global batch, in the plan's order.
    pub(crate) samples: Vec<(usize, Draw)>,
    /// Which of them each share of the data has, in the order of its micro-batches.
    pub(crate) shares: Vec<Vec<usize>>,
    /// What follows for each expert that this rank holds, one after the other.
    pub(crate) work: Vec<Amount>,
}

/// How much of a step goes through one expert on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) batches: usize,
    /// Samples of its own in them.
    pub(crate) samples: usize,
}

/// Who shares the work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranks {
    /// This rank's share of the data.
    pub(crate) own: usize,
    pub(crate) division: Division,
    /// Whether all that hold an expert must run it as often.
    pub(crate) in_step: bool,
}

/// Runs `consume` with the pieces of `steps`, prepared in the background. `planned` maps the plan's indices to the data set's.
pub(crate) fn with_pieces<T>(
    recipe: &Recipe,
    dataset: &Dataset,
    plan: &Plan,
    planned: &[usize],
    ranks: Ranks,
    steps: Range<u64>,
    consume: impl FnOnce(&Pieces) -> Result<T, Failure>,
) -> Result<T, Failure> {
    thread::scope(|scope| {
        let (sender, receiver) = sync_channel(AHEAD);
        scope.spawn(move || {
            let mut epoch = None;
            for step in steps {
                let number = step / plan.epoch_len();
                let (_, order) = match epoch.take() {
                    Some((known, order)) if known == number => epoch.insert((number, order)),
                    _ => epoch.insert((number, plan.epoch(number))),
                };
                let at = step % plan.epoch_len();
                let draw = |index: usize| recipe.draw(&dataset.items()[planned[index]].sample_id, step);
                let drawn: BTreeMap<usize, Draw> = order.samples(at).map(|index| (index, draw(index))).collect();
                // By expert and place among its shares.
                let dealt: Vec<Vec<Vec<Round>>> = (0..ranks.division.experts)
                    .map(|expert| order.rounds(at, |index| drawn[&index].expert == expert))
                    .collect();
                // Of a share: the rounds of each of its experts.
                let rounds = |share: usize| {
                    let (experts, place) = ranks.division.of(share);
                    dealt[experts].iter().map(move |places| &places[place])
                };
                let own: Vec<Vec<&Round>> = rounds(ranks.own)
                    .map(|rounds| rounds.iter().filter(|r| ranks.in_step || !r.share.is_empty()).collect())
                    .collect();
                let share = |share| rounds(share).flatten().flat_map(|r| &r.share).map(|i| planned[*i]).collect();
                let amount = |rounds: &Vec<&Round>| Amount {
                    batches: rounds.len(),
                    samples: rounds.iter().map(|round| round.share.len()).sum(),
                };
                let start = Piece::Step(Start {
                    samples: order.samples(at).map(|index| (planned[index], drawn[&index])).collect(),
                    shares: (0..ranks.division.shares).map(share).collect(),
                    work: own.iter().map(amount).collect(),
                });
                let numbered =
                    own.iter().enumerate().flat_map(|(expert, rounds)| rounds.iter().map(move |r| (expert, r)));
                let made = numbered.map(|(expert, round)| -> Result<Piece, Failure> {
                    let stands_in = round.share.is_empty();
                    let members = if stands_in { std::slice::from_ref(&round.stand_in) } else { &round.share };
                    let samples: Vec<usize> = members.iter().map(|index| planned[*index]).collect();
                    let batch = Batch { expert, stands_in, ..recipe.batch(dataset, &samples, step)? };
                    Ok(Piece::Batch(Box::new(batch)))
                });
                for piece in std::iter::once(Ok(start)).chain(made) {
                    let failed = piece.is_err();
                    // The other side has gone: an interrupt, or an error of its own.
                    if sender.send(piece).is_err() || failed {
                        return;
                    }
                }
            }
        });
        consume(&Pieces(receiver))
    })
}

/// The consuming end.
pub(crate) struct Pieces(Receiver<Result<Piece, Failure>>);

impl Pieces {
    /// The next piece; `None` after the last one, or if the thread died.
    pub(crate) fn next(&self) -> Option<Result<Piece, Failure>> {
        self.0.recv().ok()
    }
}

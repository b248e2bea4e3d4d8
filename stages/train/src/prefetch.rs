//! Prepares the next micro-batches on a thread of its own while the device works on the present one.

use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use stage::Failure;

use crate::batch::{Batch, Draw, Recipe};
use crate::dataset::Dataset;
use crate::plan::Plan;

/// Micro-batches made ahead of their use.
const AHEAD: usize = 2;

/// What comes out, in order: for each step its start, then its micro-batches.
pub(crate) enum Piece {
    Step(Start),
    Batch(Box<Batch>),
}

/// The start of a step, the same on all ranks but for `batches`.
pub(crate) struct Start {
    /// Samples of the global batch, in the plan's order.
    pub(crate) samples: Vec<(usize, Draw)>,
    /// Which of them each rank has, by rank, in the order of its micro-batches.
    pub(crate) shares: Vec<Vec<usize>>,
    /// Micro-batches of this rank that follow.
    pub(crate) batches: usize,
}

/// Who shares the work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranks {
    pub(crate) own: usize,
    pub(crate) count: usize,
    /// Whether all of them must run the model as often.
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
                let mut rounds = order.rounds(at, ranks.own as u64);
                rounds.retain(|round| ranks.in_step || !round.share.is_empty());
                let seen = |sample: usize| (sample, recipe.draw(&dataset.items()[sample].sample_id, step));
                let samples = order.samples(at).map(|index| seen(planned[index])).collect();
                let share =
                    |rank| order.rounds(at, rank as u64).iter().flat_map(|r| &r.share).map(|i| planned[*i]).collect();
                let shares = (0..ranks.count).map(share).collect();
                let start = Piece::Step(Start { samples, shares, batches: rounds.len() });
                let made = rounds.iter().map(|round| -> Result<Piece, Failure> {
                    let stands_in = round.share.is_empty();
                    let members = if stands_in { std::slice::from_ref(&round.stand_in) } else { &round.share };
                    let samples: Vec<usize> = members.iter().map(|index| planned[*index]).collect();
                    let batch = Batch { stands_in, ..recipe.batch(dataset, &samples, step)? };
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

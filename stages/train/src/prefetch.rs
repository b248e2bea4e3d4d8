//! Prepares the next micro-batches on a thread of its own while the device works on the present one.

use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use stage::Failure;

use crate::batch::{Batch, Recipe};
use crate::dataset::Dataset;
use crate::plan::Plan;

/// Micro-batches made ahead of their use.
const AHEAD: usize = 2;

/// What comes out, in order: for each step its start, then its micro-batches.
pub(crate) enum Piece {
    /// A step begins: samples of its global batch, and micro-batches of it that follow.
    Step {
        samples: u64,
        batches: usize,
    },
    Batch(Box<Batch>),
}

/// Runs `consume` with the pieces of `steps`, prepared in the background. `planned` maps the plan's indices to the data set's.
pub(crate) fn with_pieces<T>(
    recipe: &Recipe,
    dataset: &Dataset,
    plan: &Plan,
    planned: &[usize],
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
                let (batches, samples) = order.step(step % plan.epoch_len(), 0);
                let start = Piece::Step { samples, batches: batches.len() };
                let made = batches.iter().map(|batch| {
                    let samples: Vec<usize> = batch.iter().map(|index| planned[*index]).collect();
                    recipe.batch(dataset, &samples, step).map(|batch| Piece::Batch(Box::new(batch)))
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

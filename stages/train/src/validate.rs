//! Loss at fixed noise levels and fixed noise over the same samples every time, so that its curve shows learning and not luck.

use nn::rng::Stream;
use stage::Failure;
use tables::Validation as Row;
use tch::Kind;

use crate::batch::{Batch, Recipe};
use crate::config::Validation;
use crate::dataset::Dataset;
use crate::plan::Item;
use crate::session::Session;
use crate::{between_ranks, step};

/// Which samples are looked at, by index: those whose names come first in a seeded order.
pub(crate) fn chosen(settings: &Validation, items: &[Item], seed: u64) -> Vec<usize> {
    let ticket = |index: &usize| {
        let id = items[*index].sample_id.as_str();
        (Stream::new(seed, &["validation".into(), id.into()]).bits64(), id)
    };
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_cached_key(|index| {
        let (draw, id) = ticket(index);
        (draw, id.to_owned())
    });
    order.truncate(settings.size.of(items.len()));
    // Same-shaped samples side by side.
    order.sort_by(|a, b| (items[*a].bucket, &items[*a].sample_id).cmp(&(items[*b].bucket, &items[*b].sample_id)));
    order
}

/// Mean loss at each of the levels that are trained, after step `step`.
pub(crate) fn losses(
    session: &Session,
    recipe: &Recipe,
    dataset: &Dataset,
    samples: &[usize],
    settings: &Validation,
    local_batch: u64,
    step: u64,
) -> Result<Vec<Row>, Failure> {
    let bucket = |index: &usize| dataset.items()[*index].bucket;
    let runs = samples.chunk_by(|a, b| bucket(a) == bucket(b));
    let batches: Vec<_> = runs.flat_map(|run| run.chunks(local_batch as usize)).collect();
    let loss_of = |expert: usize, batch: &[usize], sigma: f64| -> Result<f64, Failure> {
        let batch = Batch { expert, ..recipe.fixed_batch(dataset, batch, sigma as f32)? };
        let losses = tch::no_grad(|| step::sample_losses(session, &batch))?;
        Ok(losses.sum(Kind::Double).double_value(&[]))
    };
    let levels: Vec<_> =
        settings.sigmas.iter().filter_map(|sigma| Some((*sigma, recipe.expert(*sigma as f32)?))).collect();
    let sum = |(sigma, expert): &(f64, usize)| -> Result<f64, Failure> {
        let held = expert.checked_sub(session.first).and_then(|held| Some((held, session.experts.get(held)?)));
        // Other ranks have that expert.
        let Some((number, expert)) = held else { return Ok(0.0) };
        // Batches go round the ranks.
        let (rank, ranks) = expert.team.share();
        batches.chunks(ranks).try_fold(0.0, |sum, round| match round.get(rank) {
            Some(batch) => Ok(sum + loss_of(number, batch, *sigma)?),
            // Nothing of its own: it keeps step.
            None if expert.spread.in_step() => loss_of(number, round[0], *sigma).map(|_| sum),
            None => Ok(sum),
        })
    };
    let own = levels.iter().map(sum).collect::<Result<Vec<_>, _>>()?;
    let sums = session.team.sums(&own).map_err(between_ranks)?;
    let row = |((sigma, _), sum): (&(f64, usize), f64)| Row {
        step: step as i64,
        sigma: *sigma as f32,
        loss: sum / samples.len() as f64,
    };
    Ok(levels.iter().zip(sums).map(row).collect())
}

//! Loss at fixed noise levels and fixed noise over the same samples every time, so that its curve shows learning and not luck.

use nn::rng::Stream;
use stage::Failure;
use tables::Validation as Row;
use tch::Kind;

use crate::batch::Recipe;
use crate::config::Validation;
use crate::dataset::Dataset;
use crate::plan::Item;
use crate::session::Session;
use crate::step;

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

/// Mean loss at each of the levels, after step `step`.
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
    settings
        .sigmas
        .iter()
        .map(|sigma| {
            let mut sum = 0.0;
            for run in samples.chunk_by(|a, b| bucket(a) == bucket(b)) {
                for batch in run.chunks(local_batch as usize) {
                    let batch = recipe.fixed_batch(dataset, batch, *sigma as f32)?;
                    let losses = tch::no_grad(|| step::sample_losses(session, &batch))?;
                    sum += losses.sum(Kind::Double).double_value(&[]);
                }
            }
            let loss = sum / samples.len() as f64;
            Ok(Row { step: step as i64, sigma: *sigma as f32, loss })
        })
        .collect()
}

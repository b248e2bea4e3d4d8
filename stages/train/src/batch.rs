//! A micro-batch ready for the model: clean latents, noise, noise levels, weights and text, all drawn and stacked on the
//! CPU. Every draw is a function of (seed, sample, step), so it does not matter who shares the batch.

use diffusion::flow::{self, Weighting};
use diffusion::timestep::{Levels, Window};
use models::Family;
use nn::Conditions;
use nn::rng::Stream;
use stage::Failure;
use tch::{Device, Kind, Tensor};

use crate::dataset::Dataset;

/// How batches are drawn.
pub(crate) struct Recipe {
    pub(crate) seed: u64,
    pub(crate) levels: Levels,
    /// The levels of each expert.
    pub(crate) windows: Vec<Window>,
    pub(crate) weighting: Weighting,
    /// Chance that a sample's caption gives way to the empty one.
    pub(crate) dropout: f64,
    pub(crate) family: &'static dyn Family,
    /// Kind the text conditions are kept in.
    pub(crate) compute: Kind,
    /// Where batches are to go.
    pub(crate) device: Device,
}

/// Samples of one bucket, drawn for one step, and for one expert.
pub(crate) struct Batch {
    /// Number of the expert among those that the rank holds.
    pub(crate) expert: usize,
    pub(crate) draws: Vec<Draw>,
    /// f32 [B, ...].
    pub(crate) clean: Tensor,
    /// f32 [B, ...].
    pub(crate) noise: Tensor,
    pub(crate) conditions: Conditions,
    /// Belongs to another rank, and goes through the model here only because this rank has nothing else to do meanwhile.
    pub(crate) stands_in: bool,
}

/// What chance gave one sample at one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Draw {
    pub(crate) sigma: f32,
    /// Number of the expert that the level belongs to.
    pub(crate) expert: usize,
    pub(crate) weight: f32,
    pub(crate) dropped: bool,
    /// Key of the sample's LoRA dropout mask.
    pub(crate) mask: u64,
}

impl Recipe {
    /// The draw of a sample at an optimizer step.
    pub(crate) fn draw(&self, sample_id: &str, step: u64) -> Draw {
        let stream = |purpose: &str| Stream::new(self.seed, &[purpose.into(), sample_id.into(), step.into()]);
        let sigma = self.levels.sigma(self.seed, sample_id, step);
        Draw {
            sigma,
            // A level that is drawn is in a window.
            expert: self.expert(sigma).unwrap_or(0),
            weight: self.weighting.weight(sigma),
            dropped: stream("caption dropout").uniform() < self.dropout,
            mask: stream("lora dropout").bits64(),
        }
    }

    /// Number of the expert that a level belongs to, if it is trained.
    pub(crate) fn expert(&self, sigma: f32) -> Option<usize> {
        self.windows.iter().position(|window| window.holds(sigma))
    }

    /// Draws and stacks `samples` for optimizer step `step`.
    pub(crate) fn batch(&self, dataset: &Dataset, samples: &[usize], step: u64) -> Result<Batch, Failure> {
        let id = |sample: &usize| dataset.items()[*sample].sample_id.as_str();
        let draws = samples.iter().map(|sample| self.draw(id(sample), step)).collect();
        self.stack(dataset, samples, draws, |sample, shape| flow::noise(self.seed, id(sample), step, shape))
    }

    /// The same samples at a given level, with text, and with noise that no step shares: for validation.
    pub(crate) fn fixed_batch(&self, dataset: &Dataset, samples: &[usize], sigma: f32) -> Result<Batch, Failure> {
        let draw = Draw { sigma, expert: 0, weight: 1.0, dropped: false, mask: 0 };
        let noise = |sample: &usize, shape: &[i64]| {
            let id = dataset.items()[*sample].sample_id.as_str();
            let count = shape.iter().product::<i64>() as usize;
            let drawn = Stream::new(self.seed, &["validation noise".into(), id.into()]).normals(count);
            Tensor::from_slice(&drawn).view(shape)
        };
        self.stack(dataset, samples, vec![draw; samples.len()], noise)
    }

    fn stack(
        &self,
        dataset: &Dataset,
        samples: &[usize],
        draws: Vec<Draw>,
        noise: impl Fn(&usize, &[i64]) -> Tensor,
    ) -> Result<Batch, Failure> {
        let clean = dataset.latents(samples);
        let shape = clean.size();
        let noise: Vec<Tensor> = samples.iter().map(|sample| noise(sample, &shape[1..])).collect();
        let texts = samples.iter().zip(&draws).map(|(sample, draw)| dataset.text(*sample, draw.dropped));
        let texts = texts.collect::<Result<Vec<_>, _>>()?;
        let texts: Vec<_> = texts.iter().collect();
        let conditions = self.family.conditions(&texts, dataset.max_tokens(), Device::Cpu, self.compute);
        let conditions = conditions.map_err(Failure::from_diagnostic)?.into_iter();
        let ready = |tensor: &Tensor| torch::host::pinned(tensor, self.device).map_err(Failure::from_diagnostic);
        Ok(Batch {
            expert: 0,
            draws,
            clean: ready(&clean)?,
            noise: ready(&Tensor::stack(&noise, 0))?,
            conditions: conditions.map(|(name, tensor)| Ok((name, ready(&tensor)?))).collect::<Result<_, Failure>>()?,
            stands_in: false,
        })
    }
}

//! Blocks that the peer's schema has not: `ema`, `validation`, `samples`. Absent means off.

use serde::Serialize;
use spec::Problem;

use super::reader::Block;

/// Exponential moving average of the trained weights; with it on, checkpoints hold the average.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Ema {
    /// Share of the old average kept at each step.
    pub(crate) decay: f64,
}

impl Ema {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let decay = block.number("decay").unwrap_or(0.999);
        if !(0.0..1.0).contains(&decay) {
            block.problem("decay", Problem::new(format!("`ema.decay` is {decay}, expected 0 or more and below 1")));
        }
        block.finish();
        Self { decay }
    }
}

/// Loss at fixed noise levels and fixed noise, so that its curve is smooth.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Validation {
    pub(crate) size: Size,
    /// Whether the samples are kept out of training.
    pub(crate) held_out: bool,
    pub(crate) every_steps: u64,
    pub(crate) sigmas: Vec<f64>,
}

/// How many samples are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Size {
    Count(u64),
    Fraction(f64),
}

impl Size {
    /// Of `total` samples; at least one is left for training.
    pub(crate) fn of(self, total: usize) -> usize {
        let wanted = match self {
            Self::Count(count) => count as usize,
            Self::Fraction(fraction) => (total as f64 * fraction).round().max(1.0) as usize,
        };
        wanted.min(total.saturating_sub(1))
    }
}

impl Validation {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let size = match (block.positive("count"), block.number("fraction")) {
            (Some(_), Some(_)) => {
                block.problem(
                    "fraction",
                    Problem::new("`validation.count` and `validation.fraction` exclude each other"),
                );
                Size::Count(1)
            }
            (Some(count), None) => Size::Count(count),
            (None, fraction) => {
                let fraction = fraction.unwrap_or(0.05);
                if !(fraction > 0.0 && fraction < 1.0) {
                    let message = format!("`validation.fraction` is {fraction}, expected a value between 0 and 1");
                    block.problem("fraction", Problem::new(message));
                }
                Size::Fraction(fraction)
            }
        };
        let sigmas = block.numbers("sigmas").unwrap_or_else(|| vec![0.1, 0.3, 0.5, 0.7, 0.9]);
        if sigmas.is_empty() || sigmas.iter().any(|s| !(0.0..=1.0).contains(s)) {
            block.problem(
                "sigmas",
                Problem::new(format!("`validation.sigmas` is {sigmas:?}, expected values in [0, 1]")),
            );
        }
        let validation = Self {
            size,
            held_out: block.flag("held_out").unwrap_or(true),
            every_steps: block.positive("every_steps").unwrap_or(100),
            sigmas,
        };
        block.finish();
        validation
    }
}

/// Pictures drawn while training, to `samples/step_S/`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Samples {
    pub(crate) prompts: Vec<String>,
    pub(crate) every_steps: u64,
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// Frames of a clip, for a model of clips.
    pub(crate) frames: u32,
    pub(crate) steps: u64,
    pub(crate) guidance: f64,
    /// That of a second denoiser; `guidance` if it is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) guidance_2: Option<f64>,
    pub(crate) seed: u64,
}

impl Samples {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let prompts = block.texts("prompts").unwrap_or_default();
        if prompts.is_empty() {
            block.problem(
                "prompts",
                Problem::new("`samples` names no prompts").help("set `samples.prompts`, or remove the block"),
            );
        }
        let mut side = |key| u32::try_from(block.positive(key).unwrap_or(512)).unwrap_or(u32::MAX);
        let (width, height) = (side("width"), side("height"));
        let samples = Self {
            prompts,
            every_steps: block.positive("every_steps").unwrap_or(100),
            width,
            height,
            frames: u32::try_from(block.positive("frames").unwrap_or(1)).unwrap_or(u32::MAX),
            steps: block.positive("steps").unwrap_or(28),
            guidance: block.number("guidance").unwrap_or(3.5),
            guidance_2: block.number("guidance_2"),
            seed: block.count("seed").unwrap_or(0),
        };
        block.finish();
        samples
    }
}

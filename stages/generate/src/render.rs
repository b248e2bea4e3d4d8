//! From shots to pictures or clips with one set of weights: noise, the sampler's steps, the VAE.

use std::ops::ControlFlow;

use diffusion::sample::{Denoiser, Guidance, sample};
use diffusion::schedule::{Scheduler, Spacing};
use media::Picture;
use models::{DynTransformer, DynVae, Family, Text};
use nn::Conditions;
use stage::Failure;
use tch::{Device, Kind, Tensor, no_grad};

use crate::parameters::Parameters;
use crate::plan::Shot;
use crate::texts::Texts;
use crate::{picture, unusable};

/// A loaded model.
pub(crate) struct Renderer<'a> {
    /// Its family.
    pub(crate) family: &'static dyn Family,
    /// The denoisers, each with the lowest level that it is for.
    pub(crate) denoisers: Vec<(f64, DynTransformer)>,
    /// The VAE.
    pub(crate) vae: &'a DynVae,
    /// Levels of noise.
    pub(crate) scheduler: &'a Scheduler,
    /// Whether the denoiser embeds a guidance scale.
    pub(crate) takes_guidance: bool,
    /// Frames to draw.
    pub(crate) frames: u32,
    /// Where all of it is.
    pub(crate) device: Device,
    /// What was asked.
    pub(crate) parameters: &'a Parameters,
}

impl Renderer<'_> {
    /// Draws shots that agree on whether, and how strongly, they steer away from something: the frames of each, one of a picture.
    /// `None` if `on_step` broke.
    pub(crate) fn draw(
        &self,
        shots: &[Shot],
        texts: &Texts,
        on_step: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Option<Vec<Vec<Picture>>>, Failure> {
        let kind = Kind::from(self.parameters.dtype);
        let rules = self.family.sampling();
        let shape = self.vae.latent_shape(self.parameters.width, self.parameters.height, self.frames);
        let state = if rules.wide_latents { Kind::Float } else { kind };
        let one = [&[1], shape.as_slice()].concat();
        let noise = shots.iter().map(|shot| torch::ops::noise_seeded(shot.seed, &one, state));
        let noise = noise.collect::<torch::Result<Vec<_>>>();
        let tokens = self.family.image_tokens(&shape[1..]) as usize;
        let spacing = if rules.even_levels { Spacing::Even } else { Spacing::Trained };
        let schedule = self.scheduler.schedule(self.parameters.steps as usize, tokens, spacing).map_err(unusable)?;
        let max_tokens = self.parameters.max_sequence_length as usize;
        let conditions = |text: fn(&Shot) -> Option<&str>| -> Result<Option<Conditions>, Failure> {
            let rows: Option<Vec<&Text>> = shots.iter().map(|shot| texts.get(text(shot)?)).collect();
            rows.map(|rows| self.family.conditions(&rows, max_tokens, self.device, kind).map_err(unusable)).transpose()
        };
        let positive =
            conditions(|shot| Some(&shot.prompt))?.ok_or_else(|| spec::Problem::new("a prompt was not encoded"))?;
        let negative = conditions(|shot| shot.negative.as_ref().map(|(text, _)| text.as_str()))?;
        let scale = shots.first().and_then(|shot| shot.negative.as_ref()).map(|(_, scale)| *scale);
        let scales = [scale, scale.and(self.parameters.guidance_2).or(scale)].map(|scale| scale.unwrap_or(1.0));
        let denoisers = self.denoisers.iter().zip(scales);
        let denoisers: Vec<_> =
            denoisers.map(|((from, model), scale)| Denoiser::new(model.as_ref(), *from, scale)).collect();
        let guidance = Guidance {
            positive: &positive,
            negative: negative.as_ref(),
            distilled: self.takes_guidance.then_some(self.parameters.guidance as f32),
        };
        let initial = Tensor::cat(&noise.map_err(unusable)?, 0).to_device(self.device);
        let latents =
            sample(&denoisers, &schedule, initial, &guidance, kind, on_step).map_err(Failure::from_diagnostic)?;
        let Some(latents) = latents else { return Ok(None) };
        // One at a time: decoding needs far more memory than denoising.
        let mut pictures = Vec::with_capacity(shots.len());
        for i in 0..shots.len() as i64 {
            let pixels = no_grad(|| self.vae.decode(&latents.narrow(0, i, 1))).map_err(Failure::from_diagnostic)?;
            finite(&pixels, &shots[i as usize])?;
            pictures.push(picture::to_frames(&pixels.get(0), kind).map_err(Failure::from_error)?);
        }
        Ok(Some(pictures))
    }
}

fn finite(pixels: &Tensor, shot: &Shot) -> Result<(), Failure> {
    if i64::try_from(pixels.isfinite().all()).map_err(Failure::from_error)? != 0 {
        return Ok(());
    }
    let problem = spec::Problem::new(format!(
        "the picture of {:?} with seed {} has infinite or undefined pixels",
        shot.prompt, shot.seed
    ))
    .help("the weights may be broken, or need `dtype = \"float32\"`");
    Err(Failure::new(stage::Exit::Numbers, problem))
}

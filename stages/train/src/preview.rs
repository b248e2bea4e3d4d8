//! Sample pictures while training: prompts are encoded at the start and their encoders freed; the VAE is loaded for each round.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use diffusion::sample::{Denoiser, Guidance, Predict, sample};
use diffusion::schedule::{Scheduler, Spacing};
use media::Picture;
use models::{DynTransformer, Text};
use nn::{BuildOptions, Builder, Conditions, Recompute, Weights};
use stage::{Events, Failure};
use tch::{Kind, Tensor};

use crate::config::Samples;
use crate::experts::Role;
use crate::session::{STEM, Session};
use crate::{between_ranks, unusable};

/// What is drawn, ready to be drawn again.
pub(crate) struct Preview<'a> {
    settings: &'a Samples,
    /// Of this rank's prompts: one out of as many as there are ranks.
    texts: Vec<Text>,
    /// The empty prompt, where guidance steers away from it.
    empty: Option<Text>,
    scheduler: Scheduler,
    max_tokens: usize,
}

impl<'a> Preview<'a> {
    /// Encodes the prompts.
    pub(crate) fn prepare(settings: &'a Samples, session: &Session, max_tokens: usize) -> Result<Self, Failure> {
        let options = BuildOptions::frozen(session.device, session.compute);
        let (rank, ranks) = shares(session);
        let own: Vec<String> = settings.prompts.iter().skip(rank).step_by(ranks).cloned().collect();
        let (mut texts, mut empty) = (Vec::new(), None);
        if !own.is_empty() {
            let encoders = session.family.text_encoders(&session.folder, options).map_err(unusable)?;
            texts = tch::no_grad(|| encoders.encode(&own, max_tokens)).map_err(unusable)?;
            if session.family.sampling().classifier_free && settings.guidance > 1.0 {
                empty = tch::no_grad(|| encoders.encode(&[String::new()], max_tokens)).map_err(unusable)?.pop();
            }
        }
        let config =
            session.folder.json("scheduler/scheduler_config.json", "it gives the noise schedule").map_err(unusable)?;
        let scheduler = Scheduler::from_config(&config).map_err(unusable)?;
        Ok(Self { settings, texts, empty, scheduler, max_tokens })
    }

    fn conditions(&self, session: &Session, text: &Text) -> Result<Conditions, Failure> {
        session.family.conditions(&[text], self.max_tokens, session.device, session.compute).map_err(unusable)
    }

    /// All denoisers of the model. The experts of other ranks predict there, and failing of that goes to `lost`.
    fn denoisers<'m>(
        &self,
        session: &'m Session,
        untrained: &'m [(Role, DynTransformer)],
        lost: &'m RefCell<Option<parallel::Error>>,
    ) -> Vec<Denoiser<'m>> {
        let Samples { guidance, guidance_2, .. } = self.settings;
        let denoiser = |(number, role): (usize, &'m Role)| {
            let scale = if number == 0 { *guidance } else { guidance_2.unwrap_or(*guidance) };
            let from = role.denoiser.from;
            if let Some((_, model)) = untrained.iter().find(|(other, _)| other == role) {
                return Denoiser::new(model.as_ref(), from, scale);
            }
            let held = session.experts.iter().find(|expert| expert.role == *role);
            let predict: Predict<'m> = Box::new(move |inputs| match held {
                Some(expert) if session.experts.len() == session.roles.len() => {
                    expert.transformer.forward(inputs, Recompute::default())
                }
                held => session.predict_together(role, held, inputs).map_err(|error| {
                    let told = nn::Error::Invalid(error.to_string());
                    lost.replace(Some(error));
                    told
                }),
            });
            Denoiser { predict, from, scale }
        };
        session.denoisers.iter().enumerate().map(denoiser).collect()
    }

    /// Draws all prompts after step `step` into `samples/step_S/`, each on one rank; leaves off when interrupted.
    pub(crate) fn draw(&self, session: &Session, output: &Path, step: u64, events: &Events) -> Result<(), Failure> {
        let folder = output.join("samples").join(format!("step_{step}"));
        fs_err::create_dir_all(&folder)?;
        if !self.texts.is_empty() {
            self.draw_own(session, &folder, step, events)?;
        }
        session.team.barrier().map_err(between_ranks)?;
        let paths = (0..self.settings.prompts.len()).map(|number| picture_path(&folder, number));
        for path in paths.filter(|path| path.is_file()) {
            events.output(format!("sample after step {step}"), path);
        }
        Ok(())
    }

    fn draw_own(&self, session: &Session, folder: &Path, step: u64, events: &Events) -> Result<(), Failure> {
        let vae =
            session.family.vae(&session.folder, BuildOptions::frozen(session.device, Kind::Float)).map_err(unusable)?;
        let Samples { width, height, frames, steps, guidance, seed, prompts, .. } = self.settings;
        let rules = session.family.sampling();
        let shape = vae.latent_shape(*width, *height, *frames);
        let tokens = session.family.image_tokens(&shape[1..]) as usize;
        let spacing = if rules.even_levels { Spacing::Even } else { Spacing::Trained };
        let schedule = self.scheduler.schedule(*steps as usize, tokens, spacing).map_err(unusable)?;
        let state = if rules.wide_latents { Kind::Float } else { session.compute };
        let distilled = session.family.takes_guidance(&session.folder).map_err(unusable)?.then_some(*guidance as f32);
        let (rank, ranks) = shares(session);
        let untrained = untrained(session)?;
        let lost = RefCell::default();
        let denoisers = self.denoisers(session, &untrained, &lost);
        let own = prompts.iter().enumerate().skip(rank).step_by(ranks);
        for ((number, prompt), text) in own.zip(&self.texts) {
            let positive = self.conditions(session, text)?;
            let shape: Vec<i64> = std::iter::once(1).chain(shape.iter().copied()).collect();
            let noise = torch::ops::noise_seeded(*seed, &shape, state).map_err(Failure::from_diagnostic)?;
            let noise = noise.to_device(session.device);
            let negative = self.empty.as_ref().map(|text| self.conditions(session, text)).transpose()?;
            let guidance = Guidance { positive: &positive, negative: negative.as_ref(), distilled };
            let phase = format!("drawing sample {} of {}", number + 1, prompts.len());
            let mut on_step = |done: usize, total: usize| {
                events.progress(&phase, done as u64, Some(total as u64), "steps", None);
                // Ranks that draw together stop together, after the picture.
                let stop = events.interrupted() && !session.in_step();
                if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let drawn = sample(&denoisers, &schedule, noise, &guidance, session.compute, &mut on_step);
            let drawn = drawn.map_err(|error| lost.take().map_or_else(|| unusable(error), between_ranks))?;
            let Some(latents) = drawn else { return Ok(()) };
            if session.in_step() && !session.team.leads() {
                continue;
            }
            let pixels = tch::no_grad(|| vae.decode(&latents)).map_err(unusable)?;
            let path = picture_path(folder, number);
            let text = [("prompt", prompt.clone()), ("step", step.to_string()), ("seed", seed.to_string())];
            let text: Vec<_> = text.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            media::write_png(&path, &picture(&pixels)?, &text).map_err(unusable)?;
        }
        Ok(())
    }
}

/// The denoisers that are not trained, while something is drawn.
fn untrained(session: &Session) -> Result<Vec<(Role, DynTransformer)>, Failure> {
    let rest = session.denoisers.iter().filter(|role| !session.roles.contains(role));
    let load = |role: &Role| {
        let folder = session.folder.path.join(role.denoiser.component);
        let options = BuildOptions::frozen(session.device, session.compute);
        let builder = Builder::from_weights(Weights::open(&folder, STEM).map_err(unusable)?, options);
        let model = session.family.transformer(&session.folder, &builder).map_err(unusable)?;
        builder.finish().map_err(unusable)?;
        Ok((*role, model))
    };
    rest.map(load).collect()
}

/// Which share of the prompts is this rank's, of how many: all of them where one rank cannot run the model alone.
fn shares(session: &Session) -> (usize, usize) {
    if session.in_step() { (0, 1) } else { session.team.share() }
}

fn picture_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("{number:03}.png"))
}

/// Frames of a clip that are shown, at most.
const SHOWN: i64 = 6;

/// f32 [1, 3, H, W] in [-1, 1] to RGB8, rounded as diffusers does; of a clip [1, 3, F, H, W] some frames side by side.
fn picture(pixels: &Tensor) -> Result<Picture, Failure> {
    if pixels.dim() == 5 {
        let frames = pixels.size()[2];
        let shown = SHOWN.min(frames);
        let at = |n: i64| pixels.select(2, n * (frames - 1) / (shown - 1).max(1));
        let cells = (0..shown).map(|n| picture(&at(n))).collect::<Result<Vec<_>, _>>()?;
        return Ok(media::contact_sheet(&cells, cells.len()));
    }
    let (_, _, height, width) = pixels.size4().map_err(Failure::from_error)?;
    let bytes = ((pixels / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round().squeeze_dim(0).permute([1, 2, 0]);
    let rgb = Vec::try_from(bytes.to_kind(Kind::Uint8).contiguous().view(-1).to_device(tch::Device::Cpu));
    Ok(Picture { width: width as u32, height: height as u32, rgb: rgb.map_err(Failure::from_error)? })
}

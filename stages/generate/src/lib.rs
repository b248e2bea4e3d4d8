//! The stage `generate`: a checkpoint and prompts to pictures.
//!
//! Texts are encoded first and their encoders freed; then each set of weights draws every shot, so that only one denoiser
//! is in memory. Knows nothing of how the checkpoint was trained.

mod check;
mod checkpoint;
mod model;
mod parameters;
mod picture;
mod plan;
mod prompts;
mod render;
mod texts;

use std::ops::ControlFlow;

use diffusion::schedule::Scheduler;
use serde_json::json;
use stage::{About, CheckRequest, Checked, Exit, Failure, Ledger, Outcome, Stage, Work};
use tables::ImageRow;

use model::Models;
pub use parameters::{Parameters, Settings};
use picture::Sheet;
use plan::Shot;
use render::Renderer;
use texts::Texts;

/// What is told to someone who interrupts.
pub(crate) const KEPT: &str = "nothing of this stage is kept";

/// The stage.
#[derive(Debug, Clone, Copy)]
pub struct Generate;

impl Stage for Generate {
    type Parameters = Parameters;
    type Settings = Settings;

    fn describe() -> About {
        About {
            stage: "generate",
            version: 1,
            about: "Draws prompts with the trained checkpoint.",
            inputs: &[("checkpoint", "checkpoint")],
            optional: &["checkpoint"],
            output: "pictures",
            tables: &[("images", "images.parquet")],
            measured: &[],
            resumable: false,
            devices: &["cpu", "cuda"],
        }
    }

    fn check(parameters: &Parameters, settings: &Settings, request: &CheckRequest) -> Checked {
        check::check(parameters, settings, request)
    }

    fn run(work: &Work<Self>) -> Result<Outcome, Failure> {
        let (request, parameters) = (&work.request, &work.parameters);
        let device =
            torch::device::resolve(&request.device).map_err(|e| Failure::from_diagnostic(e).exit(Exit::Input))?;
        torch::device::set_threads(request.threads);
        let prompts = check::all_prompts(parameters, &request.base_dir)
            .map_err(|problems| Failure::new(Exit::Recipe, problems.into_iter().next().unwrap_or_default()))?;
        let shots = plan::shots(parameters, &prompts);
        let models = Models::open(work, device)?;

        let texts = {
            let encoders = models.text_encoders()?;
            Texts::encode(&shots, encoders.as_ref(), parameters.max_sequence_length as usize, &work.events)?
        };
        let vae = models.vae()?;
        let takes_guidance = models.takes_guidance()?;
        let scheduler = Scheduler::from_config(&models.scheduler()?).map_err(unusable)?;
        let mut album = Album::new(work, &shots);
        for base in if parameters.with_base { vec![false, true] } else { vec![false] } {
            let (transformer, weights) = models.transformer(base)?;
            let renderer = Renderer {
                family: models.family,
                transformer,
                vae: &vae,
                scheduler: &scheduler,
                takes_guidance,
                device,
                parameters,
            };
            for batch in batches(&shots, work.settings.batch_size) {
                let drawn = renderer.draw(batch, &texts, &mut |done, steps| album.step(batch, done, steps))?;
                let Some(pictures) = drawn else { return Err(Failure::interrupted(KEPT)) };
                for (shot, picture) in batch.iter().zip(&pictures) {
                    album.add(
                        shot,
                        base,
                        picture,
                        &picture::settings(shot, parameters, takes_guidance, &weights),
                        &weights,
                    )?;
                }
            }
        }
        let pictures = album.finish()?;
        let taken = pictures.len() as u64;
        Ok(Outcome {
            summary: format!("{taken} pictures of {} prompts", prompts.len()),
            ledger: Ledger { taken, out: taken, ..Ledger::default() },
            info: json!({ "pictures": pictures, "checkpoint": models.checkpoint_name() }),
        })
    }
}

/// Runs of shots that can be denoised together, in order.
fn batches(shots: &[Shot], size: usize) -> impl Iterator<Item = &[Shot]> {
    let scale = |shot: &Shot| shot.negative.as_ref().map(|(_, scale)| *scale);
    shots.chunk_by(move |a, b| scale(a) == scale(b)).flat_map(move |run| run.chunks(size.max(1)))
}

/// The pictures of a run as they come: files, rows, the sheet, progress.
struct Album<'a> {
    work: &'a Work<Generate>,
    sheet: Sheet,
    /// By (shot, base): the base model's come last but belong beside their shot.
    rows: std::collections::BTreeMap<(usize, bool), (ImageRow, media::Picture)>,
    total: usize,
}

impl<'a> Album<'a> {
    fn new(work: &'a Work<Generate>, shots: &[Shot]) -> Self {
        let per_shot = 1 + usize::from(work.parameters.with_base);
        let total = shots.len() * per_shot;
        let per_row = work.parameters.images_per_prompt as usize * per_shot;
        let sheet = Sheet::new(total, per_row, work.parameters.width, work.parameters.height);
        Self { work, sheet, rows: std::collections::BTreeMap::new(), total }
    }

    fn step(&self, batch: &[Shot], done: usize, steps: usize) -> ControlFlow<()> {
        let finished = self.rows.len() * steps + done * batch.len();
        let note = format!("picture {} of {}", (self.rows.len() + 1).min(self.total), self.total);
        self.work.events.progress("drawing", finished as u64, Some((self.total * steps) as u64), "steps", Some(note));
        if self.work.events.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn add(
        &mut self,
        shot: &Shot,
        base: bool,
        picture: &media::Picture,
        settings: &[(String, String)],
        weights: &picture::Weights,
    ) -> Result<(), Failure> {
        let file = shot.file_name(base);
        let path = self.work.request.output.join(&file);
        media::write_png(&path, picture, settings).map_err(unusable)?;
        self.work.events.output(shot.prompt.clone(), path);
        let row = picture::row(file, shot, &self.work.parameters, weights);
        self.rows.insert((shot.index, base), (row, self.sheet.cell(picture)));
        Ok(())
    }

    /// Writes the sheet and the table; names of all pictures.
    fn finish(self) -> Result<Vec<String>, Failure> {
        let output = &self.work.request.output;
        let (rows, cells): (Vec<_>, Vec<_>) = self.rows.into_values().unzip();
        self.sheet.write(&output.join("contact_sheet.png"), &cells).map_err(unusable)?;
        self.work.events.output("contact sheet", output.join("contact_sheet.png"));
        let files = rows.iter().map(|row| row.file.clone()).collect();
        tables::write(&output.join("images.parquet"), rows).map_err(unusable)?;
        Ok(files)
    }
}

/// A model, a table or a picture that cannot be used or written.
pub(crate) fn unusable(error: impl miette::Diagnostic + 'static) -> Failure {
    let failure = Failure::from_diagnostic(error);
    if failure.exit == Exit::Failed { failure.exit(Exit::Input) } else { failure }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_the_order_and_do_not_mix_guidance() {
        let shot = |index, scale: Option<f64>| Shot {
            index,
            prompt: String::new(),
            negative: scale.map(|scale| (String::new(), scale)),
            seed: 0,
        };
        let shots: Vec<_> = [None, None, None, Some(2.0), Some(2.0), Some(3.0), None]
            .into_iter()
            .enumerate()
            .map(|(i, s)| shot(i, s))
            .collect();
        let seen: Vec<Vec<usize>> =
            batches(&shots, 2).map(|batch| batch.iter().map(|shot| shot.index).collect()).collect();
        assert_eq!(seen, [vec![0, 1], vec![2], vec![3, 4], vec![5], vec![6]]);
    }
}

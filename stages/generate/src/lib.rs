//! The stage `generate`: a checkpoint and prompts to pictures or clips.
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
use std::path::Path;

use diffusion::schedule::Scheduler;
use serde_json::json;
use spec::counted;
use stage::{About, CheckRequest, Checked, Exit, Failure, Ledger, Outcome, Stage, Work};
use tables::ImageRow;

use model::Models;
pub use parameters::{Parameters, Settings};
use picture::{Drawn, Sheet};
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
        let models = Models::open(work, device)?;
        let rules = models.family.sampling();
        let shots = plan::shots(parameters, &prompts, rules);

        let texts = {
            let encoders = models.text_encoders()?;
            Texts::encode(&shots, encoders.as_ref(), parameters.max_sequence_length as usize, &work.events)?
        };
        let vae = models.vae()?;
        let check::Look { takes_guidance, clips, .. } = models.look;
        let scheduler = Scheduler::from_config(&models.scheduler()?).map_err(unusable)?;
        let drawn = Drawn {
            guided: takes_guidance || rules.classifier_free,
            classifier_free: rules.classifier_free,
            second: models.second_guidance(),
            frames: clips.map_or(1, |_| parameters.frames.unwrap_or(check::DEFAULT_FRAMES)),
            fps: parameters.fps.or(clips.map(|clips| clips.fps)).unwrap_or(1),
        };
        let mut album = Album::new(work, &shots, drawn);
        for base in if parameters.with_base { vec![false, true] } else { vec![false] } {
            let (denoisers, weights) = models.denoisers(base)?;
            let renderer = Renderer {
                family: models.family,
                denoisers,
                vae: &vae,
                scheduler: &scheduler,
                takes_guidance,
                frames: drawn.frames,
                device,
                parameters,
            };
            for batch in batches(&shots, work.settings.batch_size) {
                let results = renderer.draw(batch, &texts, &mut |done, steps| album.step(batch, done, steps))?;
                let Some(pictures) = results else { return Err(Failure::interrupted(KEPT)) };
                for (shot, frames) in batch.iter().zip(&pictures) {
                    let text = picture::settings(shot, parameters, drawn, &weights);
                    album.add(shot, base, frames, &text, &weights)?;
                }
            }
        }
        let pictures = album.finish()?;
        let taken = pictures.len() as u64;
        Ok(Outcome {
            summary: format!(
                "{} of {}",
                counted(taken, if drawn.frames > 1 { "clip" } else { "picture" }),
                counted(prompts.len(), "prompt")
            ),
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

/// Frames of a clip on the contact sheet, at most.
const SHOWN: usize = 6;

/// The pictures of a run as they come: files, rows, the sheet, progress.
struct Album<'a> {
    work: &'a Work<Generate>,
    drawn: Drawn,
    sheet: Sheet,
    style: Option<media::Style>,
    /// By (shot, base): the base model's come last but belong beside their shot.
    rows: std::collections::BTreeMap<(usize, bool), (ImageRow, Vec<media::Picture>)>,
    /// What the sheet calls each shot that has no trigger.
    labels: Vec<String>,
    total: usize,
}

impl<'a> Album<'a> {
    fn new(work: &'a Work<Generate>, shots: &[Shot], drawn: Drawn) -> Self {
        let per_shot = 1 + usize::from(work.parameters.with_base);
        let total = shots.len() * per_shot;
        let shown = SHOWN.min(drawn.frames as usize);
        let per_row = if shown > 1 { shown } else { work.parameters.images_per_prompt as usize * per_shot };
        let variants = if shown > 1 { Vec::new() } else { picture::variants(&work.parameters) };
        let sheet = Sheet::new(total * shown, per_row, work.parameters.width, work.parameters.height, variants);
        let palette: Vec<[u8; 3]> = work.parameters.palette.iter().map(|colour| colour.0).collect();
        let several = work.parameters.images_per_prompt > 1;
        let label =
            |shot: &Shot| if several { format!("{} ({})", shot.prompt, shot.seed) } else { shot.prompt.clone() };
        let labels = shots.iter().filter(|shot| shot.plain.is_none()).map(label).collect();
        let style = media::Style::new(&palette);
        Self { work, drawn, sheet, style, rows: std::collections::BTreeMap::new(), labels, total }
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
        frames: &[media::Picture],
        settings: &[(String, String)],
        weights: &picture::Weights,
    ) -> Result<(), Failure> {
        let file = shot.file_name(base, if frames.len() > 1 { "mp4" } else { "png" });
        let path = self.work.request.output.join(&file);
        match frames {
            [picture] => media::write_png(&path, picture, settings).map_err(unusable)?,
            frames => self.write_clip(&path, frames, settings)?,
        }
        self.work.events.output(shot.prompt.clone(), path);
        // A clip's score is the mean of its frames'.
        let mean = |style: &media::Style| {
            frames.iter().map(|frame| style.score(frame).mean()).sum::<f64>() / frames.len().max(1) as f64
        };
        let style = self.style.as_ref().map(mean);
        let row = picture::row(file, shot, &self.work.parameters, self.drawn, weights, style);
        // Evenly spread, the first and the last among them.
        let shown = SHOWN.min(frames.len());
        let cell = |n: usize| self.sheet.cell(&frames[n * (frames.len() - 1) / (shown - 1).max(1)]);
        self.rows.insert((shot.index, base), (row, (0..shown).map(cell).collect()));
        Ok(())
    }

    /// An MP4 with the settings as one JSON text in its `comment`, and if asked for a folder of frames.
    fn write_clip(&self, path: &Path, frames: &[media::Picture], settings: &[(String, String)]) -> Result<(), Failure> {
        let Parameters { width, height, frame_pngs, .. } = self.work.parameters;
        let format = video::Format::mp4();
        if format.codec() != "H.264" {
            self.work.events.warning(format!("this FFmpeg has no H.264 encoder: clips are {}", format.codec()));
        }
        let said: serde_json::Map<_, _> = settings.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        let text = [("comment".to_owned(), serde_json::Value::Object(said).to_string())];
        let mut writer =
            video::Writer::create(path, &format, (width, height), self.drawn.fps, &text).map_err(unusable)?;
        for frame in frames {
            writer.push(frame).map_err(unusable)?;
        }
        writer.finish().map_err(unusable)?;
        if frame_pngs {
            let folder = path.with_extension("");
            fs_err::create_dir_all(&folder)?;
            for (number, frame) in frames.iter().enumerate() {
                media::write_png(&folder.join(format!("frame_{number:04}.png")), frame, settings).map_err(unusable)?;
            }
        }
        Ok(())
    }

    /// Writes the sheet and the table; names of all pictures.
    fn finish(self) -> Result<Vec<String>, Failure> {
        let output = &self.work.request.output;
        // The sheet shows what was before training first.
        let mut shown: Vec<_> =
            self.rows.iter().map(|((shot, base), (_, cells))| ((*shot, !base), cells.clone())).collect();
        shown.sort_by_key(|(place, _)| *place);
        let cells: Vec<_> = shown.into_iter().flat_map(|(_, cells)| cells).collect();
        let rows: Vec<_> = self.rows.into_values().map(|(row, _)| row).collect();
        self.sheet.write(&output.join("contact_sheet.png"), &self.labels, &cells).map_err(unusable)?;
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
            plain: None,
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

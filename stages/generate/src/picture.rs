//! Finished pictures: from the VAE's output to bytes, what a PNG says about itself, and the row in `images`.

use std::path::Path;

use media::Picture;
use tables::ImageRow;
use tch::{Device, Kind, Tensor};

use crate::parameters::Parameters;
use crate::plan::Shot;

/// Which weights drew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Weights {
    /// The base model as the recipe writes it.
    pub(crate) model: String,
    /// Name and digest of the checkpoint, or what stands in for it.
    pub(crate) checkpoint: String,
    /// The adapter, if one is applied.
    pub(crate) lora: Option<String>,
}

/// Pixels f32 [3, H, W] in [-1, 1] to a picture, as diffusers' `numpy_to_pil` rounds (half to even).
///
/// `kind` is the VAE's: diffusers denormalises before it leaves it.
pub(crate) fn to_picture(pixels: &Tensor, kind: Kind) -> Result<Picture, tch::TchError> {
    let unit = (pixels.to_kind(kind) * 0.5 + 0.5).clamp(0.0, 1.0).to_kind(Kind::Float);
    let bytes = (unit * 255.0).round().to_kind(Kind::Uint8).permute([1, 2, 0]).contiguous().to_device(Device::Cpu);
    let size = bytes.size();
    Ok(Picture { width: size[1] as u32, height: size[0] as u32, rgb: Vec::try_from(bytes.view(-1))? })
}

/// Pixels of a picture [3, H, W] or a clip [3, F, H, W] to its frames.
pub(crate) fn to_frames(pixels: &Tensor, kind: Kind) -> Result<Vec<Picture>, tch::TchError> {
    if pixels.dim() == 3 {
        return Ok(vec![to_picture(pixels, kind)?]);
    }
    (0..pixels.size()[1]).map(|frame| to_picture(&pixels.select(1, frame), kind)).collect()
}

/// What guides a run: the meaning of `guidance`, and the length of what is drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drawn {
    /// Whether `guidance` has an effect.
    pub(crate) guided: bool,
    /// Whether it is that of classifier-free guidance.
    pub(crate) classifier_free: bool,
    /// `guidance` of the second denoiser, if there is one.
    pub(crate) second: Option<f64>,
    /// Frames, 1 for a picture.
    pub(crate) frames: u32,
    /// Frames in a second of a clip.
    pub(crate) fps: u32,
}

/// What a file says about itself: everything needed to draw it again.
pub(crate) fn settings(shot: &Shot, parameters: &Parameters, drawn: Drawn, weights: &Weights) -> Vec<(String, String)> {
    let mut text = vec![("prompt", shot.prompt.clone())];
    if let Some((negative, scale)) = &shot.negative {
        text.push(("negative_prompt", negative.clone()));
        if !drawn.classifier_free {
            text.push(("true_cfg_scale", scale.to_string()));
        }
    }
    text.push(("seed", shot.seed.to_string()));
    text.push(("steps", parameters.steps.to_string()));
    if drawn.guided {
        text.push(("guidance", parameters.guidance.to_string()));
    }
    if let Some(guidance) = drawn.second {
        text.push(("guidance_2", guidance.to_string()));
    }
    text.push(("width", parameters.width.to_string()));
    text.push(("height", parameters.height.to_string()));
    if drawn.frames > 1 {
        text.push(("frames", drawn.frames.to_string()));
        text.push(("fps", drawn.fps.to_string()));
    }
    text.push(("max_sequence_length", parameters.max_sequence_length.to_string()));
    text.push(("dtype", if Kind::from(parameters.dtype) == Kind::Float { "float32" } else { "bfloat16" }.to_owned()));
    text.push(("model", weights.model.clone()));
    text.push(("checkpoint", weights.checkpoint.clone()));
    if let Some(lora) = &weights.lora {
        text.push(("lora", lora.clone()));
        text.push(("lora_scale", parameters.lora_scale.to_string()));
    }
    text.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The row of a picture or clip.
pub(crate) fn row(
    file: String,
    shot: &Shot,
    parameters: &Parameters,
    drawn: Drawn,
    weights: &Weights,
    style: Option<f64>,
) -> ImageRow {
    ImageRow {
        file,
        prompt: shot.prompt.clone(),
        negative_prompt: shot.negative.as_ref().map(|(text, _)| text.clone()),
        seed: shot.seed as i64,
        width: parameters.width as i32,
        height: parameters.height as i32,
        frames: drawn.frames as i32,
        fps: (drawn.frames > 1).then_some(drawn.fps as i32),
        steps: parameters.steps as i32,
        guidance: parameters.guidance as f32,
        guidance_2: drawn.second.map(|guidance| guidance as f32),
        true_cfg: shot.negative.as_ref().filter(|_| !drawn.classifier_free).map(|(_, scale)| *scale as f32),
        lora: weights.lora.clone(),
        lora_scale: weights.lora.as_ref().map(|_| parameters.lora_scale as f32),
        checkpoint: weights.checkpoint.clone(),
        style: style.map(|style| style as f32),
    }
}

/// One sheet for all pictures.
pub(crate) struct Sheet {
    columns: usize,
    cell: (u32, u32),
    /// What tells pictures of one shot apart; empty if there is but one.
    variants: Vec<String>,
}

impl Sheet {
    /// Pixels of all cells at most; more pictures are shown smaller.
    const PIXELS: u64 = 1 << 26;

    /// Pixels across a cell at least: smaller pictures are shown whole times larger, so that labels fit and people see them.
    const READABLE: u32 = 160;

    /// A sheet for `count` pictures of one size. With `variants` it is a table: a row for each of them, a column for each
    /// shot. Without, `per_row` pictures belong together, and single ones fill a square.
    pub(crate) fn new(count: usize, per_row: usize, width: u32, height: u32, variants: Vec<String>) -> Self {
        let columns = if per_row > 1 { per_row } else { (count as f64).sqrt().ceil() as usize };
        let pixels = u64::from(width) * u64::from(height) * count as u64;
        let shrink = (Self::PIXELS as f64 / pixels.max(1) as f64).sqrt().min(1.0);
        let enlarge =
            if variants.is_empty() || width == 0 || shrink < 1.0 { 1 } else { Self::READABLE.div_ceil(width) };
        let side = |side: u32| ((f64::from(side * enlarge) * shrink) as u32).max(1);
        Self { columns, cell: (side(width), side(height)), variants }
    }

    /// A picture at the size it is shown in.
    pub(crate) fn cell(&self, picture: &Picture) -> Picture {
        media::cover_crop(picture, self.cell.0, self.cell.1).picture
    }

    /// Writes the sheet; `labels` are those of the shots, whose cells come variant by variant.
    pub(crate) fn write(&self, path: &Path, labels: &[String], cells: &[Picture]) -> Result<(), media::Error> {
        let sheet = if self.variants.is_empty() {
            media::contact_sheet(cells, self.columns)
        } else {
            media::labelled_sheet(&self.variants, labels, cells)
        };
        media::write_png(path, &sheet, &[])
    }
}

/// The rows of a sheet: without and with the trigger, each before and after training; none if there is nothing to compare.
pub(crate) fn variants(parameters: &Parameters) -> Vec<String> {
    let triggers = match &parameters.trigger {
        Some(trigger) => vec!["without the trigger".to_owned(), format!("with \"{trigger}\"")],
        None => vec![String::new()],
    };
    let stages: &[&str] = if parameters.with_base { &["before training", "after training"] } else { &[""] };
    let all = triggers.iter().flat_map(|trigger| stages.iter().map(move |stage| format!("{stage} {trigger}")));
    let all: Vec<String> = all.map(|label| label.trim().to_owned()).collect();
    if all.len() > 1 { all } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_half_to_even_and_clamp() {
        // (x / 2 + 0.5) * 255 is 0.5, 1.5, -25.5 and 280.5 for these.
        let values: Vec<f32> = [0.5, 1.5, -25.5, 280.5].iter().map(|byte| byte / 255.0 * 2.0 - 1.0).collect();
        let pixels = Tensor::from_slice(&values).view([1, 2, 2]).expand([3, 2, 2], false);
        let picture = to_picture(&pixels, Kind::Float).unwrap();
        assert_eq!((picture.width, picture.height), (2, 2));
        assert_eq!([picture.pixel(0, 0)[0], picture.pixel(0, 1)[0], picture.pixel(1, 1)[2]], [0, 0, 255]);
        assert!((1..=2).contains(&picture.pixel(1, 0)[1]));
    }

    #[test]
    fn a_sheet_keeps_what_belongs_together_in_a_row_and_its_size_in_bounds() {
        let sheet = Sheet::new(100, 1, 1024, 1024, Vec::new());
        assert_eq!((sheet.columns, sheet.cell), (10, (819, 819)));
        assert_eq!(sheet.cell(&Picture::filled(1024, 1024, [9, 9, 9])), Picture::filled(819, 819, [9, 9, 9]));
        assert_eq!(Sheet::new(6, 2, 64, 64, Vec::new()).columns, 2);
        assert_eq!(Sheet::new(2, 1, 64, 32, Vec::new()).cell, (64, 32));
    }

    #[test]
    fn what_is_compared_is_labelled() {
        let of = |extra: &str| {
            let parameters: Parameters = serde_json::from_str(&format!(r#"{{"model": "a/b"{extra}}}"#)).unwrap();
            variants(&parameters)
        };
        assert!(of("").is_empty());
        assert_eq!(of(r#", "with_base": true"#), ["before training", "after training"]);
        assert_eq!(of(r#", "trigger": "a trtcrd of""#), ["without the trigger", "with \"a trtcrd of\""]);
        assert_eq!(
            of(r#", "trigger": "x", "with_base": true"#),
            [
                "before training without the trigger",
                "after training without the trigger",
                "before training with \"x\"",
                "after training with \"x\""
            ]
        );
        assert_eq!(Sheet::new(4, 2, 96, 144, of(r#", "with_base": true"#)).cell, (192, 288));
    }
}

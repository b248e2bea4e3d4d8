//! What a recipe's `[generate]` table may say, and what of it is semantic.

use std::path::PathBuf;

use nn::Dtype;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stage::Colour;

/// What changes the pictures.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    /// Base model: a diffusers folder or a Hub id (`OWNER/NAME`, `OWNER/NAME@REVISION`). A full fine-tune brings its own weights; a LoRA is applied on this.
    pub model: String,
    /// Checkpoint inside the `train` artifact, such as `epoch_66_step_199`, or `best` for that of the lowest validation loss (`checkpoint.best_metric_key`); the newest when absent.
    #[serde(default)]
    pub checkpoint: Option<String>,
    /// A LoRA of your own: a folder or `.safetensors` file of diffusers or PEFT, or a Hub id. Goes on the trained checkpoint, or
    /// on the base model in a recipe without `[train]`; beside a LoRA trained here both count.
    #[serde(default)]
    pub lora: Option<String>,
    /// Strength of every LoRA that is applied, trained here or given as `lora`.
    #[serde(default = "default::lora_scale")]
    pub lora_scale: f64,
    /// Texts to draw.
    #[serde(default)]
    pub prompts: Vec<String>,
    /// More texts, after `prompts`: UTF-8, one a line; in a `.jsonl` file objects with `prompt`, `seed`, `negative_prompt`.
    #[serde(default)]
    pub prompts_file: Option<PathBuf>,
    /// What to steer away from, for prompts that name nothing else; `""` is allowed. Turns true classifier-free guidance on, where
    /// `guidance` does not mean that already.
    #[serde(default)]
    pub negative_prompt: Option<String>,
    /// Scale of true classifier-free guidance, above 1; 4 when there is a negative prompt and no scale.
    #[serde(default)]
    pub true_cfg_scale: Option<f64>,
    /// Pixels across.
    #[serde(default = "default::side")]
    pub width: u32,
    /// Pixels down.
    #[serde(default = "default::side")]
    pub height: u32,
    /// Frames of a clip, for a model of clips: 81 when absent. 1 draws a picture.
    #[serde(default)]
    pub frames: Option<u32>,
    /// Frames in a second of the file a clip is written to; the model's own when absent.
    #[serde(default)]
    pub fps: Option<u32>,
    /// Also write every frame of a clip as a PNG, into a folder of the clip's name.
    #[serde(default)]
    pub frame_pngs: bool,
    /// Denoising steps.
    #[serde(default = "default::steps")]
    pub steps: u32,
    /// Scale given to the guidance embedding of a distilled model (FLUX.1-dev), or that of classifier-free guidance in a
    /// pipeline that is built on it (Wan), where 1 is no guidance. A model with neither ignores it.
    #[serde(default = "default::guidance")]
    pub guidance: f64,
    /// That of the second denoiser of a model that has two (Wan 2.2, below its boundary); `guidance` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance_2: Option<f64>,
    /// Seed of the first picture of every prompt, so that prompts compare; the picture after it takes `seed + 1`, and so on.
    #[serde(default)]
    pub seed: u64,
    /// Pictures of each prompt.
    #[serde(default = "default::images_per_prompt")]
    pub images_per_prompt: u32,
    /// Tokens to which the long text encoder pads and cuts.
    #[serde(default = "default::max_sequence_length")]
    pub max_sequence_length: u32,
    /// Decodes large pictures in overlapping tiles: less memory, and values that differ a little along the seams. For VAEs that can.
    #[serde(default)]
    pub vae_tiling: bool,
    /// Number format of all weights and activations.
    #[serde(default)]
    pub dtype: Dtype,
    /// Also draw every picture with the untrained base model, as `…_base.png`.
    #[serde(default)]
    pub with_base: bool,
    /// Also draw every prompt with this text before it, such as `a trtcrd of`, from the same noise.
    #[serde(default)]
    pub trigger: Option<String>,
    /// Colours of the style that is trained. With them each picture gets a score: column `style` of `images`, explained in
    /// `crates/media/src/style.rs`.
    #[serde(default)]
    pub palette: Vec<Colour>,
}

/// What does not change the pictures.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Pictures denoised at once.
    pub batch_size: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { batch_size: 1 }
    }
}

mod default {
    pub(super) fn lora_scale() -> f64 {
        1.0
    }
    pub(super) fn side() -> u32 {
        1024
    }
    pub(super) fn steps() -> u32 {
        28
    }
    pub(super) fn guidance() -> f64 {
        3.5
    }
    pub(super) fn images_per_prompt() -> u32 {
        1
    }
    pub(super) fn max_sequence_length() -> u32 {
        512
    }
}

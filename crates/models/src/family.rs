//! What the stages ask of a model family: its components by name, how its text becomes conditions, and a few facts.
//!
//! A family knows its architectures and the diffusers layout; it does not know data, losses, ranks or recipes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nn::{BuildOptions, Builder, Conditions, Transformer};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::folder::ModelFolder;

/// A denoiser that can be shared between threads.
pub type DynTransformer = Box<dyn Transformer + Send + Sync>;
/// A VAE that can be shared between threads.
pub type DynVae = Box<dyn Vae + Send + Sync>;
/// Text encoders that can be shared between threads.
pub type DynTextEncoders = Box<dyn TextEncoders + Send + Sync>;

/// One entry of the registry.
pub trait Family: Sync + std::fmt::Debug {
    /// Short name, such as `flux`.
    fn name(&self) -> &'static str;
    /// `_class_name` of `model_index.json` that selects it.
    fn pipeline_class(&self) -> &'static str;
    /// Width and height of every bucket are multiples of this many pixels.
    fn pixel_quantum(&self, folder: &ModelFolder) -> u32;
    /// Width and height of any picture must be multiples of this many pixels.
    fn pixel_unit(&self, folder: &ModelFolder) -> Result<u32>;
    /// Globs of the files the VAE is made from.
    fn vae_parts(&self) -> &'static [&'static str];
    /// Globs of the files text encoders and tokenizers are made from.
    fn text_parts(&self) -> &'static [&'static str];
    /// Text encoder, by the name its rows are cached under → globs of the files that decide what it makes of a text.
    fn text_encoder_parts(&self) -> &'static [(&'static str, &'static [&'static str])];
    /// Globs of the files a denoiser and its noise schedule are made from.
    fn transformer_parts(&self) -> &'static [&'static str];
    /// Globs of the files a whole pipeline is made from.
    fn generate_parts(&self) -> &'static [&'static str];

    /// The denoisers, from the one of the noisiest levels down. All are of one architecture.
    fn denoisers(&self, _folder: &ModelFolder) -> Result<Vec<Denoiser>> {
        Ok(vec![Denoiser { component: "transformer", from: 0.0 }])
    }
    /// A denoiser, of whichever component the weights in `builder` are. Keep a clone of `builder` to call [`Builder::finish`] on it.
    fn transformer(&self, folder: &ModelFolder, builder: &Builder) -> Result<DynTransformer>;
    /// The VAE, in `options.storage`.
    fn vae(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynVae>;
    /// Text encoders with their tokenizers, in `options.storage`.
    fn text_encoders(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynTextEncoders>;

    /// What the denoiser takes of each text encoder.
    fn text_inputs(&self, folder: &ModelFolder) -> Result<Vec<TextInput>>;
    /// Stacks the text of each sample into what the denoiser takes; `max_tokens` is the pipeline's `max_sequence_length`.
    fn conditions(&self, rows: &[&Text], max_tokens: usize, device: Device, kind: Kind) -> Result<Conditions>;
    /// Patterns of the layers a LoRA goes to when the user names none.
    fn lora_targets(&self) -> &'static [&'static str];
    /// Whether the denoiser embeds a guidance scale.
    fn takes_guidance(&self, folder: &ModelFolder) -> Result<bool>;
    /// Size of the text encoders' `max_sequence_length` when the user names none.
    fn default_max_tokens(&self) -> usize;
    /// Largest `max_sequence_length`.
    fn max_tokens(&self) -> usize;
    /// Tokens the denoiser makes of a latent [.., h, w], which dynamic shift of the schedule depends on.
    fn image_tokens(&self, latent_size: &[i64]) -> i64;
    /// How the pipeline samples.
    fn sampling(&self) -> Sampling;
    /// How the model sees time; `None` for a model of pictures, whose latents have no time dim.
    fn clips(&self, folder: &ModelFolder) -> Result<Option<Clips>>;
}

/// One of a folder's denoisers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Denoiser {
    /// Name of its component.
    pub component: &'static str,
    /// The lowest noise level, in [0, 1], that it is for; the highest is where the one before it begins.
    pub from: f64,
}

impl Denoiser {
    /// Where what was trained of it lies in a folder for that of all: of `transformer` at the top, where diffusers looks for an
    /// adapter, of another in a sub-folder of its name.
    pub fn place(&self, folder: &Path) -> PathBuf {
        if self.component == "transformer" { folder.to_owned() } else { folder.join(self.component) }
    }
}

/// What a pipeline does around the denoiser, beyond what its scheduler's file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// Latents are kept in f32 between steps, and the initial noise is drawn so, whatever kind the denoiser computes in.
    pub wide_latents: bool,
    /// The scheduler is given `linspace(1, 1/n, n)`, not only the number of steps.
    pub even_levels: bool,
    /// `guidance_scale` is that of classifier-free guidance, against the empty prompt unless another is given.
    pub classifier_free: bool,
}

/// How a model of clips sees time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clips {
    /// Frames for each latent frame after the first: a clip has `1 + stride n` frames.
    pub stride: u32,
    /// Frames in a second.
    pub fps: u32,
}

impl Clips {
    /// Whether a clip may have so many frames.
    pub fn allows(self, frames: u32) -> bool {
        frames > 0 && (frames - 1).is_multiple_of(self.stride)
    }

    /// The most frames a clip may have that are no more than `frames`, which is at least 1.
    pub fn trimmed(self, frames: u32) -> u32 {
        (frames - 1) / self.stride * self.stride + 1
    }
}

/// What one text encoder makes of one text.
#[derive(Debug)]
pub struct Encoded {
    /// Rows of `embedding`, or tokens read where there is only a pooled vector.
    pub tokens: i64,
    /// [tokens, width].
    pub embedding: Option<Tensor>,
    /// `[width]`.
    pub pooled: Option<Tensor>,
}

/// What a denoiser takes of one text encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextInput {
    /// Name under which rows are cached.
    pub encoder: &'static str,
    /// Numbers of one vector.
    pub width: i64,
    /// One vector for the whole text rather than one for each token.
    pub pooled: bool,
}

/// One text: encoder → what it made.
pub type Text = BTreeMap<String, Encoded>;

/// How long a text is for one encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    /// Tokens of the whole text, with the special ones.
    pub tokens: usize,
    /// Tokens that are read; the rest is cut off.
    pub limit: usize,
}

/// The text encoders of a pipeline.
pub trait TextEncoders {
    /// Names under which rows are cached.
    fn names(&self) -> Vec<&'static str>;
    /// Texts to embeddings, one batch; `max_tokens` is the pipeline's `max_sequence_length`.
    fn encode(&self, prompts: &[String], max_tokens: usize) -> Result<Vec<Text>>;
    /// Encoder → how long a text is for it.
    fn lengths(&self, prompt: &str, max_tokens: usize) -> Result<BTreeMap<&'static str, Length>>;
}

/// From the VAE's latent `z` to what the denoiser works on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Normalisation {
    /// `(z - shift) * scale`.
    ScaleShift {
        /// `scaling_factor`.
        scale: f64,
        /// `shift_factor`, 0 if the configuration has none.
        shift: f64,
    },
    /// `(z - mean) / std` by channel.
    MeanStd {
        /// `latents_mean`.
        mean: Vec<f64>,
        /// `latents_std`.
        std: Vec<f64>,
    },
}

impl Normalisation {
    /// f32 [B, C, ..] from the VAE, normalised.
    pub fn apply(&self, z: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::ScaleShift { scale, shift } => z.f_sub_scalar(*shift)?.f_mul_scalar(*scale)?,
            Self::MeanStd { mean, std } => z.f_sub(&by_channel(mean, z)?)?.f_div(&by_channel(std, z)?)?,
        })
    }

    /// The inverse, rounded as diffusers' pipelines round before they decode.
    pub fn undo(&self, latents: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::ScaleShift { scale, shift } => latents.f_div_scalar(*scale)?.f_add_scalar(*shift)?,
            Self::MeanStd { mean, std } => {
                let inverse: Vec<f64> = std.iter().map(|std| f64::from(1.0 / *std as f32)).collect();
                latents.f_div(&by_channel(&inverse, latents)?)?.f_add(&by_channel(mean, latents)?)?
            }
        })
    }
}

/// One number for each channel of `like` [B, C, ..].
fn by_channel(values: &[f64], like: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; like.dim()];
    shape[1] = values.len() as i64;
    Ok(Tensor::f_from_slice(values)?.f_to_kind(like.kind())?.f_to_device(like.device())?.f_view(shape.as_slice())?)
}

/// What the encoder says about the latent of a picture or clip: a diagonal Gaussian, not normalised, f32.
#[derive(Debug)]
pub struct Posterior {
    /// [B, C, h, w], for clips [B, C, f, h, w].
    pub mean: Tensor,
    /// Of the same shape, clamped to [-30, 20].
    pub logvar: Tensor,
}

impl Posterior {
    /// The mean, or with standard normal `noise` of the same shape a sample.
    pub fn latent(&self, noise: Option<&Tensor>) -> Tensor {
        match noise {
            None => self.mean.shallow_clone(),
            Some(noise) => &self.mean + (&self.logvar * 0.5).exp() * noise,
        }
    }
}

/// A variational autoencoder, of pictures [B, 3, H, W] or of clips [B, 3, F, H, W] ([`Family::clips`] says which).
pub trait Vae {
    /// Pixels in [-1, 1], any float kind, to the posterior.
    fn posterior(&self, pixels: &Tensor) -> Result<Posterior>;
    /// Normalised latents, any float kind, to pixels f32, nominally in [-1, 1]; clamped if diffusers' decoder clamps.
    fn decode(&self, latents: &Tensor) -> Result<Tensor>;
    /// How latents are scaled.
    fn normalisation(&self) -> Normalisation;
    /// Shape of one latent: [C, h, w] of a picture, [C, f, h, w] of a clip.
    fn latent_shape(&self, width: u32, height: u32, frames: u32) -> Vec<i64>;

    /// Whether large pictures are worked on in tiles from now on, which needs less memory and shows a little along the seams.
    fn set_tiling(&mut self, on: bool) -> Result<()>;

    /// Pixels to normalised latents, f32; the posterior's mean unless `noise` is given.
    fn encode(&self, pixels: &Tensor, noise: Option<&Tensor>) -> Result<Tensor> {
        self.normalisation().apply(&self.posterior(pixels)?.latent(noise))
    }
}

//! What the stages ask of a model family: its components by name, how its text becomes conditions, and a few facts.
//!
//! A family knows its architectures and the diffusers layout; it does not know data, losses, ranks or recipes.

use std::collections::BTreeMap;

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

    /// The denoiser. Keep a clone of `builder` to call [`Builder::finish`] on it.
    fn transformer(&self, folder: &ModelFolder, builder: &Builder) -> Result<DynTransformer>;
    /// The VAE, in `options.storage`.
    fn vae(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynVae>;
    /// Text encoders with their tokenizers, in `options.storage`.
    fn text_encoders(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynTextEncoders>;

    /// Stacks the text of each sample into what the denoiser takes.
    fn conditions(&self, rows: &[&Text], device: Device, kind: Kind) -> Result<Conditions>;
    /// Patterns of the layers a LoRA goes to when the user names none.
    fn lora_targets(&self) -> &'static [&'static str];
    /// Whether the denoiser embeds a guidance scale.
    fn takes_guidance(&self, folder: &ModelFolder) -> Result<bool>;
    /// Size of the text encoders' `max_sequence_length` when the user names none.
    fn default_max_tokens(&self) -> usize;
    /// Largest `max_sequence_length`.
    fn max_tokens(&self) -> usize;
    /// Tokens the denoiser makes of a picture's latent, which dynamic shift of the schedule depends on.
    fn image_tokens(&self, latent_size: &[i64]) -> i64;
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

/// How latents are scaled for the denoiser: `(z - shift) * scale`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Normalisation {
    /// `scaling_factor`.
    pub scale: f64,
    /// `shift_factor`, 0 if the configuration has none.
    pub shift: f64,
}

/// What the encoder says about a picture's latent: a diagonal Gaussian, not normalised, f32.
#[derive(Debug)]
pub struct Posterior {
    /// [B, C, h, w].
    pub mean: Tensor,
    /// [B, C, h, w], clamped to [-30, 20].
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

/// A variational autoencoder.
pub trait Vae {
    /// Pixels [B, 3, H, W] in [-1, 1], any float kind, to the posterior.
    fn posterior(&self, pixels: &Tensor) -> Result<Posterior>;
    /// Normalised latents [B, C, h, w], any float kind, to pixels f32 [B, 3, H, W], nominally in [-1, 1], not clamped.
    fn decode(&self, latents: &Tensor) -> Result<Tensor>;
    /// How latents are scaled.
    fn normalisation(&self) -> Normalisation;
    /// [C, h, w] of a picture's latent.
    fn latent_shape(&self, width: u32, height: u32) -> Vec<i64>;

    /// Pixels to normalised latents, f32; the posterior's mean unless `noise` is given.
    fn encode(&self, pixels: &Tensor, noise: Option<&Tensor>) -> Result<Tensor> {
        let Normalisation { scale, shift } = self.normalisation();
        Ok((self.posterior(pixels)?.latent(noise) - shift) * scale)
    }
}

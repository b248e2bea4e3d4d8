//! The registry entry of Wan text-to-video, 2.1 and 2.2 A14B: which components `WanPipeline` has and how its text becomes conditions.
//!
//! UMT5 sees the cleaned prompt without padding; the denoiser gets it with zeros up to `max_sequence_length`, and no mask.

use std::collections::BTreeMap;

use nn::{BuildOptions, Builder, Conditions, Weights};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::autoencoder_kl_wan::{self, AutoencoderKlWan};
use crate::error::{Error, Result};
use crate::family::{
    Clips, Denoiser, DynTextEncoders, DynTransformer, DynVae, Encoded, Family, Length, Sampling, Text, TextEncoders,
    TextInput,
};
use crate::folder::ModelFolder;
pub use crate::prompt_clean::prompt_clean;
use crate::t5::T5Encoder;
use crate::tokenizer::Tokenizer;
use crate::wan::{Config, Wan};

/// Wan 2.1 of 1.3B and 14B, Wan 2.2 A14B, and folders of their shape.
#[derive(Debug)]
pub struct WanPipeline;

/// Largest `max_sequence_length`.
const MAX_TOKENS: usize = 512;

impl Family for WanPipeline {
    fn name(&self) -> &'static str {
        "wan"
    }

    fn pipeline_class(&self) -> &'static str {
        "WanPipeline"
    }

    fn pixel_quantum(&self, _folder: &ModelFolder) -> u32 {
        16
    }

    fn pixel_unit(&self, folder: &ModelFolder) -> Result<u32> {
        let [_, rows, columns] = Config::read(folder)?.patch();
        let stride = autoencoder_kl_wan::Config::read(folder)?.spatial_stride();
        // diffusers refuses sides that 16 does not divide, whatever the patch is.
        Ok((stride * rows.max(columns)).max(16) as u32)
    }

    fn vae_parts(&self) -> &'static [&'static str] {
        &["model_index.json", "vae/**"]
    }

    fn text_parts(&self) -> &'static [&'static str] {
        &["model_index.json", "text_encoder/**", "tokenizer/**"]
    }

    fn text_encoder_parts(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("umt5", &["text_encoder/**", "tokenizer/**"])]
    }

    fn transformer_parts(&self) -> &'static [&'static str] {
        &["model_index.json", "scheduler/**", "transformer*/**"]
    }

    fn generate_parts(&self) -> &'static [&'static str] {
        &["model_index.json", "scheduler/**", "text_encoder/**", "tokenizer/**", "transformer*/**", "vae/**"]
    }

    /// Wan 2.2's second denoiser takes the levels below `boundary_ratio`.
    fn denoisers(&self, folder: &ModelFolder) -> Result<Vec<Denoiser>> {
        const SECOND: &str = "transformer_2";
        if !folder.index[SECOND][1].is_string() {
            return Ok(vec![Denoiser { component: "transformer", from: 0.0 }]);
        }
        folder.component(SECOND, &["WanTransformer3DModel"])?;
        // What begins with `_` says where a folder comes from.
        let sizes = |component: &str| {
            let mut config = folder.config::<serde_json::Map<String, Value>>(component)?;
            config.retain(|key, _| !key.starts_with('_'));
            Ok::<_, Error>(config)
        };
        if sizes("transformer")? != sizes(SECOND)? {
            let reason = "it differs from `transformer/config.json`; both denoisers must be of the same size";
            return Err(folder.config_error("transformer_2/config.json", reason));
        }
        let boundary = folder.index["boundary_ratio"].as_f64().filter(|ratio| *ratio > 0.0 && *ratio < 1.0);
        let boundary = boundary.ok_or_else(|| {
            let reason =
                format!("`boundary_ratio` is {}; expected a number between 0 and 1", folder.index["boundary_ratio"]);
            folder.config_error("model_index.json", &reason)
        })?;
        Ok(vec![Denoiser { component: "transformer", from: boundary }, Denoiser { component: SECOND, from: 0.0 }])
    }

    fn transformer(&self, folder: &ModelFolder, builder: &Builder) -> Result<DynTransformer> {
        folder.component("transformer", &["WanTransformer3DModel"])?;
        Ok(Box::new(Wan::new(Config::read(folder)?, builder)?))
    }

    fn vae(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynVae> {
        let path = folder.component("vae", &["AutoencoderKLWan"])?;
        let kind = options.storage;
        let builder = Builder::from_weights(Weights::open(&path, "diffusion_pytorch_model")?, options);
        let vae = AutoencoderKlWan::new(autoencoder_kl_wan::Config::read(folder)?, &builder, kind)?;
        builder.finish()?;
        Ok(Box::new(vae))
    }

    fn text_encoders(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynTextEncoders> {
        let device = options.device;
        let path = folder.component("text_encoder", &["UMT5EncoderModel"])?;
        let builder = Builder::from_weights(Weights::open(&path, "model")?, options);
        let encoder = T5Encoder::new(folder, "text_encoder", &builder)?;
        builder.finish()?;
        Ok(Box::new(WanText { tokenizer: Tokenizer::t5(folder, "tokenizer")?, encoder, device }))
    }

    fn text_inputs(&self, folder: &ModelFolder) -> Result<Vec<TextInput>> {
        Ok(vec![TextInput { encoder: "umt5", width: Config::read(folder)?.text_dim, pooled: false }])
    }

    fn conditions(&self, rows: &[&Text], max_tokens: usize, device: Device, kind: Kind) -> Result<Conditions> {
        let padded = |row: &&Text| -> Result<Tensor> {
            let text = row.get("umt5").and_then(|text| text.embedding.as_ref());
            let text = text.ok_or(Error::MissingText { encoder: "umt5", family: self.name() })?;
            let missing = max_tokens as i64 - text.size()[0];
            if missing < 0 {
                let (first, other) = (max_tokens as i64, text.size()[0]);
                return Err(Error::UnevenText { encoder: "umt5", first, other });
            }
            Ok(text.f_to_device(device)?.f_to_kind(kind)?.f_constant_pad_nd([0, 0, 0, missing])?)
        };
        let rows = rows.iter().map(padded).collect::<Result<Vec<_>>>()?;
        if rows.is_empty() {
            return Err(Error::MissingText { encoder: "umt5", family: self.name() });
        }
        Ok([("umt5".to_owned(), Tensor::f_stack(&rows, 0)?)].into())
    }

    fn lora_targets(&self) -> &'static [&'static str] {
        &["to_q", "to_v"]
    }

    fn takes_guidance(&self, _folder: &ModelFolder) -> Result<bool> {
        Ok(false)
    }

    fn max_tokens(&self) -> usize {
        MAX_TOKENS
    }

    fn default_max_tokens(&self) -> usize {
        512
    }

    fn image_tokens(&self, latent_size: &[i64]) -> i64 {
        latent_size.iter().product::<i64>() / 4
    }

    fn sampling(&self) -> Sampling {
        Sampling { wide_latents: true, even_levels: false, classifier_free: true }
    }

    fn clips(&self, folder: &ModelFolder) -> Result<Option<Clips>> {
        let stride = autoencoder_kl_wan::Config::read(folder)?.temporal_stride();
        Ok(Some(Clips { stride: stride as u32, fps: 16 }))
    }
}

struct WanText {
    tokenizer: Tokenizer,
    encoder: T5Encoder,
    device: Device,
}

impl TextEncoders for WanText {
    fn names(&self) -> Vec<&'static str> {
        vec!["umt5"]
    }

    /// Each prompt on its own and as long as it is: what a mask would give, and no number depends on its neighbours.
    fn encode(&self, prompts: &[String], max_tokens: usize) -> Result<Vec<Text>> {
        if !(1..=MAX_TOKENS).contains(&max_tokens) {
            return Err(Error::MaxTokens { encoder: "umt5", asked: max_tokens, limit: MAX_TOKENS });
        }
        let one = |prompt: &String| {
            let prompt = prompt_clean(prompt);
            let tokens = self.tokenizer.ids(&prompt)?.len().min(max_tokens);
            let ids = Tensor::f_from_slice(&self.tokenizer.padded_ids(&prompt, tokens)?)?;
            let embedding = tch::no_grad(|| self.encoder.forward(&ids.f_unsqueeze(0)?.f_to_device(self.device)?))?;
            let embedding = Some(embedding.f_squeeze_dim(0)?);
            Ok(Text::from([("umt5".to_owned(), Encoded { tokens: tokens as i64, embedding, pooled: None })]))
        };
        prompts.iter().map(one).collect()
    }

    fn lengths(&self, prompt: &str, max_tokens: usize) -> Result<BTreeMap<&'static str, Length>> {
        let tokens = self.tokenizer.ids(&prompt_clean(prompt))?.len();
        Ok([("umt5", Length { tokens, limit: max_tokens })].into())
    }
}

//! The registry entry of FLUX.1: which components `FluxPipeline` has and how its text becomes conditions.
//!
//! CLIP gives a pooled vector, T5 a sequence; no mask anywhere, so padding up to `max_sequence_length` is part of the text.

use std::collections::BTreeMap;

use nn::{BuildOptions, Builder, Conditions, Weights};
use tch::{Device, Kind, Tensor};

use crate::autoencoder_kl::{self, AutoencoderKl};
use crate::clip::ClipText;
use crate::error::{Error, Result};
use crate::family::{
    Clips, DynTextEncoders, DynTransformer, DynVae, Encoded, Family, Length, Sampling, Text, TextEncoders, TextInput,
};
use crate::flux::{Config, Flux};
use crate::folder::ModelFolder;
use crate::t5::T5Encoder;
use crate::tokenizer::Tokenizer;

/// FLUX.1 dev and schnell.
#[derive(Debug)]
pub struct FluxPipeline;

impl Family for FluxPipeline {
    fn name(&self) -> &'static str {
        "flux"
    }

    fn pipeline_class(&self) -> &'static str {
        "FluxPipeline"
    }

    fn pixel_quantum(&self, _folder: &ModelFolder) -> u32 {
        64
    }

    fn pixel_unit(&self, folder: &ModelFolder) -> Result<u32> {
        // A token is 2 x 2 latents.
        Ok(2 * autoencoder_kl::pixels_per_latent(folder)?)
    }

    fn vae_parts(&self) -> &'static [&'static str] {
        &["model_index.json", "vae/**"]
    }

    fn text_parts(&self) -> &'static [&'static str] {
        &["model_index.json", "text_encoder/**", "text_encoder_2/**", "tokenizer/**", "tokenizer_2/**"]
    }

    fn text_encoder_parts(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("clip", &["text_encoder/**", "tokenizer/**"]), ("t5", &["text_encoder_2/**", "tokenizer_2/**"])]
    }

    fn transformer_parts(&self) -> &'static [&'static str] {
        &["model_index.json", "scheduler/**", "transformer/**"]
    }

    fn generate_parts(&self) -> &'static [&'static str] {
        &[
            "model_index.json",
            "scheduler/**",
            "text_encoder/**",
            "text_encoder_2/**",
            "tokenizer/**",
            "tokenizer_2/**",
            "transformer/**",
            "vae/**",
        ]
    }

    fn transformer(&self, folder: &ModelFolder, builder: &Builder) -> Result<DynTransformer> {
        folder.component("transformer", &["FluxTransformer2DModel"])?;
        Ok(Box::new(Flux::new(Config::read(folder)?, builder)?))
    }

    fn vae(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynVae> {
        let path = folder.component("vae", &["AutoencoderKL"])?;
        let kind = options.storage;
        let builder = Builder::from_weights(Weights::open(&path, "diffusion_pytorch_model")?, options);
        let vae = AutoencoderKl::new(folder, &builder, kind)?;
        builder.finish()?;
        Ok(Box::new(vae))
    }

    fn text_encoders(&self, folder: &ModelFolder, options: BuildOptions) -> Result<DynTextEncoders> {
        let device = options.device;
        let open = |name: &str, class: &str| -> Result<Builder> {
            Ok(Builder::from_weights(Weights::open(&folder.component(name, &[class])?, "model")?, options.clone()))
        };
        let (clip, t5) = (open("text_encoder", "CLIPTextModel")?, open("text_encoder_2", "T5EncoderModel")?);
        let encoders = FluxText {
            clip_tokenizer: Tokenizer::clip(folder, "tokenizer")?,
            t5_tokenizer: Tokenizer::t5(folder, "tokenizer_2")?,
            clip: ClipText::new(folder, "text_encoder", &clip)?,
            t5: T5Encoder::new(folder, "text_encoder_2", &t5)?,
            device,
        };
        clip.finish()?;
        t5.finish()?;
        Ok(Box::new(encoders))
    }

    fn text_inputs(&self, folder: &ModelFolder) -> Result<Vec<TextInput>> {
        let config = Config::read(folder)?;
        Ok(vec![
            TextInput { encoder: "clip", width: config.pooled_projection_dim, pooled: true },
            TextInput { encoder: "t5", width: config.joint_attention_dim, pooled: false },
        ])
    }

    fn conditions(&self, rows: &[&Text], _max_tokens: usize, device: Device, kind: Kind) -> Result<Conditions> {
        let column = |encoder: &'static str, pick: fn(&Encoded) -> Option<&Tensor>| -> Result<Vec<Tensor>> {
            let missing = Error::MissingText { encoder, family: self.name() };
            let tensor = |row: &&Text| row.get(encoder).and_then(pick).map(|t| t.to_device(device).to_kind(kind));
            rows.iter().map(tensor).collect::<Option<_>>().ok_or(missing)
        };
        let (t5, pooled) = (column("t5", |e| e.embedding.as_ref())?, column("clip", |e| e.pooled.as_ref())?);
        let tokens: Vec<i64> = t5.iter().map(|row| row.size()[0]).collect();
        if let Some(&other) = tokens.iter().find(|&&n| n != tokens[0]) {
            return Err(Error::UnevenText { encoder: "t5", first: tokens[0], other });
        }
        if rows.is_empty() {
            return Err(Error::MissingText { encoder: "t5", family: self.name() });
        }
        Ok([("t5".to_owned(), Tensor::stack(&t5, 0)), ("clip_pooled".to_owned(), Tensor::stack(&pooled, 0))].into())
    }

    fn lora_targets(&self) -> &'static [&'static str] {
        &[
            "attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
            "ff.net.0.proj",
            "ff.net.2",
            "ff_context.net.0.proj",
            "ff_context.net.2",
        ]
    }

    fn takes_guidance(&self, folder: &ModelFolder) -> Result<bool> {
        Ok(Config::read(folder)?.guidance_embeds)
    }

    fn max_tokens(&self) -> usize {
        MAX_TOKENS
    }

    fn default_max_tokens(&self) -> usize {
        512
    }

    fn image_tokens(&self, latent_size: &[i64]) -> i64 {
        latent_size.iter().map(|side| side / 2).product()
    }

    fn sampling(&self) -> Sampling {
        Sampling { wide_latents: false, even_levels: true, classifier_free: false }
    }

    fn clips(&self, _folder: &ModelFolder) -> Result<Option<Clips>> {
        Ok(None)
    }
}

/// `max_sequence_length` beyond this is refused, as in diffusers.
const MAX_TOKENS: usize = 512;

struct FluxText {
    clip_tokenizer: Tokenizer,
    t5_tokenizer: Tokenizer,
    clip: ClipText,
    t5: T5Encoder,
    device: Device,
}

impl FluxText {
    fn clip_tokens(&self) -> usize {
        self.clip_tokenizer.max_length.unwrap_or(self.clip.max_positions).min(self.clip.max_positions)
    }

    fn ids(&self, tokenizer: &Tokenizer, prompts: &[String], length: usize) -> Result<Tensor> {
        let mut ids = Vec::with_capacity(prompts.len() * length);
        for prompt in prompts {
            ids.extend(tokenizer.padded_ids(prompt, length)?);
        }
        Ok(Tensor::from_slice(&ids).view([prompts.len() as i64, length as i64]).to_device(self.device))
    }
}

impl TextEncoders for FluxText {
    fn names(&self) -> Vec<&'static str> {
        vec!["clip", "t5"]
    }

    fn encode(&self, prompts: &[String], max_tokens: usize) -> Result<Vec<Text>> {
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        if !(1..=MAX_TOKENS).contains(&max_tokens) {
            return Err(Error::MaxTokens { encoder: "t5", asked: max_tokens, limit: MAX_TOKENS });
        }
        let clip_tokens = self.clip_tokens();
        let clip_ids = self.ids(&self.clip_tokenizer, prompts, clip_tokens)?;
        let t5_ids = self.ids(&self.t5_tokenizer, prompts, max_tokens)?;
        let (pooled, embeddings) =
            tch::no_grad(|| Ok::<_, Error>((self.clip.pooled(&clip_ids)?, self.t5.forward(&t5_ids)?)))?;
        let row = |i: i64| {
            let clip = Encoded { tokens: clip_tokens as i64, embedding: None, pooled: Some(pooled.get(i)) };
            let t5 = Encoded { tokens: max_tokens as i64, embedding: Some(embeddings.get(i)), pooled: None };
            Text::from([("clip".to_owned(), clip), ("t5".to_owned(), t5)])
        };
        Ok((0..prompts.len() as i64).map(row).collect())
    }

    fn lengths(&self, prompt: &str, max_tokens: usize) -> Result<BTreeMap<&'static str, Length>> {
        let clip = Length { tokens: self.clip_tokenizer.ids(prompt)?.len(), limit: self.clip_tokens() };
        let t5 = Length { tokens: self.t5_tokenizer.ids(prompt)?.len(), limit: max_tokens };
        Ok([("clip", clip), ("t5", t5)].into())
    }
}

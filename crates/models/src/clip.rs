//! CLIP's text transformer (Radford et al. 2021), of which FLUX uses the pooled output.
//!
//! Field paths are checkpoint keys, with or without the `text_model.` in front that released files have.

use nn::{Builder, Embedding, LayerNorm, Linear, attention};
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::folder::ModelFolder;

/// The fields of `config.json` that matter.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    max_position_embeddings: i64,
    #[serde(default)]
    hidden_act: Activation,
    #[serde(default = "epsilon")]
    layer_norm_eps: f64,
    #[serde(default = "eos_token_id")]
    eos_token_id: i64,
}

fn epsilon() -> f64 {
    1e-5
}
fn eos_token_id() -> i64 {
    49407
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Activation {
    #[default]
    QuickGelu,
    Gelu,
}

impl Activation {
    fn apply(self, x: &Tensor) -> nn::Result<Tensor> {
        Ok(match self {
            Self::QuickGelu => x.f_mul(&x.f_mul_scalar(1.702)?.f_sigmoid()?)?,
            Self::Gelu => x.f_gelu("none")?,
        })
    }
}

#[derive(Debug)]
struct Layer {
    layer_norm1: LayerNorm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Linear,
    layer_norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
    heads: i64,
    act: Activation,
}

impl Layer {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let (attention, mlp, width) = (b.pp("self_attn"), b.pp("mlp"), c.hidden_size);
        Ok(Self {
            layer_norm1: b.pp("layer_norm1").layer_norm(width, c.layer_norm_eps, true)?,
            q_proj: attention.pp("q_proj").linear(width, width, true)?,
            k_proj: attention.pp("k_proj").linear(width, width, true)?,
            v_proj: attention.pp("v_proj").linear(width, width, true)?,
            out_proj: attention.pp("out_proj").linear(width, width, true)?,
            layer_norm2: b.pp("layer_norm2").layer_norm(width, c.layer_norm_eps, true)?,
            fc1: mlp.pp("fc1").linear(width, c.intermediate_size, true)?,
            fc2: mlp.pp("fc2").linear(c.intermediate_size, width, true)?,
            heads: c.num_attention_heads,
            act: c.hidden_act,
        })
    }

    fn forward(&self, x_bsd: &Tensor) -> nn::Result<Tensor> {
        let y = self.layer_norm1.forward(x_bsd)?;
        let heads = |layer: &Linear| attention::split_heads(&layer.forward(&y)?, self.heads);
        let out = attention::causal(&heads(&self.q_proj)?, &heads(&self.k_proj)?, &heads(&self.v_proj)?, None)?;
        let x = x_bsd.f_add(&self.out_proj.forward(&attention::merge_heads(&out)?)?)?;
        let y = self.act.apply(&self.fc1.forward(&self.layer_norm2.forward(&x)?)?)?;
        Ok(x.f_add(&self.fc2.forward(&y)?)?)
    }
}

/// The text transformer.
#[derive(Debug)]
pub struct ClipText {
    token_embedding: Embedding,
    position_embedding: Embedding,
    layers: Vec<Layer>,
    final_layer_norm: LayerNorm,
    eos_token_id: i64,
    /// Longest text in tokens.
    pub max_positions: usize,
}

impl ClipText {
    /// From `component` of a model folder.
    pub fn new(folder: &ModelFolder, component: &str, b: &Builder) -> Result<Self> {
        let c: Config = folder.config(component)?;
        let b = if b.has("text_model.embeddings.token_embedding.weight") { b.pp("text_model") } else { b.clone() };
        b.ignore("embeddings.position_ids"); // a buffer that older files carry
        let (embeddings, layers) = (b.pp("embeddings"), b.pp("encoder.layers"));
        Ok(Self {
            token_embedding: embeddings.pp("token_embedding").embedding(c.vocab_size, c.hidden_size)?,
            position_embedding: embeddings
                .pp("position_embedding")
                .embedding(c.max_position_embeddings, c.hidden_size)?,
            layers: (0..c.num_hidden_layers).map(|i| Layer::new(&c, &layers.pp(i))).collect::<Result<_>>()?,
            final_layer_norm: b.pp("final_layer_norm").layer_norm(c.hidden_size, c.layer_norm_eps, true)?,
            eos_token_id: c.eos_token_id,
            max_positions: c.max_position_embeddings as usize,
        })
    }

    /// Ids [B, S] to the hidden state at the end-of-text token, [B, D].
    pub fn pooled(&self, ids: &Tensor) -> Result<Tensor> {
        let positions = Tensor::f_arange(ids.size()[1], (Kind::Int64, ids.device()))?;
        let mut x = self.token_embedding.forward(ids)?.f_add(&self.position_embedding.forward(&positions)?)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        // Released configurations say 2, which is wrong; for them transformers takes the largest id, CLIP's own rule.
        let end = match self.eos_token_id {
            2 => ids.f_argmax(-1, false)?,
            eos => ids.f_eq(eos)?.f_to_kind(Kind::Int)?.f_argmax(-1, false)?,
        };
        let index = end.f_view([-1, 1, 1])?.f_expand([-1, 1, x.size()[2]], false)?;
        Ok(self.final_layer_norm.forward(&x.f_gather(1, &index, false)?.f_squeeze_dim(1)?)?)
    }
}

//! The encoder of T5 v1.1 (Raffel et al. 2020, "Exploring the limits of transfer learning"; gated GELU of Shazeer 2020), and
//! of UMT5 (Chung et al. 2023), whose every layer has its own position bias.
//!
//! Field paths are checkpoint keys. No mask: a pipeline lets padding take part in attention, or gives texts without any.

use nn::{Builder, Embedding, Linear, RmsNorm, attention};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::folder::ModelFolder;

/// The fields of `config.json` that matter.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    vocab_size: i64,
    d_model: i64,
    d_kv: i64,
    d_ff: i64,
    num_layers: usize,
    num_heads: i64,
    #[serde(default = "buckets")]
    relative_attention_num_buckets: i64,
    #[serde(default = "max_distance")]
    relative_attention_max_distance: i64,
    #[serde(default = "epsilon")]
    layer_norm_epsilon: f64,
    #[serde(default = "relu")]
    feed_forward_proj: String,
    #[serde(default)]
    model_type: String,
}

fn buckets() -> i64 {
    32
}
fn max_distance() -> i64 {
    128
}
fn epsilon() -> f64 {
    1e-6
}
fn relu() -> String {
    "relu".into()
}

#[derive(Debug)]
struct SelfAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: i64,
}

impl SelfAttention {
    /// `bias` [1, heads, S, S] is added to the logits, which are not divided by the root of the head width.
    fn forward(&self, x_bsd: &Tensor, bias: &Tensor) -> nn::Result<Tensor> {
        let heads = |layer: &Linear| attention::split_heads(&layer.forward(x_bsd)?, self.heads);
        let out =
            attention::scaled_dot_product(&heads(&self.q)?, &heads(&self.k)?, &heads(&self.v)?, Some(bias), Some(1.0))?;
        self.o.forward(&attention::merge_heads(&out)?)
    }
}

#[derive(Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: SelfAttention,
    feed_forward_norm: RmsNorm,
    wi_0: Linear,
    wi_1: Linear,
    wo: Linear,
}

impl Block {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let (first, second) = (b.pp("layer.0"), b.pp("layer.1"));
        let (sa, ff) = (first.pp("SelfAttention"), second.pp("DenseReluDense"));
        let inner = c.num_heads * c.d_kv;
        Ok(Self {
            attention_norm: first.pp("layer_norm").rms_norm(c.d_model, c.layer_norm_epsilon)?,
            attention: SelfAttention {
                q: sa.pp("q").linear(c.d_model, inner, false)?,
                k: sa.pp("k").linear(c.d_model, inner, false)?,
                v: sa.pp("v").linear(c.d_model, inner, false)?,
                o: sa.pp("o").linear(inner, c.d_model, false)?,
                heads: c.num_heads,
            },
            feed_forward_norm: second.pp("layer_norm").rms_norm(c.d_model, c.layer_norm_epsilon)?,
            wi_0: ff.pp("wi_0").linear(c.d_model, c.d_ff, false)?,
            wi_1: ff.pp("wi_1").linear(c.d_model, c.d_ff, false)?,
            wo: ff.pp("wo").linear(c.d_ff, c.d_model, false)?,
        })
    }

    fn forward(&self, x: &Tensor, bias: &Tensor) -> nn::Result<Tensor> {
        let x = x.f_add(&self.attention.forward(&self.attention_norm.forward(x)?, bias)?)?;
        let y = self.feed_forward_norm.forward(&x)?;
        let y = self.wi_0.forward(&y)?.f_gelu("tanh")?.f_mul(&self.wi_1.forward(&y)?)?;
        Ok(x.f_add(&self.wo.forward(&y)?)?)
    }
}

/// The encoder.
#[derive(Debug)]
pub struct T5Encoder {
    config: Config,
    embed_tokens: Embedding,
    /// One that all layers share, or one for each.
    relative_attention_biases: Vec<Embedding>,
    blocks: Vec<Block>,
    final_layer_norm: RmsNorm,
}

impl T5Encoder {
    /// From `component` of a model folder.
    pub fn new(folder: &ModelFolder, component: &str, b: &Builder) -> Result<Self> {
        let config: Config = folder.config(component)?;
        if config.feed_forward_proj != "gated-gelu" {
            let reason = format!(
                "`feed_forward_proj` is `{}`; only `gated-gelu` (T5 v1.1) is supported",
                config.feed_forward_proj
            );
            return Err(folder.config_error(&format!("{component}/config.json"), &reason));
        }
        let encoder = b.pp("encoder");
        // One tensor under either name; files may hold both.
        let table = if b.has("shared.weight") {
            b.ignore("encoder.embed_tokens.weight");
            b.pp("shared")
        } else {
            encoder.pp("embed_tokens")
        };
        let blocks = encoder.pp("block");
        let biases = if config.model_type == "umt5" { config.num_layers } else { 1 };
        let bias = |layer| {
            let path = blocks.pp(layer).pp("layer.0.SelfAttention.relative_attention_bias");
            Ok(path.embedding(config.relative_attention_num_buckets, config.num_heads)?)
        };
        Ok(Self {
            embed_tokens: table.embedding(config.vocab_size, config.d_model)?,
            relative_attention_biases: (0..biases).map(bias).collect::<Result<_>>()?,
            blocks: (0..config.num_layers).map(|i| Block::new(&config, &blocks.pp(i))).collect::<Result<_>>()?,
            final_layer_norm: encoder.pp("final_layer_norm").rms_norm(config.d_model, config.layer_norm_epsilon)?,
            config,
        })
    }

    /// Ids [B, S] to hidden states [B, S, D].
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(ids)?;
        let buckets = position_buckets(&self.config, ids.size()[1])?.f_to_device(x.device())?;
        let bias = |table: &Embedding| -> Result<Tensor> {
            Ok(table.forward(&buckets)?.f_permute([2, 0, 1])?.f_unsqueeze(0)?.f_contiguous()?)
        };
        let biases = self.relative_attention_biases.iter().map(bias).collect::<Result<Vec<_>>>()?;
        for (block, bias) in self.blocks.iter().zip(biases.iter().cycle()) {
            x = block.forward(&x, bias)?;
        }
        Ok(self.final_layer_norm.forward(&x)?)
    }
}

/// Bucket of key position minus query position, [S, S]: half for each direction, in it half exact and half logarithmic.
fn position_buckets(c: &Config, length: i64) -> Result<Tensor> {
    let positions = Tensor::f_arange(length, (Kind::Int64, Device::Cpu))?;
    let distance = positions.f_unsqueeze(0)?.f_sub(&positions.f_unsqueeze(1)?)?;
    let half = c.relative_attention_num_buckets / 2;
    let exact = half / 2;
    let after = distance.f_gt(0)?.f_to_kind(Kind::Int64)?.f_mul_scalar(half)?;
    let distance = distance.f_abs()?;
    let scale = (c.relative_attention_max_distance as f64 / exact as f64).ln();
    // In f32 and in this order, so that distances on a boundary fall where transformers puts them.
    let far = distance.f_to_kind(Kind::Float)?.f_div_scalar(exact as f64)?.f_log()?.f_div_scalar(scale)?;
    let far =
        far.f_mul_scalar((half - exact) as f64)?.f_to_kind(Kind::Int64)?.f_add_scalar(exact)?.f_clamp_max(half - 1)?;
    Ok(distance.f_where_self(&distance.f_lt(exact)?, &far)?.f_add(&after)?)
}

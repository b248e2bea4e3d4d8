//! Wan 2.1 and 2.2 (Wan Team 2025): a flow transformer over video patches with self-attention, attention to text, and one time
//! vector that modulates every block.
//!
//! The reference is diffusers 0.42 `WanTransformer3DModel` as text-to-video configures it; field paths are its checkpoint
//! keys. Under half precision the same parts stay in f32 as there: time embedder, modulation tables, layer norms, gates.
//! Shapes: B batch, S text tokens, T video tokens (frames x rows x columns of patches), D width, H heads, K width of a head.

use std::sync::Arc;

use nn::attention::SelfAttention;
use nn::timestep::Sinusoidal;
use nn::{
    Block, Builder, Columns, Init, Inputs, LayerNorm, Linear, RmsNorm, Shared, SharedBlock, State, Transformer,
    attention, rotary,
};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::folder::ModelFolder;

/// `transformer/config.json`. Absent fields are the defaults of diffusers, the 14B model's.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct Config {
    patch_size: [i64; 3],
    num_attention_heads: i64,
    attention_head_dim: i64,
    /// Channels of the latent.
    pub in_channels: i64,
    out_channels: Option<i64>,
    /// Numbers of a text token.
    pub text_dim: i64,
    freq_dim: i64,
    ffn_dim: i64,
    num_layers: usize,
    cross_attn_norm: bool,
    eps: f64,
    image_dim: Option<i64>,
    added_kv_proj_dim: Option<i64>,
    rope_max_seq_len: i64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            patch_size: [1, 2, 2],
            num_attention_heads: 40,
            attention_head_dim: 128,
            in_channels: 16,
            out_channels: Some(16),
            text_dim: 4096,
            freq_dim: 256,
            ffn_dim: 13824,
            num_layers: 40,
            cross_attn_norm: true,
            eps: 1e-6,
            image_dim: None,
            added_kv_proj_dim: None,
            rope_max_seq_len: 1024,
        }
    }
}

impl Config {
    fn width(&self) -> i64 {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Frames, rows and columns of a patch.
    pub fn patch(&self) -> [i64; 3] {
        self.patch_size
    }

    /// Reads and checks it.
    pub fn read(folder: &ModelFolder) -> Result<Self> {
        if folder.index["expand_timesteps"] == true {
            let what = "a Wan 2.2 with a time for each token (`expand_timesteps`)";
            let instead = "text-to-video of Wan 2.1 and of Wan 2.2 A14B is, such as `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`";
            return Err(Error::Unsupported { folder: folder.path.clone(), what, instead });
        }
        let config: Self = folder.config("transformer")?;
        let reason = if config.image_dim.is_some() || config.added_kv_proj_dim.is_some() {
            "`image_dim` or `added_kv_proj_dim` is set: only text-to-video is supported, not image-to-video".to_owned()
        } else if config.patch_size.iter().any(|side| *side < 1) {
            format!("`patch_size` is {:?}; expected three positive numbers", config.patch_size)
        } else if config.attention_head_dim % 2 != 0 || config.attention_head_dim < 6 {
            format!("`attention_head_dim` is {}; expected an even number of at least 6", config.attention_head_dim)
        } else {
            return Ok(config);
        };
        Err(folder.config_error("transformer/config.json", &reason))
    }
}

// ---------------------------------------------------------------------------------------------------------- embeddings

/// Latents to tokens: a convolution whose kernel is its stride, computed as one product.
#[derive(Debug)]
struct PatchEmbedding {
    weight: Shared,
    bias: Shared,
    patch: [i64; 3],
}

impl PatchEmbedding {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let [f, h, w] = c.patch_size;
        let fan_in = Init::FanIn(c.in_channels * f * h * w);
        Ok(Self {
            weight: b.param("weight", &[c.width(), c.in_channels, f, h, w], fan_in)?,
            bias: b.param("bias", &[c.width()], fan_in)?,
            patch: c.patch_size,
        })
    }

    /// [B, C, F, H, W] to [B, T, D].
    fn forward(&self, x: &Tensor) -> nn::Result<Tensor> {
        let ([pf, ph, pw], (b, c, f, h, w)) = (self.patch, x.size5()?);
        let patches = x.f_reshape([b, c, f / pf, pf, h / ph, ph, w / pw, pw])?.f_permute([0, 2, 4, 6, 1, 3, 5, 7])?;
        let tokens = patches.f_reshape([b, (f / pf) * (h / ph) * (w / pw), c * pf * ph * pw])?;
        let (weight, bias) = (self.weight.f_to_kind(x.kind())?, self.bias.f_to_kind(x.kind())?);
        Ok(tokens.f_linear(&weight.f_flatten(1, 4)?, Some(bias))?)
    }
}

/// Time and text on their way into the blocks.
#[derive(Debug)]
struct ConditionEmbedder {
    frequencies: Sinusoidal,
    time: [Linear; 2],
    time_proj: Linear,
    text: [Linear; 2],
}

impl ConditionEmbedder {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let width = c.width();
        let pair = |b: Builder, from: i64| -> Result<[Linear; 2]> {
            Ok([b.pp("linear_1").linear(from, width, true)?, b.pp("linear_2").linear(width, width, true)?])
        };
        Ok(Self {
            frequencies: Sinusoidal::flow(c.freq_dim),
            time: pair(b.pp("time_embedder").in_f32(), c.freq_dim)?,
            time_proj: b.pp("time_proj").joined(width, 6 * width, true)?,
            text: pair(b.pp("text_embedder"), c.text_dim)?,
        })
    }

    /// Sigma `[B]` to the time vector [B, D] and its six parts [B, 6, D], in `kind`.
    fn time(&self, sigma: &Tensor, kind: Kind) -> nn::Result<[Tensor; 2]> {
        let [first, second] = &self.time;
        let waves = self.frequencies.embed(&sigma.f_mul_scalar(1000.0)?.f_to_kind(Kind::Float)?)?;
        let vector = second.forward(&first.forward(&waves)?.f_silu()?)?.f_to_kind(kind)?;
        let parts = self.time_proj.forward(&vector.f_silu()?)?.f_unflatten(1, [6, -1])?;
        Ok([vector, parts])
    }

    /// [B, S, text width] to [B, S, D].
    fn text(&self, embedding: &Tensor) -> nn::Result<Tensor> {
        let [first, second] = &self.text;
        second.forward(&first.forward(embedding)?.f_gelu("tanh")?)
    }
}

/// Cosine and sine by which each pair of a token's channels is turned, f32 [T, K / 2, 2]: the first channels by the frame,
/// then by the row, then by the column.
fn rotary_table(head: i64, [frames, rows, columns]: [i64; 3], device: Device) -> nn::Result<Tensor> {
    // Angles in f64 and on the CPU, as diffusers makes them; there are few, since each axis has its own.
    let options = (Kind::Double, Device::Cpu);
    let side = 2 * (head / 6);
    let axis = |length: i64, dim: i64, shape: [i64; 5]| -> nn::Result<Tensor> {
        let exponents = Tensor::f_arange_start_step(0, dim, 2, options)?.f_div_scalar(dim as f64)?;
        let frequencies = Tensor::f_full([1], 10_000.0, options)?.f_pow(&exponents)?.f_reciprocal()?;
        let angles = Tensor::f_arange(length, options)?.f_outer(&frequencies)?;
        let table = Tensor::f_stack(&[angles.f_cos()?, angles.f_sin()?], -1)?.f_to_kind(Kind::Float)?;
        Ok(table.f_to_device(device)?.f_view(shape)?.f_expand([frames, rows, columns, -1, 2], false)?)
    };
    let axes = [
        axis(frames, head - 2 * side, [frames, 1, 1, -1, 2])?,
        axis(rows, side, [1, rows, 1, -1, 2])?,
        axis(columns, side, [1, 1, columns, -1, 2])?,
    ];
    Ok(Tensor::f_cat(&axes, 3)?.f_flatten(0, 2)?)
}

// -------------------------------------------------------------------------------------------------------------- blocks

/// Queries and keys are normalised over all heads together.
#[derive(Debug)]
struct Norms {
    q: RmsNorm,
    k: RmsNorm,
    head: i64,
}

impl Norms {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let norm = |path: &str| b.pp(path).torch_rms_norm_of_heads(c.width(), c.eps);
        Ok(Self { q: norm("norm_q")?, k: norm("norm_k")?, head: c.attention_head_dim })
    }

    /// [B, T, D] to [B, T, H, K] each.
    fn forward(&self, [q, k, v]: [&Tensor; 3]) -> nn::Result<[Tensor; 3]> {
        let heads = |x: &Tensor| x.f_unflatten(2, [-1, self.head]);
        Ok([heads(&self.q.forward(q)?)?, heads(&self.k.forward(k)?)?, heads(v)?])
    }
}

/// Video tokens look at one another, turned by their places.
#[derive(Debug)]
struct VideoAttention {
    to_qkv: Columns<3>,
    norms: Norms,
    attention: SelfAttention,
    to_out: Linear,
}

impl VideoAttention {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let width = c.width();
        Ok(Self {
            to_qkv: b.columns(width, ["to_q", "to_k", "to_v"].map(|path| (path, width)), true)?,
            attention: b.self_attention(c.num_attention_heads)?,
            to_out: b.pp("to_out.0").rows(&[width], width, true)?,
            norms: Norms::new(c, b)?,
        })
    }

    /// [B, T, D] to the same shape.
    fn forward(&self, x: &Tensor, table: &Tensor) -> nn::Result<Tensor> {
        let [q, k, v] = self.to_qkv.forward(x)?;
        let [q, k, v] = self.norms.forward([&q, &k, &v])?;
        self.to_out.forward(&self.attention.forward(&rotary::turn(&q, table)?, &rotary::turn(&k, table)?, &v)?)
    }
}

/// Video tokens look at the text.
#[derive(Debug)]
struct TextAttention {
    to_q: Columns<1>,
    to_kv: Columns<2>,
    norms: Norms,
    to_out: Linear,
}

impl TextAttention {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let width = c.width();
        Ok(Self {
            to_q: b.columns(width, [("to_q", width)], true)?,
            to_kv: b.columns_of_shared(width, [("to_k", width), ("to_v", width)], true)?,
            to_out: b.pp("to_out.0").rows(&[width], width, true)?,
            norms: Norms::new(c, b)?,
        })
    }

    /// [B, T, D] looking at `text` [B, S, D].
    fn forward(&self, x: &Tensor, text: &Tensor) -> nn::Result<Tensor> {
        let ([q], [k, v]) = (self.to_q.forward(x)?, self.to_kv.forward(text)?);
        let [q, k, v] = self.norms.forward([&q, &k, &v])?;
        let (q, k, v) = (q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?);
        self.to_out.forward(&attention::merge_heads(&attention::scaled_dot_product(&q, &k, &v, None, None)?)?)
    }
}

/// Self-attention, attention to the text, feed-forward.
#[derive(Debug)]
struct WanBlock {
    attn1: VideoAttention,
    attn2: TextAttention,
    norm2: Option<LayerNorm>,
    ffn: (Columns<1>, Linear),
    scale_shift_table: Shared,
    plain: LayerNorm,
}

impl WanBlock {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let width = c.width();
        Ok(Self {
            attn1: VideoAttention::new(c, &b.pp("attn1"))?,
            attn2: TextAttention::new(c, &b.pp("attn2"))?,
            norm2: c.cross_attn_norm.then(|| b.pp("norm2").in_f32().layer_norm(width, c.eps, true)).transpose()?,
            ffn: (
                b.columns(width, [("ffn.net.0.proj", c.ffn_dim)], true)?,
                b.pp("ffn.net.2").rows(&[c.ffn_dim], width, true)?,
            ),
            scale_shift_table: table(b, 6, width)?,
            plain: LayerNorm::plain(width, c.eps),
        })
    }
}

fn table(b: &Builder, parts: i64, width: i64) -> Result<Shared> {
    let init = Init::Normal { std: 1.0 / (width as f64).sqrt() };
    Ok(b.in_f32().param("scale_shift_table", &[1, parts, width], init)?)
}

/// `norm(x) (1 + scale) + shift` in f32, in the kind of `x`.
fn modulate(norm: &LayerNorm, x: &Tensor, shift: &Tensor, scale: &Tensor) -> nn::Result<Tensor> {
    let normal = norm.forward(&x.f_to_kind(Kind::Float)?)?;
    Ok(shift.f_addcmul(&normal, &scale.f_add_scalar(1.0)?)?.f_to_kind(x.kind())?)
}

/// `x + y gate` in f32, in the kind of `x`.
fn gated(x: &Tensor, y: &Tensor, gate: &Tensor) -> nn::Result<Tensor> {
    Ok(x.f_to_kind(Kind::Float)?.f_addcmul(&y.f_to_kind(Kind::Float)?, gate)?.f_to_kind(x.kind())?)
}

impl Block for WanBlock {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        let x = &stream[0];
        // One use of each shared tensor, so that its gradient is summed in the same order when activations are recomputed.
        let (text, time) = (shared[TEXT].f_alias()?, shared[TIME].f_to_kind(Kind::Float)?);
        let m = self.scale_shift_table.f_add(&time)?.f_chunk(6, 1)?;
        let y = modulate(&self.plain, x, &m[0], &m[1])?;
        let x = gated(x, &self.attn1.forward(&y, &shared[ROTARY])?, &m[2])?;
        let y = match &self.norm2 {
            Some(norm) => norm.forward(&x.f_to_kind(Kind::Float)?)?.f_to_kind(x.kind())?,
            None => x.shallow_clone(),
        };
        let x = x.f_add(&self.attn2.forward(&y, &text)?)?;
        let (first, second) = &self.ffn;
        let [y] = first.forward(&modulate(&self.plain, &x, &m[3], &m[4])?)?;
        Ok(vec![gated(&x, &second.forward(&y.f_gelu("tanh")?)?, &m[5])?])
    }
}

// --------------------------------------------------------------------------------------------------------- transformer

/// Places in [`State::shared`].
const TEXT: usize = 0;
const TIME: usize = 1;
const ROTARY: usize = 2;
const VECTOR: usize = 3;

/// The denoiser. Stream: video tokens. Shared: text tokens, the time vector's six parts, the rotary table, the time vector.
pub struct Wan {
    config: Config,
    patch_embedding: PatchEmbedding,
    condition_embedder: ConditionEmbedder,
    blocks: Vec<SharedBlock>,
    scale_shift_table: Shared,
    proj_out: Linear,
}

impl Wan {
    /// Declares all parameters on `b`, in checkpoint order.
    pub fn new(config: Config, b: &Builder) -> Result<Self> {
        b.check_heads(config.num_attention_heads)?;
        let width = config.width();
        let scale_shift_table = table(b, 2, width)?;
        let patch_embedding = PatchEmbedding::new(&config, &b.pp("patch_embedding"))?;
        let condition_embedder = ConditionEmbedder::new(&config, &b.pp("condition_embedder"))?;
        let mut blocks: Vec<SharedBlock> = Vec::with_capacity(config.num_layers);
        for i in 0..config.num_layers {
            blocks.push(Arc::new(WanBlock::new(&config, &b.pp("blocks").pp(i))?));
        }
        let patch: i64 = config.patch_size.iter().product();
        let out = config.out_channels.unwrap_or(config.in_channels) * patch;
        let proj_out = b.pp("proj_out").linear(width, out, true)?;
        Ok(Self { config, patch_embedding, condition_embedder, blocks, scale_shift_table, proj_out })
    }

    /// Frames, rows and columns of patches in latents of this shape.
    fn patches(&self, shape: &[i64]) -> nn::Result<[i64; 3]> {
        let [pf, ph, pw] = self.config.patch_size;
        let channels = self.config.in_channels;
        match *shape {
            [_, c, f, h, w] if c == channels && f > 0 && f % pf == 0 && h % ph == 0 && w % pw == 0 => {
                let patches = [f / pf, h / ph, w / pw];
                let limit = self.config.rope_max_seq_len;
                if patches.iter().all(|count| *count <= limit) {
                    return Ok(patches);
                }
                let message = format!("latents of shape {shape:?} are larger than the {limit} positions Wan knows");
                Err(nn::Error::Invalid(message))
            }
            _ => Err(nn::Error::Invalid(format!(
                "latents have shape {shape:?}; Wan takes [batch, {channels}, frames, height, width] in patches of {pf}x{ph}x{pw}"
            ))),
        }
    }
}

impl Transformer for Wan {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
        let (shape, kind) = (inputs.latents.size(), inputs.compute);
        let patches = self.patches(&shape)?;
        let text = inputs.conditions.get("umt5");
        let text = text.ok_or_else(|| nn::Error::Invalid("Wan needs the condition `umt5`".to_owned()))?;
        let [vector, parts] = self.condition_embedder.time(&inputs.sigma, kind)?;
        let text = self.condition_embedder.text(&text.f_to_kind(kind)?)?;
        let video = self.patch_embedding.forward(&inputs.latents.f_to_kind(kind)?)?;
        let table = rotary_table(self.config.attention_head_dim, patches, video.device())?;
        let (shared, latent_size) = (vec![text, parts, table, vector], shape[2..].to_vec());
        Ok(State { stream: vec![video], shared, by_token: vec![ROTARY], latent_size })
    }

    fn blocks(&self) -> &[SharedBlock] {
        &self.blocks
    }

    fn head(&self, state: State) -> nn::Result<Tensor> {
        let (x, [pf, ph, pw]) = (&state.stream[0], self.config.patch_size);
        let [f, h, w] = state.latent_size[..] else {
            return Err(nn::Error::Invalid("Wan's state has no latent size".to_owned()));
        };
        let m = self.scale_shift_table.f_add(&state.shared[VECTOR].f_unsqueeze(1)?)?.f_chunk(2, 1)?;
        let y = modulate(&LayerNorm::plain(self.config.width(), self.config.eps), x, &m[0], &m[1])?;
        let tokens = self.proj_out.forward(&y)?;
        let patches = tokens.f_reshape([-1, f / pf, h / ph, w / pw, pf, ph, pw, tokens.size()[2] / (pf * ph * pw)])?;
        Ok(patches.f_permute([0, 7, 1, 4, 2, 5, 3, 6])?.f_reshape([x.size()[0], -1, f, h, w])?)
    }
}

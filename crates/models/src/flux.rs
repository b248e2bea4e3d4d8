//! FLUX.1 (Black Forest Labs 2024): a rectified-flow transformer with two-stream and then one-stream blocks.
//!
//! The reference is diffusers 0.42 `FluxTransformer2DModel`; field paths are its checkpoint keys.
//! Shapes: B batch, S text tokens, N image tokens, T = S + N, D width, H heads, K width of a head.

use std::sync::Arc;

use nn::attention::SelfAttention;
use nn::timestep::Sinusoidal;
use nn::{Block, Builder, Columns, Inputs, LayerNorm, Linear, RmsNorm, SharedBlock, State, Transformer, rotary};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::folder::ModelFolder;

/// `transformer/config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    #[serde(default = "Config::patch_size")]
    patch_size: i64,
    /// Channels of a packed token: four times those of the latent.
    pub in_channels: i64,
    out_channels: Option<i64>,
    num_layers: usize,
    num_single_layers: usize,
    attention_head_dim: i64,
    num_attention_heads: i64,
    /// Numbers of a text token.
    pub joint_attention_dim: i64,
    /// Numbers of the pooled text.
    pub pooled_projection_dim: i64,
    /// Whether a guidance scale is embedded (FLUX.1-dev) or not (schnell).
    #[serde(default)]
    pub guidance_embeds: bool,
    #[serde(default = "Config::axes")]
    axes_dims_rope: Vec<i64>,
}

impl Config {
    fn patch_size() -> i64 {
        1
    }

    fn axes() -> Vec<i64> {
        vec![16, 56, 56]
    }

    fn width(&self) -> i64 {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Reads and checks it.
    pub fn read(folder: &ModelFolder) -> Result<Self> {
        let config: Self = folder.config("transformer")?;
        let axes = &config.axes_dims_rope;
        let reason = if config.patch_size != 1 {
            format!("`patch_size` is {}; only 1 is supported", config.patch_size)
        } else if config.in_channels % 4 != 0 || config.in_channels <= 0 {
            format!("`in_channels` is {}; it must be a multiple of 4", config.in_channels)
        } else if axes.len() != 3
            || axes.iter().any(|a| a % 2 != 0)
            || axes.iter().sum::<i64>() != config.attention_head_dim
        {
            let width = config.attention_head_dim;
            format!(
                "`axes_dims_rope` is {axes:?}; expected three even numbers that sum to `attention_head_dim`, {width}"
            )
        } else {
            return Ok(config);
        };
        Err(folder.config_error("transformer/config.json", &reason))
    }
}

const EPS: f64 = 1e-6;

// ---------------------------------------------------------------------------------------------------------- embeddings

/// Linear, SiLU, linear.
#[derive(Debug)]
struct Mlp {
    linear_1: Linear,
    linear_2: Linear,
}

impl Mlp {
    fn new(b: &Builder, from: i64, width: i64) -> Result<Self> {
        Ok(Self {
            linear_1: b.pp("linear_1").linear(from, width, true)?,
            linear_2: b.pp("linear_2").linear(width, width, true)?,
        })
    }

    fn forward(&self, x: &Tensor) -> nn::Result<Tensor> {
        self.linear_2.forward(&self.linear_1.forward(x)?.f_silu()?)
    }
}

/// Time, guidance and pooled text become one vector.
#[derive(Debug)]
struct TimeTextEmbed {
    timestep_embedder: Mlp,
    guidance_embedder: Option<Mlp>,
    text_embedder: Mlp,
}

impl TimeTextEmbed {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let width = c.width();
        Ok(Self {
            timestep_embedder: Mlp::new(&b.pp("timestep_embedder"), 256, width)?,
            guidance_embedder: c
                .guidance_embeds
                .then(|| Mlp::new(&b.pp("guidance_embedder"), 256, width))
                .transpose()?,
            text_embedder: Mlp::new(&b.pp("text_embedder"), c.pooled_projection_dim, width)?,
        })
    }

    /// [B, D] in the kind of `pooled`. As in diffusers, sigma and guidance are rounded to that kind *before* the factor
    /// 1000: in bf16 a guidance of 3.5 is embedded as 3504.
    fn forward(&self, sigma: &Tensor, guidance: Option<&Tensor>, pooled: &Tensor) -> nn::Result<Tensor> {
        let kind = pooled.kind();
        let embed = |mlp: &Mlp, value: &Tensor| {
            mlp.forward(&Sinusoidal::flow(256).embed(&value.f_to_kind(kind)?.f_mul_scalar(1000.0)?)?.f_to_kind(kind)?)
        };
        let mut vector = embed(&self.timestep_embedder, sigma)?;
        if let Some(mlp) = &self.guidance_embedder {
            let guidance = guidance.ok_or_else(|| nn::Error::Invalid(MISSING_GUIDANCE.into()))?;
            vector = vector.f_add(&embed(mlp, guidance)?)?;
        }
        Ok(vector.f_add(&self.text_embedder.forward(pooled)?)?)
    }
}

const MISSING_GUIDANCE: &str =
    "this model embeds a guidance scale (`guidance_embeds` in `transformer/config.json`), and none was given";

/// Cosine and sine by which each pair of a token's channels is turned, f32 [T, K / 2, 2].
///
/// Text tokens all stand at (0, 0, 0), image tokens at (0, row, column). Angles are computed in f64, as diffusers does.
fn rotary_table(axes: &[i64], text: i64, rows: i64, columns: i64, device: Device) -> nn::Result<Tensor> {
    let options = (Kind::Double, Device::Cpu);
    let ids = rotary::grid_ids(rows, columns, Device::Cpu)?.f_to_kind(Kind::Double)?;
    let angles = (0..).zip(axes).map(|(axis, &dim)| {
        let frequencies =
            Tensor::f_arange_start_step(0, dim, 2, options)?.f_mul_scalar(-(10_000f64.ln()) / dim as f64)?.f_exp()?;
        Ok(ids.f_select(1, axis)?.f_outer(&frequencies)?)
    });
    let angles = Tensor::f_cat(&angles.collect::<nn::Result<Vec<_>>>()?, 1)?;
    let angles = Tensor::f_cat(&[Tensor::f_zeros([text, angles.size()[1]], options)?, angles], 0)?;
    Ok(Tensor::f_stack(&[angles.f_cos()?, angles.f_sin()?], -1)?.f_to_kind(Kind::Float)?.f_to_device(device)?)
}

// -------------------------------------------------------------------------------------------------------------- blocks

/// Shift, scale and gate from the time vector (Peebles and Xie 2023, adaLN-Zero).
#[derive(Debug)]
struct Modulation {
    linear: Linear,
    parts: i64,
}

impl Modulation {
    fn new(b: &Builder, width: i64, parts: i64) -> Result<Self> {
        Ok(Self { linear: b.pp("linear").joined(width, parts * width, true)?, parts })
    }

    /// `parts` tensors [B, 1, D] from the activated time vector.
    fn forward(&self, vector: &Tensor) -> nn::Result<Vec<Tensor>> {
        Ok(self.linear.forward(vector)?.f_unsqueeze(1)?.f_chunk(self.parts, 2)?)
    }
}

/// Layer norm without parameters, then `(1 + scale) x + shift`.
fn modulate(x_btd: &Tensor, shift: &Tensor, scale: &Tensor) -> nn::Result<Tensor> {
    let normal = LayerNorm::plain(x_btd.size()[2], EPS).forward(x_btd)?;
    Ok(shift.f_addcmul(&normal, &scale.f_add_scalar(1.0)?)?)
}

/// Queries and keys are normalised head by head.
#[derive(Debug)]
struct HeadNorms {
    q: RmsNorm,
    k: RmsNorm,
    width: i64,
}

impl HeadNorms {
    fn new(c: &Config, b: &Builder, [q, k]: [&str; 2]) -> Result<Self> {
        let width = c.attention_head_dim;
        Ok(Self { q: b.pp(q).torch_rms_norm(width, EPS)?, k: b.pp(k).torch_rms_norm(width, EPS)?, width })
    }

    /// [B, T, D] to [B, T, H, K] each.
    fn forward(&self, [q, k, v]: [&Tensor; 3]) -> nn::Result<[Tensor; 3]> {
        let heads = |x: &Tensor| x.f_unflatten(2, [-1, self.width]);
        Ok([self.q.forward(&heads(q)?)?, self.k.forward(&heads(k)?)?, heads(v)?])
    }
}

/// Attention over [B, T, H, K] to [B, T, D], queries and keys turned by `table`.
fn attend(attention: &SelfAttention, [q, k, v]: [&Tensor; 3], table: &Tensor) -> nn::Result<Tensor> {
    attention.forward(&rotary::turn(q, table)?, &rotary::turn(k, table)?, v)
}

/// Linear to four times the width, GELU (tanh form), linear back.
#[derive(Debug)]
struct FeedForward {
    proj: Columns<1>,
    out: Linear,
}

impl FeedForward {
    fn new(b: &Builder, width: i64) -> Result<Self> {
        Ok(Self {
            proj: b.columns(width, [("net.0.proj", 4 * width)], true)?,
            out: b.pp("net.2").rows(&[4 * width], width, true)?,
        })
    }

    fn forward(&self, x: &Tensor) -> nn::Result<Tensor> {
        let [y] = self.proj.forward(x)?;
        self.out.forward(&y.f_gelu("tanh")?)
    }
}

/// Text and image keep their own weights and meet in attention.
#[derive(Debug)]
struct DoubleBlock {
    norm1: Modulation,
    norm1_context: Modulation,
    image: (Columns<3>, HeadNorms),
    text: (Columns<3>, HeadNorms),
    attention: SelfAttention,
    to_out: Linear,
    to_add_out: Linear,
    ff: FeedForward,
    ff_context: FeedForward,
}

impl DoubleBlock {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let (width, attn) = (c.width(), b.pp("attn"));
        let projections = |paths: [&str; 3], norms: [&str; 2]| -> Result<(Columns<3>, HeadNorms)> {
            Ok((attn.columns(width, paths.map(|path| (path, width)), true)?, HeadNorms::new(c, &attn, norms)?))
        };
        Ok(Self {
            norm1: Modulation::new(&b.pp("norm1"), width, 6)?,
            norm1_context: Modulation::new(&b.pp("norm1_context"), width, 6)?,
            image: projections(["to_q", "to_k", "to_v"], ["norm_q", "norm_k"])?,
            text: projections(["add_q_proj", "add_k_proj", "add_v_proj"], ["norm_added_q", "norm_added_k"])?,
            attention: attn.self_attention(c.num_attention_heads)?,
            to_out: attn.pp("to_out.0").rows(&[width], width, true)?,
            to_add_out: attn.pp("to_add_out").rows(&[width], width, true)?,
            ff: FeedForward::new(&b.pp("ff"), width)?,
            ff_context: FeedForward::new(&b.pp("ff_context"), width)?,
        })
    }
}

impl Block for DoubleBlock {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        let ([text, image], [vector, table]) = (two(stream), two(shared));
        // One use of the shared vector, so that its gradient is summed in the same order when activations are recomputed.
        let vector = &vector.f_alias()?;
        let (m, c) = (self.norm1.forward(vector)?, self.norm1_context.forward(vector)?);
        let project = |x: &Tensor, m: &[Tensor], (columns, norms): &(Columns<3>, HeadNorms)| {
            let [q, k, v] = columns.forward(&modulate(x, &m[0], &m[1])?)?;
            norms.forward([&q, &k, &v])
        };
        let (ours, theirs) = (project(image, &m, &self.image)?, project(text, &c, &self.text)?);
        let join = |i: usize| Tensor::f_cat(&[&theirs[i], &ours[i]], 1);
        let out = attend(&self.attention, [&join(0)?, &join(1)?, &join(2)?], table)?;
        let parts = out.f_split_with_sizes([theirs[0].size()[1], ours[0].size()[1]], 1)?;

        let finish = |x: &Tensor, m: &[Tensor], out: &Tensor, ff: &FeedForward| {
            let x = x.f_addcmul(&m[2], out)?;
            Ok::<_, nn::Error>(x.f_addcmul(&m[5], &ff.forward(&modulate(&x, &m[3], &m[4])?)?)?)
        };
        let image = finish(image, &m, &self.to_out.forward(&parts[1])?, &self.ff)?;
        let text = finish(text, &c, &self.to_add_out.forward(&parts[0])?, &self.ff_context)?;
        Ok(vec![text, image])
    }
}

/// The two streams become one, text first.
#[derive(Debug)]
struct Join;

impl Block for Join {
    fn forward(&self, stream: &[Tensor], _shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        Ok(vec![Tensor::f_cat(stream, 1)?])
    }

    fn has_parameters(&self) -> bool {
        false
    }
}

/// Attention and feed-forward side by side on the joined stream.
#[derive(Debug)]
struct SingleBlock {
    norm: Modulation,
    /// Queries, keys, values, and the feed-forward's hidden channels.
    projections: Columns<4>,
    norms: HeadNorms,
    attention: SelfAttention,
    proj_out: Linear,
}

impl SingleBlock {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let width = c.width();
        Ok(Self {
            norm: Modulation::new(&b.pp("norm"), width, 3)?,
            projections: b.columns(
                width,
                [("attn.to_q", width), ("attn.to_k", width), ("attn.to_v", width), ("proj_mlp", 4 * width)],
                true,
            )?,
            norms: HeadNorms::new(c, &b.pp("attn"), ["norm_q", "norm_k"])?,
            attention: b.self_attention(c.num_attention_heads)?,
            proj_out: b.pp("proj_out").rows(&[width, 4 * width], width, true)?,
        })
    }
}

impl Block for SingleBlock {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        let (x, [vector, table]) = (&stream[0], two(shared));
        let m = self.norm.forward(vector)?;
        let [q, k, v, hidden] = self.projections.forward(&modulate(x, &m[0], &m[1])?)?;
        let [q, k, v] = self.norms.forward([&q, &k, &v])?;
        let both = Tensor::f_cat(&[attend(&self.attention, [&q, &k, &v], table)?, hidden.f_gelu("tanh")?], 2)?;
        Ok(vec![x.f_addcmul(&m[2], &self.proj_out.forward(&both)?)?])
    }
}

fn two(tensors: &[Tensor]) -> [&Tensor; 2] {
    [&tensors[0], &tensors[1]]
}

// --------------------------------------------------------------------------------------------------------- transformer

/// The denoiser. Streams: text and image tokens, then both joined. Shared: the activated time vector and the rotary table.
pub struct Flux {
    config: Config,
    x_embedder: Linear,
    context_embedder: Linear,
    time_text_embed: TimeTextEmbed,
    blocks: Vec<SharedBlock>,
    norm_out: Modulation,
    proj_out: Linear,
}

impl Flux {
    /// Declares all parameters on `b`, in checkpoint order.
    pub fn new(config: Config, b: &Builder) -> Result<Self> {
        let width = config.width();
        b.check_heads(config.num_attention_heads)?;
        let mut blocks: Vec<SharedBlock> = Vec::new();
        let time_text_embed = TimeTextEmbed::new(&config, &b.pp("time_text_embed"))?;
        let context_embedder = b.pp("context_embedder").linear(config.joint_attention_dim, width, true)?;
        let x_embedder = b.pp("x_embedder").linear(config.in_channels, width, true)?;
        for i in 0..config.num_layers {
            blocks.push(Arc::new(DoubleBlock::new(&config, &b.pp("transformer_blocks").pp(i))?));
        }
        blocks.push(Arc::new(Join));
        for i in 0..config.num_single_layers {
            blocks.push(Arc::new(SingleBlock::new(&config, &b.pp("single_transformer_blocks").pp(i))?));
        }
        Ok(Self {
            x_embedder,
            context_embedder,
            time_text_embed,
            blocks,
            norm_out: Modulation::new(&b.pp("norm_out"), width, 2)?,
            proj_out: b.pp("proj_out").linear(width, config.out_channels.unwrap_or(config.in_channels), true)?,
            config,
        })
    }
}

/// [B, C, 2 h, 2 w] to [B, h w, 4 C]: a token holds a 2 x 2 patch, channel by channel.
fn pack(latents: &Tensor) -> nn::Result<Tensor> {
    let (b, c, h, w) = latents.size4()?;
    let patches = latents.f_reshape([b, c, h / 2, 2, w / 2, 2])?.f_permute([0, 2, 4, 1, 3, 5])?;
    Ok(patches.f_reshape([b, h / 2 * (w / 2), 4 * c])?)
}

/// The inverse of [`pack`].
fn unpack(tokens: &Tensor, h: i64, w: i64) -> nn::Result<Tensor> {
    let (b, _, c) = tokens.size3()?;
    let patches = tokens.f_view([b, h / 2, w / 2, c / 4, 2, 2])?.f_permute([0, 3, 1, 4, 2, 5])?;
    Ok(patches.f_reshape([b, c / 4, h, w])?)
}

impl Transformer for Flux {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
        let (shape, channels, kind) = (inputs.latents.size(), self.config.in_channels / 4, inputs.compute);
        let (h, w) = match shape[..] {
            [_, c, h, w] if c == channels && h % 2 == 0 && w % 2 == 0 => (h, w),
            _ => {
                return Err(nn::Error::Invalid(format!(
                    "latents have shape {shape:?}; FLUX takes [batch, {channels}, even height, even width]"
                )));
            }
        };
        let condition = |name| {
            let tensor = inputs
                .conditions
                .get(name)
                .ok_or_else(|| nn::Error::Invalid(format!("FLUX needs the condition `{name}`")))?;
            Ok::<_, nn::Error>(tensor.f_to_kind(kind)?)
        };
        let vector =
            self.time_text_embed.forward(&inputs.sigma, inputs.guidance.as_ref(), &condition("clip_pooled")?)?;
        let text = self.context_embedder.forward(&condition("t5")?)?;
        let image = self.x_embedder.forward(&pack(&inputs.latents.f_to_kind(kind)?)?)?;
        let table = rotary_table(&self.config.axes_dims_rope, text.size()[1], h / 2, w / 2, text.device())?;
        let shared = vec![vector.f_silu()?, table];
        Ok(State { stream: vec![text, image], shared, by_token: vec![1], latent_size: vec![h, w] })
    }

    fn blocks(&self) -> &[SharedBlock] {
        &self.blocks
    }

    fn head(&self, state: State) -> nn::Result<Tensor> {
        let (x, h, w) = (&state.stream[0], state.latent_size[0], state.latent_size[1]);
        let image = x.f_narrow(1, x.size()[1] - h * w / 4, h * w / 4)?;
        let m = self.norm_out.forward(&state.shared[0])?; // scale first, unlike in the blocks
        unpack(&self.proj_out.forward(&modulate(&image, &m[1], &m[0])?)?, h, w)
    }
}

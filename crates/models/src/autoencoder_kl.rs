//! `AutoencoderKL`: the convolutional VAE of latent diffusion (Rombach et al. 2022), as FLUX configures it.
//!
//! Field paths are checkpoint keys. Convolutions run in the kind of the weights; posterior and normalisation are f32.

use nn::{Builder, Conv2d, Conv2dOptions, GroupNorm, Linear, attention};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::family::{Normalisation, Posterior, Vae};
use crate::folder::ModelFolder;

/// The fields of `vae/config.json` that matter.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    #[serde(default = "rgb")]
    in_channels: i64,
    #[serde(default = "rgb")]
    out_channels: i64,
    down_block_types: Vec<String>,
    up_block_types: Vec<String>,
    block_out_channels: Vec<i64>,
    #[serde(default = "one")]
    layers_per_block: usize,
    latent_channels: i64,
    #[serde(default = "groups")]
    norm_num_groups: i64,
    #[serde(default = "silu")]
    act_fn: String,
    #[serde(default = "scaling_factor")]
    scaling_factor: f64,
    shift_factor: Option<f64>,
    #[serde(default = "yes")]
    use_quant_conv: bool,
    #[serde(default = "yes")]
    use_post_quant_conv: bool,
    #[serde(default = "yes")]
    mid_block_add_attention: bool,
}

fn rgb() -> i64 {
    3
}
fn one() -> usize {
    1
}
fn groups() -> i64 {
    32
}
fn silu() -> String {
    "silu".into()
}
fn scaling_factor() -> f64 {
    0.18215
}
fn yes() -> bool {
    true
}

const EPS: f64 = 1e-6;

/// A convolution of `[kernel, stride, padding]`.
fn conv(b: &Builder, from: i64, to: i64, [kernel, stride, padding]: [i64; 3]) -> Result<Conv2d> {
    Ok(b.conv2d(from, to, kernel, Conv2dOptions { stride, padding, bias: true })?)
}

/// On the CPU, channels innermost in memory: oneDNN's convolutions then need no reordering (a sixth to a third faster encoding).
/// Not where the first layer is trained: the backward of group norms is three times slower in that layout.
fn laid_out(x: &Tensor, first: &Conv2d) -> nn::Result<Tensor> {
    Ok(match x.device() {
        Device::Cpu if !first.is_trained() => x.f_permute([0, 2, 3, 1])?.f_contiguous()?.f_permute([0, 3, 1, 2])?,
        _ => x.shallow_clone(),
    })
}

/// Norm, SiLU, convolution.
fn activated(norm: &GroupNorm, conv: &Conv2d, x: &Tensor) -> nn::Result<Tensor> {
    conv.forward(&norm.silu(x)?)
}

impl Config {
    fn check(&self) -> Result<(), String> {
        let plain = |types: &[String], class: &str| {
            types.len() == self.block_out_channels.len() && types.iter().all(|t| t == class)
        };
        if !plain(&self.down_block_types, "DownEncoderBlock2D") || !plain(&self.up_block_types, "UpDecoderBlock2D") {
            return Err(
                "one `DownEncoderBlock2D` and one `UpDecoderBlock2D` are needed for each of `block_out_channels`"
                    .into(),
            );
        }
        if self.block_out_channels.is_empty() {
            return Err("`block_out_channels` is empty".into());
        }
        if self.act_fn != "silu" {
            return Err(format!("`act_fn` is `{}`; only `silu` is supported", self.act_fn));
        }
        Ok(())
    }

    fn scale_factor(&self) -> i64 {
        1 << (self.block_out_channels.len() - 1)
    }
}

/// Pixels across and down for each latent, from `vae/config.json`.
pub(crate) fn pixels_per_latent(folder: &ModelFolder) -> Result<u32> {
    let config: Config = folder.config("vae")?;
    config.check().map_err(|reason| folder.config_error("vae/config.json", &reason))?;
    Ok(config.scale_factor() as u32)
}

#[derive(Debug)]
struct Resnet {
    norm1: GroupNorm,
    conv1: Conv2d,
    norm2: GroupNorm,
    conv2: Conv2d,
    conv_shortcut: Option<Conv2d>,
}

impl Resnet {
    fn new(c: &Config, b: &Builder, from: i64, to: i64) -> Result<Self> {
        Ok(Self {
            norm1: b.pp("norm1").group_norm(c.norm_num_groups, from, EPS)?,
            conv1: conv(&b.pp("conv1"), from, to, [3, 1, 1])?,
            norm2: b.pp("norm2").group_norm(c.norm_num_groups, to, EPS)?,
            conv2: conv(&b.pp("conv2"), to, to, [3, 1, 1])?,
            conv_shortcut: (from != to).then(|| conv(&b.pp("conv_shortcut"), from, to, [1, 1, 0])).transpose()?,
        })
    }

    fn forward(&self, x: &Tensor) -> nn::Result<Tensor> {
        let mut y = activated(&self.norm2, &self.conv2, &activated(&self.norm1, &self.conv1, x)?)?;
        Ok(match &self.conv_shortcut {
            Some(shortcut) => y.f_add_(&shortcut.forward(x)?)?,
            None => y.f_add_(x)?,
        })
    }
}

/// One head over all positions.
#[derive(Debug)]
struct Attention {
    group_norm: GroupNorm,
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
}

impl Attention {
    fn new(c: &Config, b: &Builder, width: i64) -> Result<Self> {
        Ok(Self {
            group_norm: b.pp("group_norm").group_norm(c.norm_num_groups, width, EPS)?,
            to_q: b.pp("to_q").linear(width, width, true)?,
            to_k: b.pp("to_k").linear(width, width, true)?,
            to_v: b.pp("to_v").linear(width, width, true)?,
            to_out: b.pp("to_out.0").linear(width, width, true)?,
        })
    }

    fn forward(&self, x_bchw: &Tensor) -> nn::Result<Tensor> {
        let shape = x_bchw.size();
        let y = self.group_norm.forward(x_bchw)?.f_flatten(2, 3)?.f_transpose(1, 2)?.f_unsqueeze(1)?; // [B, 1, HW, C]
        let (q, k, v) = (self.to_q.forward(&y)?, self.to_k.forward(&y)?, self.to_v.forward(&y)?);
        let out = self.to_out.forward(&attention::scaled_dot_product(&q, &k, &v, None, None)?)?;
        Ok(x_bchw.f_add(&out.f_squeeze_dim(1)?.f_transpose(1, 2)?.f_reshape(&shape)?)?)
    }
}

#[derive(Debug)]
struct MidBlock {
    resnets: [Resnet; 2],
    attention: Option<Attention>,
}

impl MidBlock {
    fn new(c: &Config, b: &Builder, width: i64) -> Result<Self> {
        let resnets = b.pp("resnets");
        Ok(Self {
            resnets: [Resnet::new(c, &resnets.pp(0), width, width)?, Resnet::new(c, &resnets.pp(1), width, width)?],
            attention: c
                .mid_block_add_attention
                .then(|| Attention::new(c, &b.pp("attentions.0"), width))
                .transpose()?,
        })
    }

    fn forward(&self, x: &Tensor) -> nn::Result<Tensor> {
        let mut x = self.resnets[0].forward(x)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(&x)?;
        }
        self.resnets[1].forward(&x)
    }
}

/// Resnets, then a convolution that halves or doubles the size.
#[derive(Debug)]
struct Level {
    resnets: Vec<Resnet>,
    resize: Option<Conv2d>,
}

impl Level {
    fn resnets(c: &Config, b: &Builder, from: i64, to: i64, count: usize) -> Result<Vec<Resnet>> {
        (0..count).map(|i| Resnet::new(c, &b.pp("resnets").pp(i), if i == 0 { from } else { to }, to)).collect()
    }

    fn down(c: &Config, b: &Builder, from: i64, to: i64, last: bool) -> Result<Self> {
        let resize = (!last).then(|| conv(&b.pp("downsamplers.0.conv"), to, to, [3, 2, 0])).transpose()?;
        Ok(Self { resnets: Self::resnets(c, b, from, to, c.layers_per_block)?, resize })
    }

    fn up(c: &Config, b: &Builder, from: i64, to: i64, last: bool) -> Result<Self> {
        let resize = (!last).then(|| conv(&b.pp("upsamplers.0.conv"), to, to, [3, 1, 1])).transpose()?;
        Ok(Self { resnets: Self::resnets(c, b, from, to, c.layers_per_block + 1)?, resize })
    }

    fn forward(&self, x: Tensor, before_resize: fn(&Tensor) -> nn::Result<Tensor>) -> nn::Result<Tensor> {
        let mut x = x;
        for resnet in &self.resnets {
            x = resnet.forward(&x)?;
        }
        if let Some(conv) = &self.resize {
            x = conv.forward(&before_resize(&x)?)?;
        }
        Ok(x)
    }
}

/// One zero row below and one zero column on the right: with stride 2, the convolution then covers the picture once.
fn pad_down(x: &Tensor) -> nn::Result<Tensor> {
    Ok(x.f_constant_pad_nd([0, 1, 0, 1])?)
}

fn double(x: &Tensor) -> nn::Result<Tensor> {
    let (_, _, h, w) = x.size4()?;
    Ok(x.f_upsample_nearest2d([2 * h, 2 * w], None, None)?)
}

#[derive(Debug)]
struct Encoder {
    conv_in: Conv2d,
    down_blocks: Vec<Level>,
    mid_block: MidBlock,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d,
}

impl Encoder {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let widths = &c.block_out_channels;
        let (first, last) = (widths[0], widths[widths.len() - 1]);
        let from = std::iter::once(&first).chain(widths);
        let levels = from.zip(widths).enumerate();
        Ok(Self {
            conv_in: conv(&b.pp("conv_in"), c.in_channels, first, [3, 1, 1])?,
            down_blocks: levels
                .map(|(i, (&from, &to))| Level::down(c, &b.pp("down_blocks").pp(i), from, to, i + 1 == widths.len()))
                .collect::<Result<_>>()?,
            mid_block: MidBlock::new(c, &b.pp("mid_block"), last)?,
            conv_norm_out: b.pp("conv_norm_out").group_norm(c.norm_num_groups, last, EPS)?,
            conv_out: conv(&b.pp("conv_out"), last, 2 * c.latent_channels, [3, 1, 1])?,
        })
    }

    fn forward(&self, pixels: &Tensor) -> nn::Result<Tensor> {
        let mut x = self.conv_in.forward(pixels)?;
        for level in &self.down_blocks {
            x = level.forward(x, pad_down)?;
        }
        activated(&self.conv_norm_out, &self.conv_out, &self.mid_block.forward(&x)?)
    }
}

#[derive(Debug)]
struct Decoder {
    conv_in: Conv2d,
    mid_block: MidBlock,
    up_blocks: Vec<Level>,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d,
}

impl Decoder {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let widths: Vec<i64> = c.block_out_channels.iter().rev().copied().collect();
        let (first, last) = (widths[0], widths[widths.len() - 1]);
        let from = std::iter::once(&first).chain(&widths);
        let levels = from.zip(&widths).enumerate();
        Ok(Self {
            conv_in: conv(&b.pp("conv_in"), c.latent_channels, first, [3, 1, 1])?,
            mid_block: MidBlock::new(c, &b.pp("mid_block"), first)?,
            up_blocks: levels
                .map(|(i, (&from, &to))| Level::up(c, &b.pp("up_blocks").pp(i), from, to, i + 1 == widths.len()))
                .collect::<Result<_>>()?,
            conv_norm_out: b.pp("conv_norm_out").group_norm(c.norm_num_groups, last, EPS)?,
            conv_out: conv(&b.pp("conv_out"), last, c.out_channels, [3, 1, 1])?,
        })
    }

    fn forward(&self, latents: &Tensor) -> nn::Result<Tensor> {
        let mut x = self.mid_block.forward(&self.conv_in.forward(latents)?)?;
        for level in &self.up_blocks {
            x = level.forward(x, double)?;
        }
        activated(&self.conv_norm_out, &self.conv_out, &x)
    }
}

/// The autoencoder.
#[derive(Debug)]
pub struct AutoencoderKl {
    config: Config,
    encoder: Encoder,
    quant_conv: Option<Conv2d>,
    decoder: Decoder,
    post_quant_conv: Option<Conv2d>,
    kind: Kind,
}

impl AutoencoderKl {
    /// From `vae/` of a model folder; computes in `kind`.
    pub fn new(folder: &ModelFolder, b: &Builder, kind: Kind) -> Result<Self> {
        let c: Config = folder.config("vae")?;
        c.check().map_err(|reason| folder.config_error("vae/config.json", &reason))?;
        let latent = c.latent_channels;
        Ok(Self {
            encoder: Encoder::new(&c, &b.pp("encoder"))?,
            quant_conv: c
                .use_quant_conv
                .then(|| conv(&b.pp("quant_conv"), 2 * latent, 2 * latent, [1, 1, 0]))
                .transpose()?,
            decoder: Decoder::new(&c, &b.pp("decoder"))?,
            post_quant_conv: c
                .use_post_quant_conv
                .then(|| conv(&b.pp("post_quant_conv"), latent, latent, [1, 1, 0]))
                .transpose()?,
            config: c,
            kind,
        })
    }

    /// As [`Vae::posterior`], recorded for autograd if weights are trained.
    pub fn encode(&self, pixels: &Tensor) -> Result<Posterior> {
        let (shape, factor) = (pixels.size(), self.config.scale_factor());
        if !matches!(shape[..], [_, c, h, w] if c == self.config.in_channels && h % factor == 0 && w % factor == 0) {
            let expected = format!(
                "expected [batch, {}, height, width] with sides that {factor} divides",
                self.config.in_channels
            );
            return Err(Error::Shape { what: "the picture", shape, expected });
        }
        let mut x = self.encoder.forward(&laid_out(&pixels.f_to_kind(self.kind)?, &self.encoder.conv_in)?)?;
        if let Some(conv) = &self.quant_conv {
            x = conv.forward(&x)?;
        }
        let [mean, logvar] = <[Tensor; 2]>::try_from(x.f_to_kind(Kind::Float)?.f_contiguous()?.f_chunk(2, 1)?)
            .expect("an even number of channels");
        Ok(Posterior { mean, logvar: logvar.f_clamp(-30.0, 20.0)? })
    }

    /// Pixels of latents that are *not* normalised, recorded for autograd if weights are trained.
    pub fn reconstruct(&self, latents: &Tensor) -> Result<Tensor> {
        let shape = latents.size();
        if !matches!(shape[..], [_, c, _, _] if c == self.config.latent_channels) {
            let expected = format!("expected [batch, {}, height, width]", self.config.latent_channels);
            return Err(Error::Shape { what: "the latent", shape, expected });
        }
        let mut z = laid_out(&latents.f_to_kind(self.kind)?, &self.decoder.conv_in)?;
        if let Some(conv) = &self.post_quant_conv {
            z = conv.forward(&z)?;
        }
        Ok(self.decoder.forward(&z)?.f_to_kind(Kind::Float)?.f_contiguous()?)
    }
}

impl Vae for AutoencoderKl {
    fn posterior(&self, pixels: &Tensor) -> Result<Posterior> {
        tch::no_grad(|| self.encode(pixels))
    }

    fn decode(&self, latents: &Tensor) -> Result<Tensor> {
        tch::no_grad(|| self.reconstruct(&self.normalisation().undo(&latents.f_to_kind(Kind::Float)?)?))
    }

    fn set_tiling(&mut self, on: bool) -> Result<()> {
        if on { Err(Error::NoTiling { family: "AutoencoderKL" }) } else { Ok(()) }
    }

    fn normalisation(&self) -> Normalisation {
        Normalisation::ScaleShift { scale: self.config.scaling_factor, shift: self.config.shift_factor.unwrap_or(0.0) }
    }

    fn latent_shape(&self, width: u32, height: u32, _frames: u32) -> Vec<i64> {
        let factor = self.config.scale_factor();
        vec![self.config.latent_channels, i64::from(height) / factor, i64::from(width) / factor]
    }
}

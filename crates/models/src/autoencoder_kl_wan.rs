//! `AutoencoderKLWan`: the causal video VAE of Wan 2.1 (Wan Team 2025, section 4.1).
//!
//! The reference is diffusers 0.42; field paths are checkpoint keys. A clip goes through in chunks, the first of one frame
//! and each later one of as many as a latent frame stands for, while every convolution over time remembers the last frames
//! it saw. So memory does not grow with the length of a clip, and a picture is a clip of one frame.

use nn::{Builder, CausalConv3d, Conv2d, Conv2dOptions, Init, Shared, attention};
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::family::{Normalisation, Posterior, Vae};
use crate::folder::ModelFolder;
use crate::tiling::Tiles;

/// The fields of `vae/config.json` that matter. Absent ones are the defaults of diffusers, the released model's.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct Config {
    base_dim: i64,
    decoder_base_dim: Option<i64>,
    z_dim: i64,
    dim_mult: Vec<i64>,
    num_res_blocks: usize,
    attn_scales: Vec<f64>,
    temperal_downsample: Vec<bool>,
    latents_mean: Vec<f64>,
    latents_std: Vec<f64>,
    is_residual: bool,
    in_channels: i64,
    out_channels: i64,
    patch_size: Option<i64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            base_dim: 96,
            decoder_base_dim: None,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            num_res_blocks: 2,
            attn_scales: Vec::new(),
            temperal_downsample: vec![false, true, true],
            latents_mean: RELEASED_MEAN.to_vec(),
            latents_std: RELEASED_STD.to_vec(),
            is_residual: false,
            in_channels: 3,
            out_channels: 3,
            patch_size: None,
        }
    }
}

/// Statistics of the released VAE's latents, by channel.
const RELEASED_MEAN: [f64; 16] = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
    -0.9497, 0.2503, -0.2921,
];
const RELEASED_STD: [f64; 16] = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
    2.8251, 1.9160,
];

impl Config {
    /// Reads and checks it.
    pub fn read(folder: &ModelFolder) -> Result<Self> {
        let config: Self = folder.config("vae")?;
        config.check().map_err(|reason| folder.config_error("vae/config.json", &reason))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let channels = usize::try_from(self.z_dim).unwrap_or(0);
        if self.is_residual || self.patch_size.is_some() {
            return Err("`is_residual` or `patch_size` is set: the VAE of Wan 2.2 5B is not supported".into());
        }
        if !self.attn_scales.is_empty() {
            return Err("`attn_scales` is not empty; attention is only supported in the middle block".into());
        }
        if self.dim_mult.is_empty() || self.temperal_downsample.len() + 1 != self.dim_mult.len() {
            return Err("`temperal_downsample` must have one entry less than `dim_mult`".into());
        }
        if channels == 0 || self.latents_mean.len() != channels || self.latents_std.len() != channels {
            return Err(format!("`latents_mean` and `latents_std` must have `z_dim` = {} numbers each", self.z_dim));
        }
        if !self.latents_std.iter().all(|std| std.is_finite() && *std > 0.0) {
            return Err("`latents_std` must be positive".into());
        }
        Ok(())
    }

    /// Pixels across and down for each latent.
    pub fn spatial_stride(&self) -> i64 {
        1 << (self.dim_mult.len() - 1)
    }

    /// Frames for each latent frame after the first.
    pub fn temporal_stride(&self) -> i64 {
        1 << self.temperal_downsample.iter().filter(|halves| **halves).count()
    }
}

// -------------------------------------------------------------------------------------------------------------- layers

/// What convolutions over time remember of the chunks so far, in the order in which a pass meets them.
#[derive(Default)]
struct Memory {
    slots: Vec<Option<Tensor>>,
    next: usize,
}

impl Memory {
    /// Starts the next chunk.
    fn rewind(&mut self) {
        self.next = 0;
    }

    fn slot(&mut self) -> &mut Option<Tensor> {
        if self.next == self.slots.len() {
            self.slots.push(None);
        }
        self.next += 1;
        &mut self.slots[self.next - 1]
    }
}

fn last_frames(x: &Tensor, count: i64) -> nn::Result<Tensor> {
    let frames = x.size()[2];
    let kept = count.min(frames);
    // A copy, so that what is remembered does not hold on to the whole chunk.
    Ok(x.f_narrow(2, frames - kept, kept)?.f_alias_copy()?)
}

/// The convolution of an endless clip, zeros before its first frame, a chunk at a time.
fn streamed(conv: &CausalConv3d, x: &Tensor, past: &mut Option<Tensor>) -> nn::Result<Tensor> {
    let seen = match past.take() {
        Some(past) => Tensor::f_cat(&[&past, x], 2)?,
        None => x.shallow_clone(),
    };
    *past = Some(last_frames(&seen, conv.reach())?);
    let missing = conv.reach() + x.size()[2] - seen.size()[2];
    if seen.size()[2] == 1 && missing == conv.reach() {
        return conv.forward_first(&seen);
    }
    conv.forward(&if missing > 0 { seen.f_constant_pad_nd([0, 0, 0, 0, missing, 0])? } else { seen })
}

fn conv3(b: &Builder, from: i64, to: i64) -> Result<CausalConv3d> {
    Ok(b.causal_conv3d([from, to], [3, 3, 3], [1, 1, 1], 1)?)
}

fn pointwise(b: &Builder, from: i64, to: i64) -> Result<CausalConv3d> {
    Ok(b.causal_conv3d([from, to], [1, 1, 1], [1, 1, 1], 0)?)
}

/// Each position's channels scaled to the length sqrt(C), then by `gamma`.
#[derive(Debug)]
struct Norm {
    gamma: Shared,
}

impl Norm {
    /// `gamma` has the dims [C, 1, ..], as many as the tensors it meets have after the batch.
    fn new(b: &Builder, channels: i64, dims: usize) -> Result<Self> {
        let mut shape = vec![1; dims];
        shape[0] = channels;
        Ok(Self { gamma: b.param("gamma", &shape, Init::Ones)? })
    }

    fn forward(&self, x: &Tensor) -> nn::Result<Tensor> {
        let (kind, wide) = (x.kind(), x.f_to_kind(Kind::Float)?);
        let length = wide.f_norm_scalaropt_dim(2, [1i64].as_slice(), true)?.f_clamp_min(1e-12)?;
        let root = (self.gamma.size()[0] as f64).sqrt();
        let gamma = self.gamma.f_to_kind(kind)?;
        if kind == Kind::Float {
            return Ok(wide.f_mul(&length.f_reciprocal()?.f_mul_scalar(root)?)?.f_mul_(&gamma)?);
        }
        Ok(wide.f_div(&length)?.f_to_kind(kind)?.f_mul_scalar_(root)?.f_mul_(&gamma)?)
    }
}

#[derive(Debug)]
struct Resnet {
    norm1: Norm,
    conv1: CausalConv3d,
    norm2: Norm,
    conv2: CausalConv3d,
    conv_shortcut: Option<CausalConv3d>,
}

impl Resnet {
    fn new(b: &Builder, from: i64, to: i64) -> Result<Self> {
        Ok(Self {
            norm1: Norm::new(&b.pp("norm1"), from, 4)?,
            conv1: conv3(&b.pp("conv1"), from, to)?,
            norm2: Norm::new(&b.pp("norm2"), to, 4)?,
            conv2: conv3(&b.pp("conv2"), to, to)?,
            conv_shortcut: (from != to).then(|| pointwise(&b.pp("conv_shortcut"), from, to)).transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, memory: &mut Memory) -> nn::Result<Tensor> {
        let y = streamed(&self.conv1, &self.norm1.forward(x)?.f_silu_()?, memory.slot())?;
        let mut y = streamed(&self.conv2, &self.norm2.forward(&y)?.f_silu_()?, memory.slot())?;
        Ok(match &self.conv_shortcut {
            Some(shortcut) => y.f_add_(&shortcut.forward(x)?)?,
            None => y.f_add_(x)?,
        })
    }
}

/// One head over the positions of each frame.
#[derive(Debug)]
struct Attention {
    norm: Norm,
    to_qkv: Conv2d,
    proj: Conv2d,
}

impl Attention {
    fn new(b: &Builder, width: i64) -> Result<Self> {
        let options = Conv2dOptions { stride: 1, padding: 0, bias: true };
        Ok(Self {
            norm: Norm::new(&b.pp("norm"), width, 3)?,
            to_qkv: b.pp("to_qkv").conv2d(width, 3 * width, 1, options)?,
            proj: b.pp("proj").conv2d(width, width, 1, options)?,
        })
    }

    fn forward(&self, x: &Tensor) -> nn::Result<Tensor> {
        by_frame(x, |frames| {
            let (n, c, h, w) = frames.size4()?;
            let qkv = self.to_qkv.forward(&self.norm.forward(frames)?)?;
            let parts = qkv.f_view([n, 1, 3 * c, h * w])?.f_transpose(2, 3)?.f_contiguous()?.f_chunk(3, 3)?;
            let y = attention::scaled_dot_product(&parts[0], &parts[1], &parts[2], None, None)?;
            let y = y.f_squeeze_dim(1)?.f_transpose(1, 2)?.f_reshape([n, c, h, w])?;
            Ok(self.proj.forward(&y)?.f_add_(frames)?)
        })
    }
}

/// `f` on [B F, C, H, W], whose result again has B F pictures.
fn by_frame(x: &Tensor, f: impl Fn(&Tensor) -> nn::Result<Tensor>) -> nn::Result<Tensor> {
    let (b, c, t, h, w) = x.size5()?;
    let y = f(&x.f_transpose(1, 2)?.f_reshape([b * t, c, h, w])?)?;
    let (_, c, h, w) = y.size4()?;
    Ok(y.f_view([b, t, c, h, w])?.f_transpose(1, 2)?)
}

#[derive(Debug)]
struct MidBlock {
    resnets: [Resnet; 2],
    attention: Attention,
}

impl MidBlock {
    fn new(b: &Builder, width: i64) -> Result<Self> {
        let resnets = b.pp("resnets");
        Ok(Self {
            resnets: [Resnet::new(&resnets.pp(0), width, width)?, Resnet::new(&resnets.pp(1), width, width)?],
            attention: Attention::new(&b.pp("attentions.0"), width)?,
        })
    }

    fn forward(&self, x: &Tensor, memory: &mut Memory) -> nn::Result<Tensor> {
        let x = self.attention.forward(&self.resnets[0].forward(x, memory)?)?;
        self.resnets[1].forward(&x, memory)
    }
}

/// Halves the sides, then, for all frames but the first, the number of frames.
#[derive(Debug)]
struct Down {
    conv: Conv2d,
    time_conv: Option<CausalConv3d>,
}

impl Down {
    fn new(b: &Builder, width: i64, time: bool) -> Result<Self> {
        let halve = || b.pp("time_conv").causal_conv3d([width, width], [3, 1, 1], [2, 1, 1], 0);
        Ok(Self {
            conv: b.pp("resample.1").conv2d(width, width, 3, Conv2dOptions { stride: 2, padding: 0, bias: true })?,
            time_conv: time.then(halve).transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, memory: &mut Memory) -> nn::Result<Tensor> {
        let x = by_frame(x, |frames| self.conv.forward(&frames.f_constant_pad_nd([0, 1, 0, 1])?))?;
        let Some(conv) = &self.time_conv else { return Ok(x) };
        let past = memory.slot();
        let last = last_frames(&x, 1)?;
        let y = match past.take() {
            Some(before) => conv.forward(&Tensor::f_cat(&[&before, &x], 2)?)?,
            None => x,
        };
        *past = Some(last);
        Ok(y)
    }
}

/// Doubles, for all frames but the first, the number of frames, then the sides; halves the channels.
#[derive(Debug)]
struct Up {
    conv: Conv2d,
    time_conv: Option<CausalConv3d>,
}

impl Up {
    fn new(b: &Builder, width: i64, time: bool) -> Result<Self> {
        let double = || b.pp("time_conv").causal_conv3d([width, 2 * width], [3, 1, 1], [1, 1, 1], 0);
        Ok(Self {
            conv: b.pp("resample.1").conv2d(
                width,
                width / 2,
                3,
                Conv2dOptions { stride: 1, padding: 1, bias: true },
            )?,
            time_conv: time.then(double).transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, memory: &mut Memory) -> nn::Result<Tensor> {
        let x = match &self.time_conv {
            Some(conv) => Self::double(conv, x, memory.slot())?,
            None => x.shallow_clone(),
        };
        by_frame(&x, |frames| {
            let (_, _, h, w) = frames.size4()?;
            self.conv.forward(&frames.f_upsample_nearest2d([2 * h, 2 * w], None, None)?)
        })
    }

    /// The first frame stays as it is and is not remembered; each later one gives two.
    fn double(conv: &CausalConv3d, x: &Tensor, past: &mut Option<Tensor>) -> nn::Result<Tensor> {
        if past.is_none() {
            *past = Some(x.f_narrow(2, 0, 0)?);
            return Ok(x.shallow_clone());
        }
        let (b, c, t, h, w) = x.size5()?;
        let pairs = streamed(conv, x, past)?.f_view([b, 2, c, t, h, w])?;
        Ok(pairs.f_permute([0, 2, 3, 1, 4, 5])?.f_reshape([b, c, 2 * t, h, w])?)
    }
}

// --------------------------------------------------------------------------------------------------- encoder and decoder

#[derive(Debug)]
enum DownBlock {
    Resnet(Resnet),
    Down(Down),
}

#[derive(Debug)]
struct Encoder {
    conv_in: CausalConv3d,
    down_blocks: Vec<DownBlock>,
    mid_block: MidBlock,
    norm_out: Norm,
    conv_out: CausalConv3d,
}

impl Encoder {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let widths: Vec<i64> = c.dim_mult.iter().map(|factor| factor * c.base_dim).collect();
        let conv_in = conv3(&b.pp("conv_in"), c.in_channels, c.base_dim)?;
        let (mut down_blocks, mut from) = (Vec::new(), c.base_dim);
        for (level, &to) in widths.iter().enumerate() {
            let next = |blocks: &Vec<DownBlock>| b.pp("down_blocks").pp(blocks.len());
            for _ in 0..c.num_res_blocks {
                down_blocks.push(DownBlock::Resnet(Resnet::new(&next(&down_blocks), from, to)?));
                from = to;
            }
            if let Some(&time) = c.temperal_downsample.get(level) {
                down_blocks.push(DownBlock::Down(Down::new(&next(&down_blocks), to, time)?));
            }
        }
        Ok(Self {
            conv_in,
            down_blocks,
            mid_block: MidBlock::new(&b.pp("mid_block"), from)?,
            norm_out: Norm::new(&b.pp("norm_out"), from, 4)?,
            conv_out: conv3(&b.pp("conv_out"), from, 2 * c.z_dim)?,
        })
    }

    fn forward(&self, chunk: &Tensor, memory: &mut Memory) -> nn::Result<Tensor> {
        memory.rewind();
        let mut x = streamed(&self.conv_in, chunk, memory.slot())?;
        for block in &self.down_blocks {
            x = match block {
                DownBlock::Resnet(resnet) => resnet.forward(&x, memory)?,
                DownBlock::Down(down) => down.forward(&x, memory)?,
            };
        }
        x = self.norm_out.forward(&self.mid_block.forward(&x, memory)?)?.f_silu_()?;
        streamed(&self.conv_out, &x, memory.slot())
    }
}

#[derive(Debug)]
struct UpBlock {
    resnets: Vec<Resnet>,
    upsampler: Option<Up>,
}

#[derive(Debug)]
struct Decoder {
    conv_in: CausalConv3d,
    mid_block: MidBlock,
    up_blocks: Vec<UpBlock>,
    norm_out: Norm,
    conv_out: CausalConv3d,
}

impl Decoder {
    fn new(c: &Config, b: &Builder) -> Result<Self> {
        let base = c.decoder_base_dim.unwrap_or(c.base_dim);
        let widths: Vec<i64> = c.dim_mult.iter().rev().map(|factor| factor * base).collect();
        let first = widths[0];
        let (conv_in, mid_block) =
            (conv3(&b.pp("conv_in"), c.z_dim, first)?, MidBlock::new(&b.pp("mid_block"), first)?);
        let mut from = first;
        let mut up_blocks = Vec::new();
        for (level, &to) in widths.iter().enumerate() {
            let b = b.pp("up_blocks").pp(level);
            let resnet = |i| Resnet::new(&b.pp("resnets").pp(i), if i == 0 { from } else { to }, to);
            let resnets = (0..=c.num_res_blocks).map(resnet).collect::<Result<_>>()?;
            let time = c.temperal_downsample.iter().rev().nth(level);
            let upsampler = time.map(|time| Up::new(&b.pp("upsamplers.0"), to, *time)).transpose()?;
            up_blocks.push(UpBlock { resnets, upsampler });
            from = to / 2;
        }
        let last = widths[widths.len() - 1];
        Ok(Self {
            conv_in,
            mid_block,
            up_blocks,
            norm_out: Norm::new(&b.pp("norm_out"), last, 4)?,
            conv_out: conv3(&b.pp("conv_out"), last, c.out_channels)?,
        })
    }

    fn forward(&self, frame: &Tensor, memory: &mut Memory) -> nn::Result<Tensor> {
        memory.rewind();
        let mut x = self.mid_block.forward(&streamed(&self.conv_in, frame, memory.slot())?, memory)?;
        for block in &self.up_blocks {
            for resnet in &block.resnets {
                x = resnet.forward(&x, memory)?;
            }
            if let Some(upsampler) = &block.upsampler {
                x = upsampler.forward(&x, memory)?;
            }
        }
        streamed(&self.conv_out, &self.norm_out.forward(&x)?.f_silu_()?, memory.slot())
    }
}

// --------------------------------------------------------------------------------------------------------- autoencoder

/// The autoencoder.
#[derive(Debug)]
pub struct AutoencoderKlWan {
    config: Config,
    encoder: Encoder,
    quant_conv: CausalConv3d,
    decoder: Decoder,
    post_quant_conv: CausalConv3d,
    kind: Kind,
    /// Pixels of a tile's side, and from one tile to the next.
    tiling: Option<(i64, i64)>,
}

/// As diffusers' `enable_tiling()` has it.
const TILES: (i64, i64) = (256, 192);

impl AutoencoderKlWan {
    /// From `vae/` of a model folder; computes in `kind`.
    pub fn new(config: Config, b: &Builder, kind: Kind) -> Result<Self> {
        let z = config.z_dim;
        Ok(Self {
            encoder: Encoder::new(&config, &b.pp("encoder"))?,
            quant_conv: pointwise(&b.pp("quant_conv"), 2 * z, 2 * z)?,
            post_quant_conv: pointwise(&b.pp("post_quant_conv"), z, z)?,
            decoder: Decoder::new(&config, &b.pp("decoder"))?,
            config,
            kind,
            tiling: None,
        })
    }

    /// Works on large clips in tiles of `side` pixels, `stride` pixels apart.
    pub fn set_tiles(&mut self, side: i64, stride: i64) {
        self.tiling = Some((side, stride));
    }

    /// Tiles of pixels, or of latents.
    fn tiles(&self, latents: bool) -> Option<Tiles> {
        let factor = self.config.spatial_stride();
        self.tiling.map(|(side, stride)| {
            if latents {
                Tiles { side: side / factor, stride: stride / factor, gives: factor, per: 1 }
            } else {
                Tiles { side, stride, gives: 1, per: factor }
            }
        })
    }

    /// Pixels to mean and log variance on top of each other, f32 [B, 2 C, f, h, w].
    fn moments(&self, pixels: &Tensor) -> Result<Tensor> {
        let (frames, stride) = (pixels.size()[2], self.config.temporal_stride());
        let mut memory = Memory::default();
        let mut parts = Vec::new();
        let mut start = 0;
        while start < frames {
            let count = if start == 0 { 1 } else { stride };
            let chunk = pixels.f_narrow(2, start, count)?.f_to_kind(self.kind)?;
            parts.push(self.quant_conv.forward(&self.encoder.forward(&chunk, &mut memory)?)?);
            start += count;
        }
        Ok(Tensor::f_cat(&parts, 2)?.f_to_kind(Kind::Float)?)
    }

    /// De-normalised latents to pixels, f32.
    fn pixels(&self, latents: &Tensor) -> Result<Tensor> {
        let z = self.post_quant_conv.forward(&latents.f_to_kind(self.kind)?)?;
        let mut memory = Memory::default();
        let frames = (0..z.size()[2])
            .map(|frame| Ok(self.decoder.forward(&z.f_narrow(2, frame, 1)?, &mut memory)?.f_to_kind(Kind::Float)?));
        let frames = frames.collect::<Result<Vec<_>>>()?;
        Ok(Tensor::f_cat(&frames, 2)?)
    }
}

impl Vae for AutoencoderKlWan {
    fn posterior(&self, pixels: &Tensor) -> Result<Posterior> {
        let (shape, side, stride) = (pixels.size(), self.config.spatial_stride(), self.config.temporal_stride());
        let channels = self.config.in_channels;
        let fits =
            |f: i64, h: i64, w: i64| f > 0 && (f - 1) % stride == 0 && h > 0 && w > 0 && h % side == 0 && w % side == 0;
        if !matches!(shape[..], [_, c, f, h, w] if c == channels && fits(f, h, w)) {
            let expected = format!(
                "expected [batch, {channels}, frames, height, width] with 1 + {stride} n frames and sides that {side} divides"
            );
            return Err(Error::Shape { what: "the clip", shape, expected });
        }
        let [mean, logvar] = tch::no_grad(|| -> Result<_> {
            Ok(<[Tensor; 2]>::try_from(
                match self.tiles(false).filter(|tiles| tiles.matter(pixels)) {
                    Some(tiles) => tiles.map(pixels, |tile| self.moments(tile)),
                    None => self.moments(pixels),
                }?
                .f_chunk(2, 1)?,
            )
            .expect("an even number of channels"))
        })?;
        Ok(Posterior { mean: mean.f_contiguous()?, logvar: logvar.f_clamp(-30.0, 20.0)? })
    }

    fn decode(&self, latents: &Tensor) -> Result<Tensor> {
        let shape = latents.size();
        if !matches!(shape[..], [_, c, f, _, _] if c == self.config.z_dim && f > 0) {
            let expected = format!("expected [batch, {}, frames, height, width]", self.config.z_dim);
            return Err(Error::Shape { what: "the latent", shape, expected });
        }
        // As diffusers, in the kind the VAE computes in.
        tch::no_grad(|| {
            let z = self.normalisation().undo(&latents.f_to_kind(self.kind)?)?;
            let pixels = match self.tiles(true).filter(|tiles| tiles.matter(&z)) {
                Some(tiles) => tiles.map(&z, |tile| self.pixels(tile)),
                None => self.pixels(&z),
            }?;
            Ok(pixels.f_clamp(-1.0, 1.0)?)
        })
    }

    fn set_tiling(&mut self, on: bool) -> Result<()> {
        self.tiling = on.then_some(TILES);
        Ok(())
    }

    fn normalisation(&self) -> Normalisation {
        Normalisation::MeanStd { mean: self.config.latents_mean.clone(), std: self.config.latents_std.clone() }
    }

    fn latent_shape(&self, width: u32, height: u32, frames: u32) -> Vec<i64> {
        let (side, stride) = (self.config.spatial_stride(), self.config.temporal_stride());
        let latent_frames = (i64::from(frames) - 1) / stride + 1;
        vec![self.config.z_dim, latent_frames, i64::from(height) / side, i64::from(width) / side]
    }
}

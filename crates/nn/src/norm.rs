//! Normalisations. All of them sum in f32 and give the kind of their input.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use torch::Shared;

use crate::builder::Builder;
use crate::division::Seam;
use crate::dtype::wide;
use crate::error::Result;
use crate::init::Init;
use crate::linear::{like, like_option};

/// `torch.nn.LayerNorm` over the last dim.
#[derive(Debug)]
pub struct LayerNorm {
    dim: i64,
    eps: f64,
    weight: Option<Shared>,
    bias: Option<Shared>,
}

impl LayerNorm {
    /// Without weight and bias.
    pub fn plain(dim: i64, eps: f64) -> Self {
        Self { dim, eps, weight: None, bias: None }
    }

    /// [.., dim] to [.., dim].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (like_option(self.weight.as_ref(), x)?, like_option(self.bias.as_ref(), x)?);
        Ok(x.f_layer_norm([self.dim], weight, bias, self.eps, true)?)
    }
}

/// Root-mean-square norm over the last dim, in one of two roundings that differ below f32.
#[derive(Debug)]
pub struct RmsNorm {
    dim: i64,
    eps: f64,
    weight: Shared,
    fused: bool,
    /// Of the features this share holds some; the rest counts as well.
    seam: Option<Arc<dyn Seam>>,
}

impl RmsNorm {
    /// [.., dim] to [.., dim].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if let Some(seam) = &self.seam {
            let wide = x.f_to_kind(wide(x.kind()))?;
            let squares = wide.f_square()?.f_sum_dim_intlist([-1i64].as_slice(), true, wide.kind())?;
            let variance = seam.sum(&squares)?.f_div_scalar(self.dim as f64)?;
            let normal = wide.f_mul(&variance.f_add_scalar(self.eps)?.f_rsqrt()?)?;
            // The fused norm's rounding: multiplied first.
            return Ok(normal.f_mul(&like(&self.weight, x)?.f_to_kind(wide.kind())?)?.f_to_kind(x.kind())?);
        }
        let weight = like(&self.weight, x)?;
        if self.fused {
            return Ok(x.f_rms_norm([self.dim], Some(weight), self.eps)?);
        }
        let wide = x.f_to_kind(Kind::Float)?;
        let variance = wide.f_square()?.f_mean_dim([-1i64].as_slice(), true, Kind::Float)?;
        let normal = wide.f_mul(&variance.f_add_scalar(self.eps)?.f_rsqrt()?)?;
        Ok(normal.f_to_kind(x.kind())?.f_mul(&weight)?)
    }
}

/// `torch.nn.GroupNorm` over dim 1.
#[derive(Debug)]
pub struct GroupNorm {
    groups: i64,
    eps: f64,
    weight: Shared,
    bias: Shared,
}

impl GroupNorm {
    /// [B, C, ..] to [B, C, ..].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (like(&self.weight, x)?, like(&self.bias, x)?);
        Ok(x.f_group_norm(self.groups, Some(weight), Some(bias), self.eps, true)?)
    }

    /// SiLU of [`forward`](Self::forward). For a picture [B, C, H, W] whose channels lie innermost on the CPU, and where nothing is
    /// recorded, both are one operator: half the time, and half precision is rounded once.
    pub fn silu(&self, x: &Tensor) -> Result<Tensor> {
        let recorded = x.requires_grad() || self.weight.f_alias()?.requires_grad();
        if !recorded && torch::device::threads() == 1 && channels_innermost(x) {
            return Ok(torch::ops::group_norm_silu(x, self.groups, &self.weight, &self.bias, self.eps)?);
        }
        Ok(self.forward(x)?.f_silu_()?)
    }
}

/// Whether `x` is [B, C, H, W] on the CPU in a kind and a layout that [`torch::ops::group_norm_silu`] takes.
fn channels_innermost(x: &Tensor) -> bool {
    let (size, kind) = (x.size(), x.kind());
    let [_, c, h, w] = size[..] else { return false };
    x.device() == Device::Cpu && matches!(kind, Kind::Float | Kind::BFloat16) && x.stride() == [c * h * w, 1, w * c, c]
}

impl Builder {
    /// A layer norm with `weight` and, if asked for, `bias`. For one with neither see [`LayerNorm::plain`].
    pub fn layer_norm(&self, dim: i64, eps: f64, bias: bool) -> Result<LayerNorm> {
        let weight = Some(self.param("weight", &[dim], Init::Ones)?);
        let bias = if bias { Some(self.param("bias", &[dim], Init::Zeros)?) } else { None };
        Ok(LayerNorm { dim, eps, weight, bias })
    }

    /// `diffusers.models.normalization.RMSNorm` and T5's layer norm: rounds to the input's kind, then multiplies.
    pub fn rms_norm(&self, dim: i64, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm { dim, eps, weight: self.param("weight", &[dim], Init::Ones)?, fused: false, seam: None })
    }

    /// `torch.nn.RMSNorm` (FLUX's query and key norms): multiplies in f32, then rounds.
    pub fn torch_rms_norm(&self, dim: i64, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm { dim, eps, weight: self.param("weight", &[dim], Init::Ones)?, fused: true, seam: None })
    }

    /// As [`torch_rms_norm`](Self::torch_rms_norm), over the features of all heads together, which may be divided.
    pub fn torch_rms_norm_of_heads(&self, dim: i64, eps: f64) -> Result<RmsNorm> {
        let weight = self.cut_param("weight", &[dim], (0, &[dim]), Init::Ones)?;
        let seam = self.division().and_then(|division| division.between_features());
        Ok(RmsNorm { dim, eps, weight, fused: true, seam })
    }

    /// A group norm with `weight` and `bias`.
    pub fn group_norm(&self, groups: i64, channels: i64, eps: f64) -> Result<GroupNorm> {
        let weight = self.param("weight", &[channels], Init::Ones)?;
        let bias = self.param("bias", &[channels], Init::Zeros)?;
        Ok(GroupNorm { groups, eps, weight, bias })
    }
}

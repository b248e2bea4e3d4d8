//! Convolutions over pictures and over clips.

use tch::Tensor;
use torch::Shared;

use crate::builder::Builder;
use crate::error::Result;
use crate::init::Init;
use crate::linear::{like, like_option};

/// Settings of a convolution beyond its size.
#[derive(Debug, Clone, Copy)]
pub struct Conv2dOptions {
    /// Step in both directions.
    pub stride: i64,
    /// Zeros added on all four sides.
    pub padding: i64,
    /// Whether there is a `bias`.
    pub bias: bool,
}

impl Default for Conv2dOptions {
    fn default() -> Self {
        Self { stride: 1, padding: 0, bias: true }
    }
}

/// `torch.nn.Conv2d` with a square kernel.
#[derive(Debug)]
pub struct Conv2d {
    weight: Shared,
    bias: Option<Shared>,
    options: Conv2dOptions,
}

impl Conv2d {
    /// Whether gradients of the weight are asked for.
    pub fn is_trained(&self) -> bool {
        self.weight.requires_grad()
    }

    /// [B, in, H, W] to [B, out, H', W'], computed in the kind of `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dOptions { stride, padding, .. } = self.options;
        let (weight, bias) = (like(&self.weight, x)?, like_option(self.bias.as_ref(), x)?);
        Ok(x.f_conv2d(&weight, bias, [stride, stride], [padding, padding], [1, 1], 1)?)
    }
}

/// `torch.nn.Conv3d` that looks at the present and the past only: time is never padded behind, and before it by the caller.
#[derive(Debug)]
pub struct CausalConv3d {
    weight: Shared,
    bias: Shared,
    stride: [i64; 3],
    padding: i64,
}

impl CausalConv3d {
    /// Frames before the first that the kernel reaches back to.
    pub fn reach(&self) -> i64 {
        self.weight.size()[2] - 1
    }

    /// [B, in, F, H, W] to [B, out, F', H', W'] with F' = (F - reach) / stride, computed in the kind of `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (like(&self.weight, x)?, like(&self.bias, x)?);
        let padding = [0, self.padding, self.padding];
        Ok(x.f_conv3d(&weight, Some(bias), self.stride, padding, [1, 1, 1], 1)?)
    }

    /// As [`forward`](Self::forward) on one frame after nothing but zeros, which only the last slice of the kernel sees:
    /// [B, in, 1, H, W] to [B, out, 1, H', W'].
    pub fn forward_first(&self, x: &Tensor) -> Result<Tensor> {
        let weight = like(&self.weight, x)?.f_select(2, self.reach())?;
        let ([_, down, across], padding) = (self.stride, [self.padding, self.padding]);
        let y =
            x.f_squeeze_dim(2)?.f_conv2d(&weight, Some(like(&self.bias, x)?), [down, across], padding, [1, 1], 1)?;
        Ok(y.f_unsqueeze(2)?)
    }
}

impl Builder {
    /// A convolution over time with `weight` [output, input, frames, height, width] of size `kernel`, and a `bias`; rows and
    /// columns are padded by `padding` zeros.
    pub fn causal_conv3d(
        &self,
        [input, output]: [i64; 2],
        kernel: [i64; 3],
        stride: [i64; 3],
        padding: i64,
    ) -> Result<CausalConv3d> {
        let fan_in = Init::FanIn(input * kernel.iter().product::<i64>());
        let [f, h, w] = kernel;
        let weight = self.param("weight", &[output, input, f, h, w], fan_in)?;
        Ok(CausalConv3d { weight, bias: self.param("bias", &[output], fan_in)?, stride, padding })
    }

    /// A convolution with `weight` [output, input, kernel, kernel].
    pub fn conv2d(&self, input: i64, output: i64, kernel: i64, options: Conv2dOptions) -> Result<Conv2d> {
        let fan_in = input * kernel * kernel;
        let weight = self.param("weight", &[output, input, kernel, kernel], Init::FanIn(fan_in))?;
        let bias = if options.bias { Some(self.param("bias", &[output], Init::FanIn(fan_in))?) } else { None };
        Ok(Conv2d { weight, bias, options })
    }
}

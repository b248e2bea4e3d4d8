//! Convolution over pictures.

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
    /// [B, in, H, W] to [B, out, H', W'], computed in the kind of `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dOptions { stride, padding, .. } = self.options;
        let (weight, bias) = (like(&self.weight, x)?, like_option(self.bias.as_ref(), x)?);
        Ok(x.f_conv2d(&weight, bias, [stride, stride], [padding, padding], [1, 1], 1)?)
    }
}

impl Builder {
    /// A convolution with `weight` [output, input, kernel, kernel].
    pub fn conv2d(&self, input: i64, output: i64, kernel: i64, options: Conv2dOptions) -> Result<Conv2d> {
        let fan_in = input * kernel * kernel;
        let weight = self.param("weight", &[output, input, kernel, kernel], Init::FanIn(fan_in))?;
        let bias = if options.bias { Some(self.param("bias", &[output], Init::FanIn(fan_in))?) } else { None };
        Ok(Conv2d { weight, bias, options })
    }
}

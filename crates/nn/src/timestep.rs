//! Sinusoidal embedding of time, as `diffusers.models.embeddings.get_timestep_embedding`.

use tch::{Kind, Tensor};

use crate::error::Result;

/// How the sinusoids are laid out.
#[derive(Debug, Clone, Copy)]
pub struct Sinusoidal {
    /// Width of the embedding.
    pub dim: i64,
    /// Cosines first.
    pub flip_sin_to_cos: bool,
    /// Taken from the divisor of the frequencies' exponent; 0 in flow transformers, 1 in the first UNets.
    pub downscale_freq_shift: f64,
    /// Multiplies the angles.
    pub scale: f64,
    /// Longest period.
    pub max_period: f64,
}

impl Sinusoidal {
    /// What FLUX, SD3, Qwen-Image and their kin use: cosines first, no shift.
    pub fn flow(dim: i64) -> Self {
        Self { dim, flip_sin_to_cos: true, downscale_freq_shift: 0.0, scale: 1.0, max_period: 10_000.0 }
    }

    /// `[B]` of any float kind to f32 [B, dim]. An odd width gets a zero column at the end.
    pub fn embed(&self, timesteps: &Tensor) -> Result<Tensor> {
        let half = self.dim / 2;
        let device = timesteps.device();
        let exponent = Tensor::f_arange(half, (Kind::Float, device))?
            .f_mul_scalar(-self.max_period.ln())?
            .f_div_scalar(half as f64 - self.downscale_freq_shift)?;
        let frequencies = exponent.f_exp()?;
        let mut angles = timesteps.f_unsqueeze(1)?.f_to_kind(Kind::Float)?.f_mul(&frequencies.f_unsqueeze(0)?)?;
        angles = angles.f_mul_scalar(self.scale)?;
        let (sin, cos) = (angles.f_sin()?, angles.f_cos()?);
        let embedding =
            if self.flip_sin_to_cos { Tensor::f_cat(&[cos, sin], -1)? } else { Tensor::f_cat(&[sin, cos], -1)? };
        Ok(if self.dim % 2 == 1 { embedding.f_constant_pad_nd([0, 1])? } else { embedding })
    }
}

//! What the VAE is trained for: pixels, their edges, and latents that stay near a unit Gaussian.

use models::{Posterior, Result};
use tch::{Kind, Tensor};

/// Weights beside the squared error of pixels. Squares find outlines first: to a mean absolute error a thin line is a few
/// outliers, and the best guess is to leave it out.
const EDGES: f64 = 1.0;
const ABSOLUTE: f64 = 0.1;

/// Weight of the Kullback–Leibler divergence, a mean over latent values.
const DIVERGENCE: f64 = 1e-4;

/// f32 scalar.
pub(crate) fn loss(pixels: &Tensor, seen: &Tensor, posterior: &Posterior) -> Result<Tensor> {
    let apart = seen.f_sub(pixels)?;
    let along = |dim: i64| -> Result<Tensor> {
        let last = apart.size()[dim as usize] - 1;
        Ok(apart.f_narrow(dim, 1, last)?.f_sub(&apart.f_narrow(dim, 0, last)?)?.f_square()?.f_mean(Kind::Float)?)
    };
    let edges = along(2)?.f_add(&along(3)?)?.f_mul_scalar(EDGES)?;
    let absolute = apart.f_abs()?.f_mean(Kind::Float)?.f_mul_scalar(ABSOLUTE)?;
    let Posterior { mean, logvar } = posterior;
    let divergence = (mean.f_square()?.f_add(&logvar.f_exp()?)?.f_sub(logvar)?.f_add_scalar(-1.0)?)
        .f_mean(Kind::Float)?
        .f_mul_scalar(0.5 * DIVERGENCE)?;
    Ok(apart.f_square()?.f_mean(Kind::Float)?.f_add(&edges)?.f_add(&absolute)?.f_add(&divergence)?)
}

/// Peak signal-to-noise ratio in dB of pixels in [-1, 1].
pub(crate) fn psnr(pixels: &Tensor, seen: &Tensor) -> f64 {
    let error = (seen.clamp(-1.0, 1.0) - pixels).square().mean(Kind::Double).double_value(&[]);
    10.0 * (4.0 / error).log10()
}

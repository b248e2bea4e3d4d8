//! Operators over lists of tensors, and normal numbers that equal those of a seeded torch generator.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi;

/// Constants of one AdamW step (decoupled weight decay, as `torch.optim.AdamW`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the mean of gradients and of their squares.
    pub betas: (f64, f64),
    /// Fraction of each weight taken away per unit of learning rate.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
}

/// One AdamW step over all tensors at once, in place. `steps` are f32 scalar tensors, increased here.
pub fn fused_adamw(
    step: AdamW,
    parameters: &[Tensor],
    gradients: &[Tensor],
    means: &[Tensor],
    variances: &[Tensor],
    steps: &[Tensor],
) -> Result<()> {
    let n = parameters.len();
    for (what, found) in [
        ("gradients", gradients.len()),
        ("means", means.len()),
        ("variances", variances.len()),
        ("step counters", steps.len()),
    ] {
        if found != n {
            return Err(Error::Count { what, found, expected: n });
        }
    }
    if n == 0 {
        return Ok(());
    }
    let [p, g, m, v, s] = [parameters, gradients, means, variances, steps].map(ffi::handles);
    // SAFETY: five arrays of `n` live handles each.
    ffi::status(unsafe {
        ffi::shim_fused_adamw(
            p.as_ptr(),
            g.as_ptr(),
            m.as_ptr(),
            v.as_ptr(),
            s.as_ptr(),
            n,
            step.lr,
            step.betas.0,
            step.betas.1,
            step.weight_decay,
            step.eps,
        )
    })?;
    Ok(())
}

/// The l2 norm of every tensor, f32 `[n]`, reading each once.
pub fn norms(tensors: &[Tensor]) -> Result<Tensor> {
    let handles = ffi::handles(tensors);
    // SAFETY: an array of `n` live handles.
    ffi::made(unsafe { ffi::shim_norms(handles.as_ptr(), handles.len()) })
}

/// Multiplies every tensor by the scalar tensor `factor`, in place.
pub fn scale(tensors: &[Tensor], factor: &Tensor) -> Result<()> {
    let handles = ffi::handles(tensors);
    // SAFETY: an array of `n` live handles and one more.
    ffi::status(unsafe { ffi::shim_scale(handles.as_ptr(), handles.len(), ffi::handle(factor)) })?;
    Ok(())
}

/// SiLU of the group norm of `x` [B, C, H, W], f32 or bf16, whose channels lie innermost in the memory of the CPU; in the layout and
/// the kind of `x`, rounded once. On one thread, and not recorded for autograd.
pub fn group_norm_silu(x: &Tensor, groups: i64, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    // SAFETY: three live handles; shapes, kinds and layout are checked before memory is touched.
    ffi::made(unsafe { ffi::shim_group_norm_silu(ffi::handle(x), groups, ffi::handle(weight), ffi::handle(bias), eps) })
}

/// Standard normal f32 numbers on the CPU, bitwise those of
/// `torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))`.
pub fn randn_seeded(seed: u64, shape: &[i64]) -> Result<Tensor> {
    // SAFETY: `shape` holds as many numbers as said.
    ffi::made(unsafe { ffi::shim_randn(seed, shape.as_ptr(), shape.len(), 0) })
}

/// As [`randn_seeded`] with `dtype=torch.bfloat16`: other numbers, not the same ones rounded.
pub fn randn_seeded_bf16(seed: u64, shape: &[i64]) -> Result<Tensor> {
    // SAFETY: `shape` holds as many numbers as said.
    ffi::made(unsafe { ffi::shim_randn(seed, shape.as_ptr(), shape.len(), 1) })
}

/// The noise that a pipeline of diffusers begins with when it computes in `kind`: from a generator on the CPU, and in bfloat16 the
/// numbers of that kind. Whoever draws from a seed takes it from here, so that a seed means one picture.
pub fn noise_seeded(seed: u64, shape: &[i64], kind: Kind) -> Result<Tensor> {
    match kind {
        Kind::BFloat16 => randn_seeded_bf16(seed, shape),
        kind => Ok(randn_seeded(seed, shape)?.f_to_kind(kind)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_drawn_in_the_kind_that_is_computed_in() {
        let drawn = |kind| noise_seeded(2026, &[64], kind).unwrap();
        assert!(drawn(Kind::Float).equal(&randn_seeded(2026, &[64]).unwrap()));
        assert!(drawn(Kind::BFloat16).equal(&randn_seeded_bf16(2026, &[64]).unwrap()));
        assert!(!drawn(Kind::BFloat16).equal(&drawn(Kind::Float).to_kind(Kind::BFloat16)), "rounding gives others");
        assert!(drawn(Kind::Double).equal(&drawn(Kind::Float).to_kind(Kind::Double)));
    }

    #[test]
    #[expect(clippy::excessive_precision, reason = "bf16 numbers written out in full")]
    fn normals_in_bf16_are_torchs_own() {
        // torch.randn(16, generator=torch.Generator("cpu").manual_seed(2026), dtype=torch.bfloat16)
        let expected = [
            -0.068_359_375,
            -0.367_187_5,
            0.462_890_625,
            0.208_984_375,
            0.239_257_812_5,
            0.652_343_75,
            -0.490_234_375,
            -0.265_625,
            -0.055_908_203_125,
            -1.164_062_5,
            -0.015_380_859_375,
            -1.578_125,
            -0.808_593_75,
            0.535_156_25,
            -0.022_460_937_5,
            -1.070_312_5,
        ];
        let drawn = randn_seeded_bf16(2026, &[16]).unwrap();
        assert_eq!(drawn.kind(), Kind::BFloat16);
        assert_eq!(Vec::<f32>::try_from(drawn.to_kind(Kind::Float)).unwrap(), expected);
    }
}

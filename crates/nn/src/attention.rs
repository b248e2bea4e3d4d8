//! Attention over heads.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use tch::{Device, Kind, Tensor};

use crate::builder::Builder;
use crate::division::Seam;
use crate::error::Result;

/// Below so many keys libtorch's CPU kernel is up to four times slower in bf16 than in f32, most of it in backward.
const SHORT: i64 = 256;

/// As many keys as are taken for given where the kernel is chosen; 0: as many as there are.
static GIVEN: AtomicI64 = AtomicI64::new(0);

/// From now on kernels are chosen as for so many keys, or by what there is again: for measuring with few tokens what many take.
pub fn choose_as_for(keys: Option<i64>) {
    GIVEN.store(keys.unwrap_or(0), Ordering::Relaxed);
}

/// The first attention for which libtorch had no fused kernel.
static UNFUSED: OnceLock<String> = OnceLock::new();

/// The first attention of this process for which libtorch had no fused kernel (flash, memory-efficient, cuDNN), so that all its scores
/// were in memory at once.
pub fn unfused() -> Option<&'static str> {
    UNFUSED.get().map(String::as_str)
}

/// libtorch's attention, seen to take a fused kernel.
fn attend([q, k, v]: [&Tensor; 3], mask: Option<&Tensor>, causal: bool, scale: Option<f64>) -> Result<Tensor> {
    if UNFUSED.get().is_none() && Tensor::f_internal_fused_sdp_choice(q, k, v, mask, 0.0, causal, scale, false)? == MATH
    {
        let masked = if mask.is_some() { ", with a mask" } else { "" };
        let told = format!("queries {:?}, keys {:?}, {:?} on {:?}{masked}", q.size(), k.size(), q.kind(), q.device());
        let _ = UNFUSED.set(told);
    }
    Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale, false)?)
}

/// Of `at::SDPBackend`: no fused kernel.
const MATH: i64 = 0;

fn is_short(k: &Tensor) -> bool {
    let given = GIVEN.load(Ordering::Relaxed);
    (if given > 0 { given } else { k.size()[2] }) < SHORT
}

/// `softmax(q k^T * scale + mask) v` by libtorch's best kernel. `q` [B, heads, S, D], `k` and `v` [B, heads, T, D]; `mask`
/// broadcasts to [B, heads, S, T], either bool (true = attend) or added to the scores; `scale` defaults to 1/sqrt(D).
/// The result has the kind of `q`; short sequences on a CPU are computed in f32 whatever it is.
pub fn scaled_dot_product(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    scale: Option<f64>,
) -> Result<Tensor> {
    if q.device() == Device::Cpu && q.kind() == Kind::BFloat16 && is_short(k) {
        let [q, k, v] = [q, k, v].map(|x| x.f_to_kind(Kind::Float));
        let mask = match mask {
            Some(mask) if mask.kind() == Kind::BFloat16 => Some(mask.f_to_kind(Kind::Float)?),
            other => other.map(Tensor::shallow_clone),
        };
        return Ok(attend([&q?, &k?, &v?], mask.as_ref(), false, scale)?.f_to_kind(Kind::BFloat16)?);
    }
    attend([q, k, v], mask, false, scale)
}

/// As [`scaled_dot_product`], each position attending to itself and those before it.
pub fn causal(q: &Tensor, k: &Tensor, v: &Tensor, scale: Option<f64>) -> Result<Tensor> {
    attend([q, k, v], None, true, scale)
}

/// [B, S, heads * D] to [B, heads, S, D].
pub fn split_heads(x: &Tensor, heads: i64) -> Result<Tensor> {
    let (batch, length, width) = x.size3()?;
    Ok(x.f_view([batch, length, heads, width / heads])?.f_transpose(1, 2)?)
}

/// [B, heads, S, D] to [B, S, heads * D].
pub fn merge_heads(x: &Tensor) -> Result<Tensor> {
    let (batch, heads, length, width) = x.size4()?;
    Ok(x.f_transpose(1, 2)?.f_reshape([batch, length, heads * width])?)
}

/// Attention of the stream's tokens to one another.
#[derive(Debug)]
pub struct SelfAttention {
    seam: Option<Arc<dyn Seam>>,
}

impl SelfAttention {
    /// [B, T, H, K] each to [B, T, H * K].
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        if let Some(seam) = &self.seam {
            return Ok(seam.attend(q, k, v)?.f_flatten(2, 3)?);
        }
        let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
        merge_heads(&scaled_dot_product(&q, &k, &v, None, None)?)
    }
}

impl Builder {
    /// Attention over the stream, of a model with so many heads.
    pub fn self_attention(&self, heads: i64) -> Result<SelfAttention> {
        self.check_heads(heads)?;
        Ok(SelfAttention { seam: self.division().and_then(|division| division.seam) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_without_a_fused_kernel_is_noticed() {
        let x = || Tensor::ones([1, 2, 5, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mask = Tensor::zeros([1, 1, 5, 5], (Kind::Float, Device::Cpu));
        let attends = |mask: Option<&Tensor>| scaled_dot_product(&x(), &x(), &x(), mask, None).unwrap();
        for out in [attends(None), attends(Some(&mask)), causal(&x(), &x(), &x(), None).unwrap()] {
            assert_eq!(out.size(), [1, 2, 5, 8]);
        }
        assert_eq!(unfused(), None);
        let _ = attends(Some(&mask.set_requires_grad(true)));
        assert_eq!(unfused(), Some("queries [1, 2, 5, 8], keys [1, 2, 5, 8], Float on Cpu, with a mask"));
    }
}

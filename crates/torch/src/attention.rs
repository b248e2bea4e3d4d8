//! Attention over some of the keys, that can be merged with attention over others: libtorch's kernels with the logarithm of each
//! query's sum of exponentials, on the CPU and, flash or memory-efficient by kind, on a GPU.

use std::ptr::null_mut;

use tch::Tensor;

use crate::error::Result;
use crate::ffi;

/// `softmax(q k^T / sqrt(K)) v` [B, H, T, K], and the logarithm of the sum of each query's exponentials, f32 [B, H, T]. Not recorded
/// for autograd: see [`backward`].
pub fn with_lse(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
    let mut result = [null_mut(); 2];
    // SAFETY: three live handles, and room for two.
    ffi::status(unsafe { ffi::shim_attention(ffi::handle(q), ffi::handle(k), ffi::handle(v), result.as_mut_ptr()) })?;
    let [out, lse] = result.map(ffi::made);
    Ok((out?, lse?))
}

/// Gradients of queries, keys and values, where `out` and `lse` are over all keys, of which these are some.
pub fn backward(gradient: &Tensor, [q, k, v]: [&Tensor; 3], out: &Tensor, lse: &Tensor) -> Result<[Tensor; 3]> {
    let [gradient, q, k, v, out, lse] = [gradient, q, k, v, out, lse].map(ffi::handle);
    let mut result = [null_mut(); 3];
    // SAFETY: six live handles, and room for three.
    ffi::status(unsafe { ffi::shim_attention_backward(gradient, q, k, v, out, lse, result.as_mut_ptr()) })?;
    let [q, k, v] = result.map(ffi::made);
    Ok([q?, k?, v?])
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    /// Against the definition, in f64.
    #[test]
    fn what_it_takes_to_merge_is_the_logarithm_of_the_sum_of_exponentials() {
        let drawn = |(seed, tokens)| crate::ops::randn_seeded(seed, &[2, 3, tokens, 8]).unwrap().to_kind(Kind::Double);
        let [q, k, v] = [(5, 6), (6, 9), (7, 9)].map(drawn);
        let scores = q.matmul(&k.transpose(2, 3)) / 8f64.sqrt();
        let (out, lse) = with_lse(&q, &k, &v).unwrap();
        let far = |a: &Tensor, b: &Tensor| (a - b).abs().max().double_value(&[]);
        assert!(far(&out, &scores.softmax(-1, Kind::Double).matmul(&v)) < 1e-12);
        assert!(far(&lse.to_kind(Kind::Double), &scores.logsumexp([-1], false)) < 1e-6);

        let [a, b, c] = [&q, &k, &v].map(|x| x.copy().set_requires_grad(true));
        let direct = (a.matmul(&b.transpose(2, 3)) / 8f64.sqrt()).softmax(-1, Kind::Double).matmul(&c);
        direct.square().sum(Kind::Double).backward();
        let found = backward(&(&out * 2.0), [&q, &k, &v], &out, &lse).unwrap();
        for (found, leaf) in found.iter().zip([a, b, c]) {
            assert!(far(found, &leaf.grad()) < 1e-5);
        }
    }
}

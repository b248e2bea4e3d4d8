//! Context parallel: every rank has a share of the tokens throughout; only attention brings them together. Two ways, which may
//! be combined:
//!
//! Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses"): ranks trade tokens for heads, so that each attends over all tokens with
//! some of the heads, and trade back. [`ring`] (Liu et al. 2023, "Ring Attention"): keys and values go round.
//! Neighbouring ranks trade heads; the groups of them form the ring (Fang and Zhao 2024, "USP").

use nn::attention::scaled_dot_product;
use spec::mesh::Axis;
use tch::Tensor;

use crate::error::Result;
use crate::exchange::Exchange;
use crate::layout::Layout;
use crate::ring;
use crate::team::Team;
use crate::trouble::Trouble;

/// The ranks that share a stream's tokens.
#[derive(Debug)]
pub(crate) struct Context {
    heads: Exchange,
    ring: Exchange,
}

impl Context {
    pub(crate) fn new(team: &Team, trouble: &Trouble) -> Result<Self> {
        let (members, index) = (team.ranks(&[Axis::Cp]), team.place(Axis::Cp).0);
        let ulysses = team.mesh().ulysses();
        let group =
            |members: &[usize]| -> Result<Exchange> { Ok(Exchange::new(team.group(members)?, trouble.clone())) };
        let heads = group(&members[index / ulysses * ulysses..][..ulysses])?;
        let ring: Vec<usize> = members.iter().skip(index % ulysses).step_by(ulysses).copied().collect();
        Ok(Self { heads, ring: group(&ring)? })
    }

    /// Ranks.
    pub(crate) fn size(&self) -> usize {
        self.heads.size() * self.ring.size()
    }

    /// Attention over the tokens of all ranks: queries, keys and values [B, t, H, K] of this rank's, to the same shape.
    pub(crate) fn attend(&self, qkv: [&Tensor; 3], layout: &Layout) -> nn::Result<Tensor> {
        let tokens = qkv[0].size()[1];
        let [q, k, v] = self.to_heads(qkv)?;
        let ulysses = self.heads.size();
        // What of the keys counts, of each of the ring's blocks: the chunks of `ulysses` ranks.
        let real = |block: usize| {
            let chunks = (0..ulysses).flat_map(|i| {
                let stretches = layout.real(block * ulysses + i);
                stretches.into_iter().map(move |(first, count)| (first + i as i64 * tokens, count))
            });
            chunks.collect()
        };
        let out = if self.ring.size() == 1 {
            let real: Vec<(i64, i64)> = real(0);
            scaled_dot_product(&q, &kept(&k, &real)?, &kept(&v, &real)?, None, None)?
        } else {
            ring::attend(&self.ring, [&q, &k, &v], &(0..self.ring.size()).map(real).collect::<Vec<_>>())?
        };
        self.to_tokens(&out)
    }

    /// [B, t, H, K] of this rank's tokens to [B, h, T, K] of its heads and the tokens of the ranks that trade.
    fn to_heads(&self, qkv: [&Tensor; 3]) -> nn::Result<[Tensor; 3]> {
        let ranks = self.heads.size() as i64;
        if ranks == 1 {
            let [q, k, v] = qkv.map(|x| x.f_transpose(1, 2));
            return Ok([q?, k?, v?]);
        }
        let (b, t, h, w) = qkv[0].size4()?;
        let stacked = Tensor::f_stack(&qkv, 0)?.f_view([3, b, t, ranks, h / ranks, w])?;
        // Dim 0: to whom, then from whom, which is the order of tokens.
        let traded = self.heads.swap(&stacked.f_permute([3, 0, 1, 2, 4, 5])?)?;
        let mine = traded.f_permute([1, 2, 4, 0, 3, 5])?.f_reshape([3, b, h / ranks, ranks * t, w])?;
        Ok([mine.f_get(0)?, mine.f_get(1)?, mine.f_get(2)?])
    }

    /// The inverse of [`to_heads`](Self::to_heads), for one tensor.
    fn to_tokens(&self, x: &Tensor) -> nn::Result<Tensor> {
        let ranks = self.heads.size() as i64;
        if ranks == 1 {
            return Ok(x.f_transpose(1, 2)?);
        }
        let (b, h, t, w) = x.size4()?;
        let traded = x.f_reshape([b, h, ranks, t / ranks, w])?.f_permute([2, 0, 1, 3, 4])?;
        let traded = self.heads.swap(&traded)?;
        Ok(traded.f_permute([1, 3, 0, 2, 4])?.f_reshape([b, t / ranks, ranks * h, w])?)
    }
}

/// Of [B, H, T, K], the stretches (first, count) of tokens, end to end.
pub(crate) fn kept(x: &Tensor, stretches: &[(i64, i64)]) -> nn::Result<Tensor> {
    let mut joined: Vec<(i64, i64)> = Vec::new();
    for (first, count) in stretches {
        match joined.last_mut() {
            Some((from, length)) if *from + *length == *first => *length += count,
            _ => joined.push((*first, *count)),
        }
    }
    match joined[..] {
        [(0, count)] if count == x.size()[2] => Ok(x.shallow_clone()),
        [(first, count)] => Ok(x.f_narrow(2, first, count)?),
        _ => {
            let pieces = joined.iter().map(|(first, count)| x.f_narrow(2, *first, *count));
            Ok(Tensor::f_cat(&pieces.collect::<Result<Vec<_>, _>>()?, 2)?)
        }
    }
}

//! Where the tokens of a divided stream are: every stream is cut into chunks of one width, one for each rank, the last ones
//! filled up with tokens that count for nothing. Arithmetic and views only.

use tch::Tensor;

use crate::error::Result;

/// Tokens of each stream, and the ranks they are on: `outer` groups of `inner`, whose chunks are neighbours.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Layout {
    /// Tokens of each stream that `embed` made.
    pub(crate) lengths: Vec<i64>,
    pub(crate) outer: usize,
    pub(crate) inner: usize,
}

impl Layout {
    /// Ranks that share the tokens.
    fn shares(&self) -> i64 {
        (self.outer * self.inner) as i64
    }

    /// Tokens of each stream on one rank, fillers included.
    fn widths(&self) -> Vec<i64> {
        self.lengths.iter().map(|length| (length + self.shares() - 1) / self.shares()).collect()
    }

    /// Of a tensor with a row in `dim` for each token of stream `stream`: the rows of `count` ranks from the `first` on.
    pub(crate) fn chunk(&self, x: &Tensor, stream: usize, dim: i64, first: usize, count: usize) -> Result<Tensor> {
        let width = self.widths()[stream];
        let fill = width * self.shares() - self.lengths[stream];
        let filled = if fill == 0 {
            x.shallow_clone()
        } else {
            let mut shape = x.size();
            shape[dim as usize] = fill;
            Tensor::f_cat(&[x, &Tensor::f_zeros(shape, (x.kind(), x.device()))?], dim)?
        };
        Ok(filled.f_narrow(dim, width * first as i64, width * count as i64)?)
    }

    /// What `tokens` of one rank are made of: one stream, or all of them end to end.
    fn segments(&self, tokens: i64) -> Vec<i64> {
        let widths = self.widths();
        if widths.len() > 1 && widths.iter().sum::<i64>() == tokens { widths } else { vec![tokens] }
    }

    /// [ranks, B, t, D] to [B, T, D], stream by stream.
    pub(crate) fn together(&self, x: &Tensor) -> Result<Tensor> {
        let (ranks, batch, tokens, width) = x.size4()?;
        let mut from = 0;
        let streams = self.segments(tokens).into_iter().map(|segment| {
            let stream = x.f_narrow(2, from, segment)?.f_transpose(0, 1)?;
            from += segment;
            Ok(stream.f_reshape([batch, ranks * segment, width])?)
        });
        let streams = streams.collect::<Result<Vec<_>>>()?;
        joined(streams, 1)
    }

    /// The inverse of [`together`](Self::together).
    pub(crate) fn apart(&self, x: &Tensor, ranks: usize) -> Result<Tensor> {
        let (ranks, (batch, tokens, width)) = (ranks as i64, x.size3()?);
        let mut from = 0;
        let streams = self.segments(tokens / ranks).into_iter().map(|segment| {
            let stream = x.f_narrow(1, from, segment * ranks)?.f_reshape([batch, ranks, segment, width])?;
            from += segment * ranks;
            Ok(stream.f_transpose(0, 1)?)
        });
        let streams = streams.collect::<Result<Vec<_>>>()?;
        joined(streams, 2)
    }

    /// [B, T, D] of all ranks, without the fillers. `stream`: which stream it is; `None`: all of them end to end.
    pub(crate) fn without_fillers(&self, x: &Tensor, stream: Option<usize>) -> Result<Tensor> {
        if let Some(stream) = stream {
            return Ok(x.f_narrow(1, 0, self.lengths[stream])?);
        }
        let mut from = 0;
        let streams = self.lengths.iter().zip(self.widths()).map(|(length, width)| {
            let stream = x.f_narrow(1, from, *length)?;
            from += width * self.shares();
            Ok(stream)
        });
        let streams = streams.collect::<Result<Vec<_>>>()?;
        joined(streams, 1)
    }

    /// In the tokens of an outer group, all streams end to end: the stretches (first, count) that are no fillers.
    pub(crate) fn real(&self, group: usize) -> Vec<(i64, i64)> {
        let (mut from, mut stretches) = (0, Vec::<(i64, i64)>::new());
        for (length, width) in self.lengths.iter().zip(self.widths()) {
            let width = width * self.inner as i64;
            let count = (length - width * group as i64).clamp(0, width);
            if count > 0 {
                match stretches.last_mut() {
                    Some((first, last)) if *first + *last == from => *last += count,
                    _ => stretches.push((from, count)),
                }
            }
            from += width;
        }
        stretches
    }
}

/// Streams end to end; a single one as it is.
fn joined(mut streams: Vec<Tensor>, dim: i64) -> Result<Tensor> {
    match streams.pop() {
        Some(only) if streams.is_empty() => Ok(only),
        last => Ok(Tensor::f_cat(&streams.into_iter().chain(last).collect::<Vec<_>>(), dim)?),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::{Device, Kind};

    use super::*;

    proptest! {
        /// Chunks put together again are the streams, whether they were joined meanwhile or not.
        #[test]
        fn chunks_are_the_streams(lengths in prop::collection::vec(1i64..9, 1..3), outer in 1usize..4, inner in 1usize..3) {
            let layout = Layout { lengths: lengths.clone(), outer, inner };
            let mut next = 1;
            let streams: Vec<Tensor> = lengths.iter().map(|length| {
                let stream = Tensor::arange_start(next, next + length, (Kind::Int64, Device::Cpu)).view([1, *length, 1]);
                next += length;
                stream
            }).collect();
            let ranks = outer * inner;
            let chunk = |i: usize, rank: usize| layout.chunk(&streams[i], i, 1, rank, 1).unwrap();
            for (i, stream) in streams.iter().enumerate() {
                let all: Vec<Tensor> = (0..ranks).map(|rank| chunk(i, rank)).collect();
                let whole = layout.together(&Tensor::stack(&all, 0)).unwrap();
                prop_assert_eq!(&layout.apart(&whole, ranks).unwrap(), &Tensor::stack(&all, 0));
                prop_assert_eq!(&layout.without_fillers(&whole, Some(i)).unwrap(), stream);
            }
            let local = |rank| Tensor::cat(&(0..streams.len()).map(|i| chunk(i, rank)).collect::<Vec<_>>(), 1);
            let all = Tensor::stack(&(0..ranks).map(local).collect::<Vec<_>>(), 0);
            let whole = layout.together(&all).unwrap();
            prop_assert_eq!(&layout.apart(&whole, ranks).unwrap(), &all);
            prop_assert_eq!(layout.without_fillers(&whole, None).unwrap(), Tensor::cat(&streams, 1));

            // Exactly the fillers, which are 0 here, are no real tokens of a group.
            for group in 0..outer {
                let members: Vec<Tensor> = (0..inner).map(|i| local(group * inner + i)).collect();
                let tokens = layout.together(&Tensor::stack(&members, 0)).unwrap();
                let real = layout.real(group);
                let kept: Vec<i64> = real.iter().flat_map(|(from, count)| Vec::<i64>::try_from(tokens.narrow(1, *from, *count).reshape([-1])).unwrap()).collect();
                prop_assert!(kept.iter().all(|token| *token > 0));
                prop_assert_eq!(kept.len() as i64, i64::try_from(tokens.gt(0).sum(Kind::Int64)).unwrap());
            }
        }
    }
}

//! Collectives inside a model: each is a linear map of all ranks' tensors, and its backward is the adjoint map.
//!
//! So the ranks together compute one function, the sum of what each rank's backward begins with, and the gradient of a
//! parameter is the sum over the ranks that hold a copy of it.

use std::sync::Arc;

use comm::{Group, Reduction};
use tch::Tensor;
use torch::autograd::custom_node;

use crate::error::Result;
use crate::trouble::Trouble;

/// Ranks that exchange activations.
#[derive(Debug, Clone)]
pub(crate) struct Exchange {
    group: Arc<Group>,
    trouble: Trouble,
}

impl Exchange {
    pub(crate) fn new(group: Arc<Group>, trouble: Trouble) -> Self {
        Self { group, trouble }
    }

    /// The ranks.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Where failures are kept.
    pub(crate) fn trouble(&self) -> &Trouble {
        &self.trouble
    }

    /// Ranks.
    pub(crate) fn size(&self) -> usize {
        self.group.size()
    }

    /// This rank's place.
    pub(crate) fn index(&self) -> usize {
        self.group.index()
    }

    /// `[..]` of every rank as [ranks, ..].
    pub(crate) fn gather(&self, x: &Tensor) -> nn::Result<Tensor> {
        self.linear("AllGather", x, all_gather, reduce_scatter)
    }

    /// From [ranks, ..] of every rank, this rank's entry of the sum, `[..]`.
    pub(crate) fn scatter(&self, x: &Tensor) -> nn::Result<Tensor> {
        self.linear("ReduceScatter", x, reduce_scatter, all_gather)
    }

    /// The sum of all ranks' tensors.
    pub(crate) fn sum(&self, x: &Tensor) -> nn::Result<Tensor> {
        self.linear("AllReduce", x, all_reduce, all_reduce)
    }

    /// [ranks, ..]: entry i goes to rank i, and becomes the one that rank i had for this rank.
    pub(crate) fn swap(&self, x: &Tensor) -> nn::Result<Tensor> {
        self.linear("AllToAll", x, all_to_all, all_to_all)
    }

    fn linear(&self, name: &str, x: &Tensor, forward: Map, adjoint: Map) -> nn::Result<Tensor> {
        let apply = |map: Map, x: &Tensor| tch::no_grad(|| map(&self.group, &x.f_detach()?.f_contiguous()?));
        let y = apply(forward, x).map_err(|error| self.trouble.layer(error))?;
        let (own, like) = (self.clone(), y.size());
        let options = (y.kind(), y.device());
        custom_node(name, &[x.shallow_clone()], &[y.shallow_clone()], move |gradients| {
            // A rank whose result went nowhere still takes its part.
            let gradient = match &gradients[0] {
                Some(gradient) => gradient.f_contiguous()?,
                None => Tensor::f_zeros(like.as_slice(), options)?,
            };
            let back = tch::no_grad(|| adjoint(&own.group, &gradient));
            Ok(vec![Some(back.map_err(|error| own.trouble.note(error))?)])
        })?;
        Ok(y)
    }
}

/// A collective on a contiguous tensor.
type Map = fn(&Group, &Tensor) -> Result<Tensor>;

fn all_gather(group: &Group, x: &Tensor) -> Result<Tensor> {
    let shape: Vec<i64> = std::iter::once(group.size() as i64).chain(x.size()).collect();
    let output = Tensor::f_empty(shape, (x.kind(), x.device()))?;
    group.all_gather(&output, x)?.wait()?;
    Ok(output)
}

fn reduce_scatter(group: &Group, x: &Tensor) -> Result<Tensor> {
    let output = Tensor::f_empty(&x.size()[1..], (x.kind(), x.device()))?;
    group.reduce_scatter(&output, x)?.wait()?;
    Ok(output)
}

fn all_reduce(group: &Group, x: &Tensor) -> Result<Tensor> {
    let output = x.copy();
    group.all_reduce(&output, Reduction::Sum)?.wait()?;
    Ok(output)
}

fn all_to_all(group: &Group, x: &Tensor) -> Result<Tensor> {
    let (output, one) = (x.f_empty_like()?, vec![1; group.size()]);
    group.all_to_all(&output, x, &one, &one)?.wait()?;
    Ok(output)
}

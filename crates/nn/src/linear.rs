//! Layers that look up or multiply a matrix.

use tch::Tensor;
use torch::Shared;

use crate::builder::Builder;
use crate::error::Result;
use crate::init::Init;
use crate::lora;

/// `x W^T + b`, plus the adapter's part.
#[derive(Debug)]
pub struct Linear {
    weight: Shared,
    bias: Option<Shared>,
    adapter: Option<lora::Adapter>,
}

impl Linear {
    /// [.., in] to [.., out], computed in the kind of `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.f_linear(&like(&self.weight, x)?, like_option(self.bias.as_ref(), x)?)?;
        match &self.adapter {
            Some(adapter) => adapter.add_to(y, x),
            None => Ok(y),
        }
    }

    /// The matrix, [out, in].
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

/// Rows of a table by index.
#[derive(Debug)]
pub struct Embedding {
    weight: Shared,
}

impl Embedding {
    /// i64 indices of any shape to [.., dim], in the storage kind.
    pub fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        Ok(Tensor::f_embedding(&self.weight, indices, -1, false, false)?)
    }

    /// The table, [count, dim].
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Builder {
    /// A linear layer with `weight` and, if asked for, `bias`.
    pub fn linear(&self, input: i64, output: i64, bias: bool) -> Result<Linear> {
        let weight = self.param("weight", &[output, input], Init::FanIn(input))?;
        let bias = if bias { Some(self.param("bias", &[output], Init::FanIn(input))?) } else { None };
        Ok(Linear { weight, bias, adapter: self.adapter(input, output)? })
    }

    /// A table with `weight`.
    pub fn embedding(&self, count: i64, dim: i64) -> Result<Embedding> {
        Ok(Embedding { weight: self.param("weight", &[count, dim], Init::Normal { std: 1.0 })? })
    }
}

/// `tensor` in the kind of `x`; a copy only if the kinds differ.
pub(crate) fn like(tensor: &Tensor, x: &Tensor) -> Result<Tensor> {
    Ok(if tensor.kind() == x.kind() { tensor.shallow_clone() } else { tensor.f_to_kind(x.kind())? })
}

pub(crate) fn like_option(tensor: Option<&Shared>, x: &Tensor) -> Result<Option<Tensor>> {
    tensor.map(|tensor| like(tensor, x)).transpose()
}

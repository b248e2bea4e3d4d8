//! Layers that look up or multiply a matrix.

use std::sync::Arc;

use tch::Tensor;
use torch::Shared;

use crate::builder::Builder;
use crate::division::Seam;
use crate::error::{Error, Result};
use crate::init::Init;
use crate::lora;

/// `x W^T + b`, plus the adapter's part.
#[derive(Debug)]
pub struct Linear {
    weight: Shared,
    bias: Option<Shared>,
    adapter: Option<lora::Adapter>,
    exit: Exit,
}

/// What becomes of a layer's output where the model is divided.
#[derive(Debug)]
enum Exit {
    /// It is what it should be, or the next layers take it as it is.
    Open,
    /// It is one of the summands, without the bias.
    Sum(Arc<dyn Seam>),
    /// It is some of the features.
    Join(Arc<dyn Seam>),
}

impl Linear {
    /// [.., in] to [.., out], computed in the kind of `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let bias = like_option(self.bias.as_ref(), x)?;
        let (bias, late) = if matches!(self.exit, Exit::Sum(_)) { (None, bias) } else { (bias, None) };
        let mut y = x.f_linear(&like(&self.weight, x)?, bias)?;
        if let Some(adapter) = &self.adapter {
            y = adapter.add_to(y, x)?;
        }
        match &self.exit {
            Exit::Open => Ok(y),
            Exit::Join(seam) => seam.join(&y),
            Exit::Sum(seam) => {
                let sum = seam.leave(&y)?;
                match late {
                    Some(bias) => Ok(sum.f_add(&bias)?),
                    None => Ok(sum),
                }
            }
        }
    }

    /// The matrix, [out, in], or this share of it.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

/// Linear layers that read one input and, where the model is divided, each give this share's features of the output: whole
/// heads or hidden channels, which are worked on apart until a layer [of rows](Builder::rows) brings the shares together.
#[derive(Debug)]
pub struct Columns<const N: usize> {
    layers: [Linear; N],
    seam: Option<Arc<dyn Seam>>,
}

impl<const N: usize> Columns<N> {
    /// Tokens [B, T, in] to [B, T, out] for each layer.
    pub fn forward(&self, x: &Tensor) -> Result<[Tensor; N]> {
        let entered = self.seam.as_ref().map(|seam| seam.enter(x)).transpose()?;
        let x = entered.as_ref().unwrap_or(x);
        let outputs = self.layers.iter().map(|layer| layer.forward(x)).collect::<Result<Vec<_>>>()?;
        outputs.try_into().map_err(|_| Error::Invalid("as many outputs as layers".to_owned()))
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
        Ok(Linear { weight, bias, adapter: self.adapter([input, output], [None, None])?, exit: Exit::Open })
    }

    /// Layers `(path, out)` over the tokens of the stream.
    pub fn columns<const N: usize>(&self, input: i64, layers: [(&str, i64); N], bias: bool) -> Result<Columns<N>> {
        let seam = self.division().and_then(|division| division.seam);
        Ok(Columns { layers: self.each_column(input, layers, bias)?, seam })
    }

    /// Layers `(path, out)` over tokens that no block changes, such as those of a text that the stream looks at.
    pub fn columns_of_shared<const N: usize>(
        &self,
        input: i64,
        layers: [(&str, i64); N],
        bias: bool,
    ) -> Result<Columns<N>> {
        Ok(Columns { layers: self.each_column(input, layers, bias)?, seam: None })
    }

    fn each_column<const N: usize>(&self, input: i64, layers: [(&str, i64); N], bias: bool) -> Result<[Linear; N]> {
        let built = layers.iter().map(|(path, output)| self.pp(path).column(input, *output, bias, Exit::Open));
        let built = built.collect::<Result<Vec<_>>>()?;
        built.try_into().map_err(|_| Error::Invalid("as many layers as paths".to_owned()))
    }

    fn column(&self, input: i64, output: i64, bias: bool, exit: Exit) -> Result<Linear> {
        let init = Init::FanIn(input);
        let weight = self.cut_param("weight", &[output, input], (0, &[output]), init)?;
        let bias = if bias { Some(self.cut_param("bias", &[output], (0, &[output]), init)?) } else { None };
        Ok(Linear { weight, bias, adapter: self.adapter([input, output], [None, Some(&[output])])?, exit })
    }

    /// A linear layer that may be computed in shares of its output: all of it [.., out] comes out. For a large matrix over a
    /// small input, such as the vector that modulates a block.
    pub fn joined(&self, input: i64, output: i64, bias: bool) -> Result<Linear> {
        let seam = self.division().and_then(|division| division.between_features());
        self.column(input, output, bias, seam.map_or(Exit::Open, Exit::Join))
    }

    /// The linear layer that ends what [`columns`](Self::columns) began. `inputs`: widths of what its input is put together
    /// from, each divided by itself.
    pub fn rows(&self, inputs: &[i64], output: i64, bias: bool) -> Result<Linear> {
        let (input, seam) = (inputs.iter().sum(), self.division().and_then(|division| division.seam));
        let weight = self.cut_param("weight", &[output, input], (1, inputs), Init::FanIn(input))?;
        let bias = if bias { Some(self.param("bias", &[output], Init::FanIn(input))?) } else { None };
        let adapter = self.adapter([input, output], [Some(inputs), None])?;
        Ok(Linear { weight, bias, adapter, exit: seam.map_or(Exit::Open, Exit::Sum) })
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

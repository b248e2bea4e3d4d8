//! How the layers of one model are divided between several holders, and where they meet: the seam. A layer knows that it has a
//! share of the features or tokens, never who has the others; undivided, all of this does nothing.

use std::fmt;
use std::sync::Arc;

use tch::Tensor;

use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::part::Part;

/// Where the shares of a divided model meet. Gradients flow through every method.
pub trait Seam: fmt::Debug + Send + Sync {
    /// Tokens of this share [B, t, D] to those of all shares of the features [B, T, D].
    fn enter(&self, x: &Tensor) -> Result<Tensor>;
    /// Each share's summand of [B, T, D] to the sum, of which the tokens of this share [B, t, D].
    fn leave(&self, x: &Tensor) -> Result<Tensor>;
    /// Features of this share [.., d] to those of all [.., D].
    fn join(&self, x: &Tensor) -> Result<Tensor>;
    /// The sum of all shares' tensors.
    fn sum(&self, x: &Tensor) -> Result<Tensor>;
    /// Attention of all tokens of the stream to one another, wherever they are: [B, t, H, K] each, to the same shape.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;
}

/// What a model's layers have to know.
#[derive(Debug, Clone)]
pub struct Division {
    /// Share of the features of each divided layer.
    pub features: Part,
    /// The number of attention heads must be a multiple of this.
    pub head_groups: usize,
    /// `None`: to be looked at, not to be run.
    pub seam: Option<Arc<dyn Seam>>,
}

impl Division {
    /// Where features are divided, the seam.
    pub(crate) fn between_features(&self) -> Option<Arc<dyn Seam>> {
        self.seam.clone().filter(|_| self.features.count > 1)
    }
}

impl Builder {
    /// Fails unless `count` attention heads can be divided as the model is.
    pub fn check_heads(&self, count: i64) -> Result<()> {
        let groups = self.division().map_or(1, |division| division.head_groups);
        if count % groups as i64 == 0 {
            return Ok(());
        }
        Err(Error::Indivisible { what: "attention heads".to_owned(), count, shares: groups })
    }
}

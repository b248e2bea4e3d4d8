//! Number formats as recipes name them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Kind;

/// Number format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32 bits: the reference.
    #[default]
    Float32,
    /// 16 bits, as large models are published.
    Bfloat16,
}

impl From<Dtype> for Kind {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Float32 => Self::Float,
            Dtype::Bfloat16 => Self::BFloat16,
        }
    }
}

/// The kind in which numbers of `kind` are summed and turned: f32, or f64 for f64.
pub(crate) fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

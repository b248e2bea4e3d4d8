//! Layers, parameters, weight files, LoRA, seeded noise.
//!
//! Everything a denoiser or an encoder is made of, named by the keys of its checkpoint. Knows no model and no loss.

pub mod attention;
mod builder;
mod conv;
mod division;
mod dtype;
pub mod ema;
mod error;
mod init;
mod linear;
pub mod lora;
pub mod lora_file;
mod moment;
mod norm;
pub mod optim;
mod part;
pub mod remat;
pub mod rng;
pub mod rotary;
pub mod save;
mod save_parts;
mod share;
pub mod timestep;
pub mod transformer;
pub mod weights;

pub use builder::{BuildOptions, Builder, Named, Parameters};
pub use conv::{CausalConv3d, Conv2d, Conv2dOptions};
pub use division::{Division, Seam};
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use init::Init;
pub use linear::{Columns, Embedding, Linear};
pub use norm::{GroupNorm, LayerNorm, RmsNorm};
pub use part::Part;
pub use remat::Recompute;
pub use save_parts::{PartOf, SharedFile};
pub use share::{Run, Share};
pub use torch::Shared;
pub use transformer::{Block, Conditions, Inputs, SharedBlock, State, Transformer, block_of};
pub use weights::Weights;

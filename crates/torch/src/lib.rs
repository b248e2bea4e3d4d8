//! What tch lacks, made safe: fused AdamW, multi-tensor norms, backward nodes written in Rust, seeded normal numbers,
//! devices with CUDA loaded on demand, process groups.
//!
//! The only crate of the workspace with `unsafe`. It knows tensors and devices; no layer, model or optimiser state.
#![expect(unsafe_code, reason = "the one place where C++ is called")]

pub mod attention;
pub mod autograd;
pub mod device;
pub mod distributed;
mod error;
mod ffi;
pub mod host;
pub mod memory;
pub mod ops;
mod shared;
pub mod storage;

pub use error::{Error, Result};
pub use shared::Shared;

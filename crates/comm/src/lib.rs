//! Ranks that act together: how they meet, which of them form groups, and the collectives of a group.
//!
//! libtorch's c10d does the work (Gloo between CPUs); this crate knows who the ranks are, checks what they ask for, and
//! says which rank saw what fail. It knows no parameter, layer or model.

mod delay;
mod error;
mod first_call;
mod group;
pub mod testing;
#[cfg(test)]
mod tests;
mod trace;
mod world;

pub use error::{Error, Result};
pub use group::{Group, Pending, Scattered};
pub use torch::distributed::Reduction;
pub use trace::{Call, Trace};
pub use world::World;

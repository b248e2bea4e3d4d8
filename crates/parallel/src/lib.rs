//! How training is spread over ranks, one file a technique. Knows parameters by name and ranks by mesh axis; no particular
//! model, no data, no loss.
//!
//! Every technique gives the numbers of one rank: samples are weighted by the size of the *global* batch, so gradients are
//! added up between ranks, never averaged.

pub mod checkpoint;
pub mod ddp;
mod error;
pub mod fsdp;
mod spread;
mod team;
mod unit;

pub use error::{Error, Result};
pub use spread::{Spread, part, spread};
pub use team::Team;

//! How training is spread over ranks, one file a technique. Knows parameters by name and ranks by mesh axis; no particular
//! model, no data, no loss.
//!
//! Every technique gives the numbers of one rank: samples are weighted by the size of the *global* batch, so gradients are
//! added up between ranks, never averaged.

pub mod checkpoint;
mod cp;
pub mod ddp;
pub mod ep;
mod error;
mod exchange;
pub mod fsdp;
mod holdings;
mod layout;
mod outline;
mod pp;
mod ring;
mod schedule;
mod spread;
mod team;
pub mod tokens;
mod tp;
mod trouble;
mod unit;

pub use error::{Error, Result};
pub use fsdp::Options;
pub use holdings::{Holding, holdings, parts};
pub use outline::Outline;
pub use pp::Flight;
pub use schedule::{Action, Pass};
pub use spread::{Frame, Spread};
pub use team::Team;

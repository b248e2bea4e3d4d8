//! Objectives, noise levels, samplers, guidance. Knows no architecture, no data set, no rank.

mod error;
pub mod flow;
pub mod sample;
pub mod schedule;
#[cfg(test)]
mod schedule_golden;
pub mod timestep;
pub mod unipc;

pub use error::{Error, Result};

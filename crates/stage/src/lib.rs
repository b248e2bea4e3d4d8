//! The contract of a stage program: what it is asked and what it answers. Knows no particular stage.

mod contract;

pub use contract::*;

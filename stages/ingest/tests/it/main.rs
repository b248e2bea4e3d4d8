//! The stage, run in this process on data sets made on the fly.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bad;
mod clips;
mod disk;
mod folder;
mod hub;
mod parquet;
mod support;
mod tarot;

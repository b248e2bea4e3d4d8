//! The stage, run in this process on data sets made on the fly.

mod bad;
mod folder;
mod hub;
mod parquet;
mod support;
mod tarot;

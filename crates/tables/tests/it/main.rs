//! The tables from outside: what is written is what is read, by us and by any Parquet reader.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod captions;
mod latents;
mod rows;

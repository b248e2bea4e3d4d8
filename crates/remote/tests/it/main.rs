//! Artifacts between two caches by way of a folder and of a real S3-compatible server.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod transfer;
mod world;

//! Queries from outside: real tables in, text out.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ask;
mod errors;
mod functions;
mod larger;
mod support;

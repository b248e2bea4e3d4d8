//! Queries from outside: real tables in, text out.

mod ask;
mod errors;
mod functions;
mod support;

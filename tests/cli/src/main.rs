//! The programs from outside: the real binaries in throw-away folders, and the structure of the workspace itself.

mod architecture;
mod clips;
mod crash;
mod curve;
mod errors;
mod examples;
mod keys;
mod memory;
mod mini;
mod project;
mod ranks;
mod reuse;
mod runs;
mod sql;
mod support;
mod tidy;

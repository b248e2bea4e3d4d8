//! The runner from outside, over a graph of tiny stages written in Python: the contract is language-neutral.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

mod answers;
mod bench;
mod collect;
mod crash;
mod damage;
mod disk;
mod errors;
mod failure;
mod freshness;
mod hub_sources;
mod ranks;
mod report;
mod sharing;
mod sources;
mod support;
mod together;

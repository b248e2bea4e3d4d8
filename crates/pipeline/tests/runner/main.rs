//! The runner from outside, over a graph of tiny stages written in Python: the contract is language-neutral.

mod errors;
mod failure;
mod freshness;
mod support;

//! The loop as a whole, on the tiny models of the fixtures and synthetic shards: what a user may rely on.

mod delay_tests;
mod expert_tests;
mod interleave_tests;
mod loop_tests;
mod rank_tests;
mod recipe_tests;
mod world;

//! The vocabulary: recipe, graph, buckets, problems. Knows no files but text, no tensors, no processes.

pub mod bucket;
mod problem;
pub mod schema;
pub mod suggest;

pub use bucket::Bucket;
pub use problem::Problem;

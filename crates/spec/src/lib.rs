//! The vocabulary: recipe, graph, buckets, ranks and their mesh, problems. Knows no files but text, no tensors, no processes.

mod bound;
pub mod bucket;
mod counted;
mod garbled;
pub mod glob;
pub mod graph;
mod launch;
pub mod mesh;
mod mistake;
mod problem;
pub mod recipe;
pub mod schema;
pub mod suggest;
mod text;

pub use bound::Bound;
pub use bucket::Bucket;
pub use counted::counted;
pub use garbled::looks_garbled;
pub use graph::Graph;
pub use launch::{Launch, Meeting, OF_LAUNCHERS, VARIABLES};
pub use mesh::Mesh;
pub use mistake::{Mistake, Mistakes};
pub use problem::Problem;
pub use recipe::Recipe;

//! The runner: which stage is fresh, which must run and why, processes, progress. Knows no particular stage, no tensor.

mod bench;
mod cli;
mod clock;
mod collect;
mod database;
mod disk;
mod error;
mod execute;
mod explain;
mod forecast;
mod ledger;
mod links;
mod plan;
mod pool;
mod programs;
mod progress;
mod prompt;
mod ranks;
mod record;
mod report;
mod request;
mod resources;
mod selection;
mod show;
mod signals;
mod sources;
mod spawn;
mod sql;
mod status;
mod verify;
mod why;
mod workspace;

pub use cli::main;

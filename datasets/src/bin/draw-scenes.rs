//! `draw-scenes OUT`: draws scenes in a photographic look with captions, the data set that the mini model is made from.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use datasets::{folder, scene};

/// Draws scenes in a photographic look with captions.
#[derive(Parser)]
#[command(name = "draw-scenes", version)]
struct Arguments {
    /// Folder for the pictures and `metadata.jsonl`; made if it does not exist.
    out: PathBuf,
    /// Scenes to draw; 2688 show every combination once.
    #[arg(long, default_value_t = 5376, value_parser = clap::value_parser!(u32).range(1..=99999))]
    count: u32,
    /// Another seed, another set.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Pixels across.
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(16..=4096))]
    width: u32,
    /// Pixels down.
    #[arg(long, default_value_t = 144, value_parser = clap::value_parser!(u32).range(16..=4096))]
    height: u32,
}

fn main() -> ExitCode {
    let Arguments { out, count, seed, width, height } = Arguments::parse();
    match folder::write(&out, scene::scenes(count, seed, width, height)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            // Nothing is left to do when the complaint itself cannot be written.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

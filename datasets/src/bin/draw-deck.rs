//! `draw-deck OUT`: draws a deck of cards with captions, the data set that `make tarot` learns.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use datasets::{deck, folder};

/// Draws a deck of cards with captions.
#[derive(Parser)]
#[command(name = "draw-deck", version)]
struct Arguments {
    /// Folder for the pictures and `metadata.jsonl`; made if it does not exist.
    out: PathBuf,
    /// Cards to draw, from the first.
    #[arg(long, default_value_t = deck::CARDS, value_parser = clap::value_parser!(u8).range(1..=78))]
    count: u8,
    /// Pixels across.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(16..=4096))]
    width: u32,
    /// Pixels down.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(16..=4096))]
    height: u32,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match folder::write(&arguments.out, deck::cards(arguments.count, arguments.width, arguments.height)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            // Nothing is left to do when the complaint itself cannot be written.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

//! `draw-deck OUT`: draws a deck of cards with captions, the data set that `make tarot` learns.
//!
//! With `--scenes` it adds pictures in another look whose captions lack the trigger: trained beside the cards, they keep what
//! prompts without it give (prior preservation, Ruiz et al. 2023).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use datasets::{deck, folder, scene};

/// Draws a deck of cards with captions.
#[derive(Parser)]
#[command(name = "draw-deck", version)]
struct Arguments {
    /// Folder for the pictures and `metadata.jsonl`; made if it does not exist.
    out: PathBuf,
    /// Cards to draw, from the first.
    #[arg(long, default_value_t = deck::CARDS, value_parser = clap::value_parser!(u8).range(1..=78))]
    count: u8,
    /// Scenes in a photographic look to draw beside them, without the cards' trigger in their captions.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=99999))]
    scenes: u32,
    /// Pixels across.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(16..=4096))]
    width: u32,
    /// Pixels down.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(16..=4096))]
    height: u32,
}

/// Not the seed of `draw-scenes`: other scenes than a model was made from.
const SEED: u64 = 2;

fn main() -> ExitCode {
    let Arguments { out, count, scenes, width, height } = Arguments::parse();
    let items = deck::cards(count, width, height).chain(scene::scenes(scenes, SEED, width, height));
    match folder::write(&out, items) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            // Nothing is left to do when the complaint itself cannot be written.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

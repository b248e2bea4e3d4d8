//! `train-vae MODEL PICTURES…`: trains the VAE of a model folder from random weights, on crops of pictures.
//!
//! The folder says what to build (`vae/config.json`) and gets the weights, in half precision, with the scale and shift
//! that make latents of unit size. Knows no denoiser and no text.

mod objective;
mod pictures;
mod trainer;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Trains the VAE of a model folder from random weights.
#[derive(Parser)]
#[command(name = "train-vae", version)]
pub(crate) struct Arguments {
    /// diffusers folder whose `vae/config.json` says what to train; gets the weights.
    model: PathBuf,
    /// Folders of PNG pictures. Every step takes as many crops of each.
    #[arg(required = true)]
    pictures: Vec<PathBuf>,
    /// Optimizer steps.
    #[arg(long, default_value_t = 2500, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Crops of each folder in a step, such as `4,2`.
    #[arg(long, value_delimiter = ',', default_value = "4,4")]
    batch: Vec<usize>,
    /// Size to which pictures are brought before they are cropped.
    #[arg(long, default_value_t = 96)]
    width: u32,
    /// Size to which pictures are brought before they are cropped.
    #[arg(long, default_value_t = 144)]
    height: u32,
    /// Side of a crop.
    #[arg(long, default_value_t = 64)]
    crop: u32,
    /// Highest learning rate; it warms up, then falls to zero along a cosine.
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// Decides the first weights, the crops and the latents' noise.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Begin with the weights that the folder has instead of random ones.
    #[arg(long)]
    go_on: bool,
    /// Threads of libtorch.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

fn main() -> ExitCode {
    match trainer::run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(report) => {
            // Nothing is left to do when the complaint itself cannot be written.
            let _ = writeln!(std::io::stderr(), "{report:?}");
            ExitCode::FAILURE
        }
    }
}

//! Folders and numbers for what tests and measures every family alike.

use std::path::{Path, PathBuf};

use nn::{BuildOptions, Inputs};
use tch::{Device, Kind, Tensor};

use crate::{Encoded, FAMILIES, ModelFolder, Result, Text, family_of};

/// The tiny folders that lie in this repository, by name: two of each family at least.
pub fn fixtures() -> Vec<(String, ModelFolder)> {
    let entries = fs_err::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures"));
    let mut paths: Vec<PathBuf> = entries.expect("fixtures").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let named = |path: &PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, ModelFolder::open(path).expect("a model folder"))
    };
    let folders: Vec<_> = paths.iter().map(named).collect();
    for family in FAMILIES {
        let count = folders.iter().filter(|(_, folder)| folder.class() == family.pipeline_class()).count();
        assert!(count >= 2, "two tiny folders of `{}` are needed, {count} found", family.name());
    }
    folders
}

/// Numbers of about unit size, f32, that any program can make: 1.4 sin(0.7390851 i + phase).
pub fn wave(shape: &[i64], phase: f64) -> Tensor {
    let n = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    ((n * 0.739_085_1 + phase).sin() * 1.4).to_kind(Kind::Float).view(shape)
}

/// The size of a batch of samples.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Samples.
    pub batch: i64,
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Frames; 1 for a family of pictures.
    pub frames: u32,
    /// Tokens of each text.
    pub tokens: i64,
}

impl Size {
    /// Two samples that any family takes in no time: 48 x 32 pixels, three latent frames if it has frames.
    pub fn small(folder: &ModelFolder) -> Result<Self> {
        let frames = family_of(folder)?.clips(folder)?.map_or(1, |clips| 1 + 2 * clips.stride);
        Ok(Self { batch: 2, width: 48, height: 32, frames, tokens: 5 })
    }
}

/// A training sample of a family, on the CPU.
#[derive(Debug)]
pub struct Sample {
    /// Of the denoiser.
    pub inputs: Inputs,
    /// Velocity that it should predict, in the latents' shape.
    pub target: Tensor,
}

impl Sample {
    /// The rows `from..from + count` of a batch made of [`wave`]s, with noise levels evenly from 0.2 to 0.8.
    pub fn rows(folder: &ModelFolder, size: Size, from: i64, count: i64, compute: Kind) -> Result<Self> {
        let family = family_of(folder)?;
        let vae = family.vae(folder, BuildOptions::frozen(Device::Cpu, Kind::Float))?;
        let shape = [vec![size.batch], vae.latent_shape(size.width, size.height, size.frames)].concat();
        let rows = |tensor: Tensor| tensor.narrow(0, from, count).contiguous();
        let (clean, noise) = (rows(wave(&shape, 0.1)), rows(wave(&shape, 0.2)));
        let sigma = rows(Tensor::linspace(0.2, 0.8, size.batch, (Kind::Float, Device::Cpu)));
        let mut level = vec![1; shape.len()];
        level[0] = -1;
        let s = sigma.view(level.as_slice());
        let mut texts: Vec<Text> = (0..count).map(|_| Text::new()).collect();
        for input in family.text_inputs(folder)? {
            let (shape, phase) = if input.pooled {
                (vec![size.batch, input.width], 0.3)
            } else {
                (vec![size.batch, size.tokens, input.width], 0.4)
            };
            let rows = wave(&shape, phase);
            for (text, row) in texts.iter_mut().zip(from..) {
                let (row, tokens) = (Some(rows.get(row)), size.tokens);
                let (embedding, pooled) = if input.pooled { (None, row) } else { (row, None) };
                let encoded = Encoded { tokens, embedding, pooled };
                text.insert(input.encoder.to_owned(), encoded);
            }
        }
        let texts: Vec<&Text> = texts.iter().collect();
        let conditions = family.conditions(&texts, size.tokens as usize, Device::Cpu, Kind::Float)?;
        let guided = family.takes_guidance(folder)?;
        let guidance = guided.then(|| Tensor::full([count], 3.5, (Kind::Float, Device::Cpu)));
        let latents = (1.0 - &s) * &clean + &s * &noise;
        Ok(Self { inputs: Inputs { latents, sigma, conditions, guidance, compute }, target: &noise - &clean })
    }

    /// The whole batch.
    pub fn new(folder: &ModelFolder, size: Size, compute: Kind) -> Result<Self> {
        Self::rows(folder, size, 0, size.batch, compute)
    }
}

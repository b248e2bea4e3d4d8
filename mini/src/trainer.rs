//! The loop: crops, loss, AdamW; weights and latent statistics into the folder now and then, and at the end.

use std::io::Write;
use std::time::Instant;

use miette::{IntoDiagnostic, Result, miette};
use models::autoencoder_kl::AutoencoderKl;
use models::{ModelFolder, Vae};
use nn::optim::{AdamW, Settings};
use nn::rng::Stream;
use nn::{BuildOptions, Builder, Parameters, Weights};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::pictures::Pictures;
use crate::{Arguments, objective};

/// Steps between two reports, and between two writings.
const REPORT: u64 = 50;
const WRITE: u64 = 500;

/// Pictures of each folder that the result is measured on.
const MEASURED: usize = 48;

/// Steps over which the learning rate rises.
const WARM_UP: f64 = 100.0;

/// Trains; see the crate.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { model, pictures, steps, batch, width, height, crop, lr, seed, go_on, threads } = arguments;
    if batch.len() != pictures.len() {
        return Err(miette!("`--batch` has {} numbers for {} folders", batch.len(), pictures.len()));
    }
    if crop > width || crop > height {
        return Err(miette!("a crop of {crop} does not fit into {width} × {height}"));
    }
    torch::memory::pool();
    torch::device::set_threads(*threads);
    let sets = pictures.iter().map(|folder| Pictures::read(folder, *width, *height)).collect::<Result<Vec<_>>>()?;
    let folder = ModelFolder::open(model)?;
    let options = BuildOptions::trained(Device::Cpu);
    let builder = if *go_on {
        let weights = Weights::open(&folder.path.join("vae"), STEM).into_diagnostic()?;
        Builder::from_weights(weights, options)
    } else {
        Builder::random(*seed, options)
    };
    let compute = if torch::device::native_bf16(Device::Cpu) { Kind::BFloat16 } else { Kind::Float };
    let vae = AutoencoderKl::new(&folder, &builder, compute)?;
    let parameters = builder.finish().into_diagnostic()?;
    if !go_on {
        narrow(&parameters)?;
    }
    let settings = Settings { betas: (0.9, 0.99), weight_decay: 1e-4, ..Settings::default() };
    let mut optimizer = AdamW::new(parameters.trainable(), settings).into_diagnostic()?;
    let mut out = std::io::stdout();
    let (began, mut mean) = (Instant::now(), None);
    for step in 0..*steps {
        let mut draw = Stream::new(*seed, &["crops".into(), step.into()]);
        let crops: Vec<Tensor> =
            sets.iter().zip(batch).flat_map(|(set, count)| set.crops(*count, *crop, &mut draw)).collect();
        let pixels = Tensor::stack(&crops, 0);
        optimizer.clear_gradients().into_diagnostic()?;
        let posterior = vae.encode(&pixels)?;
        let shape = posterior.mean.size();
        let noise = Stream::new(*seed, &["latents".into(), step.into()]).normals(posterior.mean.numel());
        let latents = posterior.latent(Some(&Tensor::from_slice(&noise).view(shape.as_slice())));
        let loss = objective::loss(&pixels, &vae.reconstruct(&latents)?, &posterior)?;
        torch::autograd::backward(&[loss.shallow_clone()], &[], false).into_diagnostic()?;
        nn::optim::clip_gradients(optimizer.parameters(), 1.0).into_diagnostic()?;
        let done = (step + 1) as f64;
        let fall = 0.5 + 0.5 * (std::f64::consts::PI * step as f64 / *steps as f64).cos();
        optimizer.step(lr * fall * (done / WARM_UP).min(1.0)).into_diagnostic()?;
        let now = loss.double_value(&[]);
        let smooth = mean.map_or(now, |mean: f64| 0.98 * mean + 0.02 * now);
        mean = Some(smooth);
        if (step + 1).is_multiple_of(REPORT) || step + 1 == *steps {
            let seconds = began.elapsed().as_secs_f64();
            writeln!(out, "step {} of {steps}, loss {smooth:.4}, {seconds:.0} s", step + 1).into_diagnostic()?;
        }
        if (step + 1).is_multiple_of(WRITE) || step + 1 == *steps {
            write(&folder, &parameters, &sets)?;
            writeln!(out, "{}", quality(&folder, &sets)?).into_diagnostic()?;
        }
    }
    Ok(())
}

/// Lets posteriors begin narrow: at unit width a decoder sees only noise for its first hundreds of steps.
fn narrow(parameters: &Parameters) -> Result<()> {
    const LOG_VARIANCE: f64 = -6.0;
    let named = |name: &str| parameters.weights.iter().find(|named| named.name == name);
    let bias = named("encoder.conv_out.bias").ok_or_else(|| miette!("the encoder has no `conv_out.bias`"))?;
    let half = bias.tensor.size()[0] / 2;
    let _ = tch::no_grad(|| bias.tensor.f_narrow(0, half, half)?.f_fill_(LOG_VARIANCE)).into_diagnostic()?;
    Ok(())
}

/// Writes the weights, and what brings latents to zero mean and unit deviation.
fn write(folder: &ModelFolder, parameters: &Parameters, sets: &[Pictures]) -> Result<()> {
    let place = folder.path.join("vae");
    nn::save::save_model(&place, STEM, &parameters.weights, Some(Kind::Half), nn::save::SHARD_BYTES)
        .into_diagnostic()?;
    let vae = load(folder)?;
    let latents: Vec<Tensor> =
        sets.iter().map(|set| Ok(vae.posterior(&set.spread(MEASURED))?.mean)).collect::<Result<_>>()?;
    let latents = Tensor::cat(&latents, 0);
    let (shift, spread) = (latents.mean(Kind::Double).double_value(&[]), latents.std(true).double_value(&[]));
    let path = place.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs_err::read(&path).into_diagnostic()?).into_diagnostic()?;
    let rounded = |value: f64| json!((value * 1e4).round() / 1e4);
    config["scaling_factor"] = rounded(1.0 / spread);
    config["shift_factor"] = rounded(shift);
    fs_err::write(&path, format!("{config:#}\n")).into_diagnostic()
}

/// Signal-to-noise ratios of the written VAE, for each folder.
fn quality(folder: &ModelFolder, sets: &[Pictures]) -> Result<String> {
    let vae = load(folder)?;
    let ratios = sets.iter().map(|set| {
        let pixels = set.spread(MEASURED);
        let seen = tch::no_grad(|| vae.reconstruct(&vae.encode(&pixels)?.mean))?;
        Ok(format!("{:.2} dB", objective::psnr(&pixels, &seen)))
    });
    Ok(format!("PSNR {}", ratios.collect::<Result<Vec<_>>>()?.join(", ")))
}

const STEM: &str = "diffusion_pytorch_model";

fn load(folder: &ModelFolder) -> Result<AutoencoderKl> {
    let folder = ModelFolder::open(&folder.path)?;
    let weights = Weights::open(&folder.path.join("vae"), STEM).into_diagnostic()?;
    let builder = Builder::from_weights(weights, BuildOptions::frozen(Device::Cpu, Kind::Float));
    Ok(AutoencoderKl::new(&folder, &builder, Kind::Float)?)
}

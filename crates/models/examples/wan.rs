//! A training step and a VAE encode of a Wan: the counterpart of `tools/bench/wan.py`, which also makes the folder.
//!
//! `cargo run -p models --example wan -- FOLDER [size=128] [frames=17] [batch=1] [text=512] [steps=5] [threads=1] [dtype=float32]`
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measuring program")]

use std::collections::BTreeMap;
use std::time::Instant;

use models::{ModelFolder, family_of};
use nn::{BuildOptions, Builder, Conditions, Inputs, Weights};
use tch::{Device, Kind, Tensor};

/// Numbers of about unit size that any program can make.
fn wave(shape: &[i64], phase: f64) -> Tensor {
    let n = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    ((n * 0.739_085_1 + phase).sin() * 1.4).to_kind(Kind::Float).view(shape)
}

/// User and system time of the process in seconds.
fn cpu() -> f64 {
    let stat = fs_err::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The last value, and medians of wall and CPU time, of `steps` runs after one to warm up.
fn timed(what: &str, steps: i64, run: impl Fn() -> f64) {
    let (mut wall, mut processor, mut last) = (Vec::new(), Vec::new(), 0.0);
    for _ in 0..=steps {
        let (start, used) = (Instant::now(), cpu());
        last = run();
        wall.push(start.elapsed().as_secs_f64());
        processor.push(cpu() - used);
    }
    let (wall, processor) = (median(wall.split_off(1)), median(processor.split_off(1)));
    println!("{what} {last:.6}  wall {wall:.3} s  cpu {processor:.3} s");
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = ModelFolder::open(arguments.next().expect("a model folder")).unwrap();
    let settings: BTreeMap<String, String> =
        arguments.map(|a| a.split_once('=').map(|(k, v)| (k.into(), v.into())).unwrap()).collect();
    let number = |name: &str, default: i64| settings.get(name).map_or(default, |value| value.parse().unwrap());
    let (size, frames, batch, steps) =
        (number("size", 128), number("frames", 17), number("batch", 1), number("steps", 5));
    let compute =
        if settings.get("dtype").is_some_and(|dtype| dtype == "bfloat16") { Kind::BFloat16 } else { Kind::Float };
    torch::memory::keep_freed();
    torch::device::set_threads(number("threads", 1) as usize);
    let family = family_of(&folder).unwrap();

    let builder = Builder::from_weights(
        Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap(),
        BuildOptions::trained(Device::Cpu),
    );
    let model = family.transformer(&folder, &builder).unwrap();
    let parameters = builder.finish().unwrap();
    let config = folder.json("transformer/config.json", "sizes").unwrap();
    let latent = [batch, 16, (frames - 1) / 4 + 1, size / 8, size / 8];
    let (clean, noise) = (wave(&latent, 0.1), wave(&latent, 0.2));
    let sigma = Tensor::linspace(0.2, 0.8, batch, (Kind::Float, Device::Cpu));
    let s = sigma.view([-1, 1, 1, 1, 1]);
    let (latents, target) = ((1.0 - &s) * &clean + &s * &noise, &noise - &clean);
    let text = wave(&[batch, number("text", 512), config["text_dim"].as_i64().unwrap()], 0.4);
    let conditions = Conditions::from([("umt5".into(), text)]);
    let inputs = Inputs { latents, sigma, conditions, guidance: None, compute };
    let leaves: Vec<Tensor> = parameters.weights.iter().map(|p| p.tensor.shallow_clone()).collect();
    timed("step: loss", steps, || {
        torch::autograd::clear_gradients(&leaves).unwrap();
        let prediction = model.forward(&inputs, false).unwrap().to_kind(Kind::Float);
        let loss = prediction.mse_loss(&target, tch::Reduction::Mean);
        loss.backward();
        loss.double_value(&[])
    });

    let vae = family.vae(&folder, BuildOptions::frozen(Device::Cpu, compute)).unwrap();
    let pixels = wave(&[batch, 3, frames, size, size], 0.5) / 1.4;
    timed("encode: mean square", steps, || {
        vae.posterior(&pixels).unwrap().mean.square().mean(Kind::Float).double_value(&[])
    });
}

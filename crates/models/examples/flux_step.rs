//! Forward and backward of a FLUX transformer: the counterpart of `tools/bench/flux_step.py`, which also makes the folder.
//!
//! `cargo run -p models --example flux_step -- FOLDER [size=256] [batch=2] [text=512] [steps=5] [threads=1] [dtype=float32] [recompute=0]`
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

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = ModelFolder::open(arguments.next().expect("a model folder")).unwrap();
    let settings: BTreeMap<String, String> =
        arguments.map(|a| a.split_once('=').map(|(k, v)| (k.into(), v.into())).unwrap()).collect();
    let number = |name: &str, default: i64| settings.get(name).map_or(default, |value| value.parse().unwrap());
    let (side, batch, text) = (number("size", 256) / 8, number("batch", 2), number("text", 512));
    let compute =
        if settings.get("dtype").is_some_and(|dtype| dtype == "bfloat16") { Kind::BFloat16 } else { Kind::Float };
    torch::memory::keep_freed();
    torch::device::set_threads(number("threads", 1) as usize);

    let builder = Builder::from_weights(
        Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap(),
        BuildOptions::trained(Device::Cpu),
    );
    let model = family_of(&folder).unwrap().transformer(&folder, &builder).unwrap();
    let parameters = builder.finish().unwrap();
    let config = folder.json("transformer/config.json", "sizes").unwrap();
    let size = |name: &str| config[name].as_i64().unwrap();
    let latent = [batch, size("in_channels") / 4, side, side];
    let (clean, noise) = (wave(&latent, 0.1), wave(&latent, 0.2));
    let sigma = Tensor::linspace(0.2, 0.8, batch, (Kind::Float, Device::Cpu));
    let s = sigma.view([-1, 1, 1, 1]);
    let (latents, target) = ((1.0 - &s) * &clean + &s * &noise, &noise - &clean);
    let conditions = Conditions::from([
        ("t5".into(), wave(&[batch, text, size("joint_attention_dim")], 0.4)),
        ("clip_pooled".into(), wave(&[batch, size("pooled_projection_dim")], 0.3)),
    ]);
    let guidance =
        config["guidance_embeds"].as_bool().unwrap().then(|| Tensor::full([batch], 3.5, (Kind::Float, Device::Cpu)));
    let inputs = Inputs { latents, sigma, conditions, guidance, compute };

    let leaves: Vec<Tensor> = parameters.weights.iter().map(|p| p.tensor.shallow_clone()).collect();
    let (mut wall, mut processor, mut last) = (Vec::new(), Vec::new(), 0.0);
    for _ in 0..=number("steps", 5) {
        let (start, used) = (Instant::now(), cpu());
        torch::autograd::clear_gradients(&leaves).unwrap();
        let loss = model
            .forward(&inputs, number("recompute", 0) != 0)
            .unwrap()
            .to_kind(Kind::Float)
            .mse_loss(&target, tch::Reduction::Mean);
        loss.backward();
        last = loss.double_value(&[]);
        wall.push(start.elapsed().as_secs_f64());
        processor.push(cpu() - used);
    }
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let peak: i64 =
        status.lines().find(|l| l.starts_with("VmHWM")).unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    let (wall, processor) = (median(wall.split_off(1)), median(processor.split_off(1)));
    println!("loss {last:.6}  wall {wall:.3} s  cpu {processor:.3} s  peak {} MiB", peak / 1024);
}

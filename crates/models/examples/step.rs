//! A training step and a VAE encode of a model of any family: the counterpart of `tools/bench/flux_step.py` and
//! `tools/bench/wan.py`, which also make a folder.
//!
//! `cargo run -p models --example step -- FOLDER [size=256|128] [frames=1|17] [batch=2|1] [text=512] [steps=5] [threads=1]
//! [dtype=float32] [recompute=0] [encode=1]`; the second default is that of a family of clips.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measuring program")]

use std::collections::BTreeMap;
use std::time::Instant;

use models::testing::{Sample, Size, wave};
use models::{ModelFolder, family_of};
use nn::{BuildOptions, Builder, Weights};
use tch::{Device, Kind, Tensor};

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

/// The last value, and medians of wall and CPU time, of `steps` runs after one to warm up; the peak of memory so far.
fn timed(what: &str, steps: i64, run: impl Fn() -> f64) {
    let (mut wall, mut processor, mut last) = (Vec::new(), Vec::new(), 0.0);
    for _ in 0..=steps {
        let (start, used) = (Instant::now(), cpu());
        last = run();
        wall.push(start.elapsed().as_secs_f64());
        processor.push(cpu() - used);
    }
    let (wall, processor) = (median(wall.split_off(1)), median(processor.split_off(1)));
    let peak = torch::memory::peak(Device::Cpu).unwrap().unwrap_or(0) >> 20;
    println!("{what} {last:.6}  wall {wall:.3} s  cpu {processor:.3} s  peak {peak} MiB");
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = ModelFolder::open(arguments.next().expect("a model folder")).unwrap();
    let settings: BTreeMap<String, String> =
        arguments.map(|a| a.split_once('=').map(|(k, v)| (k.into(), v.into())).unwrap()).collect();
    let number = |name: &str, default: i64| settings.get(name).map_or(default, |value| value.parse().unwrap());
    let family = family_of(&folder).unwrap();
    let [side, frames, batch] = if family.clips(&folder).unwrap().is_some() { [128, 17, 1] } else { [256, 1, 2] };
    let (side, frames, steps) = (number("size", side), number("frames", frames), number("steps", 5));
    let size = Size {
        batch: number("batch", batch),
        width: side as u32,
        height: side as u32,
        frames: frames as u32,
        tokens: number("text", 512),
    };
    let half = settings.get("dtype").is_some_and(|dtype| dtype == "bfloat16");
    let compute = if half { Kind::BFloat16 } else { Kind::Float };
    torch::memory::pool();
    torch::device::set_threads(number("threads", 1) as usize);

    let builder = Builder::from_weights(
        Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap(),
        BuildOptions::trained(Device::Cpu),
    );
    let model = family.transformer(&folder, &builder).unwrap();
    let parameters = builder.finish().unwrap();
    let Sample { inputs, target } = Sample::new(&folder, size, compute).unwrap();
    let leaves: Vec<Tensor> = parameters.weights.iter().map(|p| p.tensor.shallow_clone()).collect();
    let recompute = number("recompute", 0) != 0;
    timed("step: loss", steps, || {
        torch::autograd::clear_gradients(&leaves).unwrap();
        let prediction = model.forward(&inputs, recompute.into()).unwrap().to_kind(Kind::Float);
        let loss = prediction.mse_loss(&target, tch::Reduction::Mean);
        loss.backward();
        loss.double_value(&[])
    });

    if number("encode", 1) == 0 {
        return;
    }
    let vae = family.vae(&folder, BuildOptions::frozen(Device::Cpu, compute)).unwrap();
    let shape = match family.clips(&folder).unwrap() {
        Some(_) => vec![size.batch, 3, frames, side, side],
        None => vec![size.batch, 3, side, side],
    };
    let pixels = wave(&shape, 0.5) / 1.4;
    timed("encode: mean square", steps, || {
        tch::no_grad(|| vae.posterior(&pixels)).unwrap().mean.square().mean(Kind::Float).double_value(&[])
    });
}

//! A training step of a model of any family on several processes: time and peak memory of each. The counterpart of
//! `tools/bench/fsdp_step.py`; `tools/bench/flux_step.py FOLDER` or `tools/bench/wan.py FOLDER` makes the folder.
//!
//! `cargo run -p parallel --example spread_step -- FOLDER [ranks=2] [threads=1] [mode=fsdp|ddp] [tp=1] [cp=1] [ring=1]
//! [pp=1] [recompute=0|1|2] [offload=0] [size=256|128] [frames=1|17] [batch=2] [text=512] [steps=5] [dtype=float32] [keep=1]`; `batch` is the
//! global one, `threads` those of each rank; `keep=0` leaves tensors to the C allocator. What activations take
//! shows in a run on one rank with the batch of each.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measuring program")]

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use models::testing::{Sample, Size};
use models::{ModelFolder, family_of};
use nn::optim::{AdamW, Settings};
use nn::{BuildOptions, Builder, Recompute, Weights};
use parallel::{Frame, Outline, Team};
use spec::mesh::{Asked, Mesh};
use spec::{Launch, VARIABLES};
use tch::{Device, Kind};

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let settings: BTreeMap<String, String> =
        arguments[1..].iter().map(|a| a.split_once('=').map(|(k, v)| (k.into(), v.into())).unwrap()).collect();
    let number = |name: &str, default: i64| settings.get(name).map_or(default, |value| value.parse().unwrap());
    let ranks = number("ranks", 2) as usize;
    let launch = Launch::read(|name| std::env::var(name).ok()).unwrap();
    if launch.world == 1 && ranks > 1 {
        return start(ranks, &arguments);
    }
    let sharded = settings.get("mode").is_none_or(|mode| mode == "fsdp");
    let [cp, tp, pp] = ["cp", "tp", "pp"].map(|axis| number(axis, 1) as usize);
    let cp_ring = Some(number("ring", 1) as usize);
    let mesh = Mesh::of(&Asked { cp, cp_ring, tp, pp, ep: 1, sharded, ..Asked::default() }, ranks).unwrap();
    step(&arguments[0], &launch, mesh, &number, settings.get("dtype").is_some_and(|dtype| dtype == "bfloat16"));
}

/// Runs this program again as every rank.
fn start(ranks: usize, arguments: &[String]) {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port().to_string();
    let rank = |rank: usize| {
        let (place, size) = (rank.to_string(), ranks.to_string());
        let values = [&place, &size, &place, &size, "127.0.0.1", &port];
        Command::new(std::env::current_exe().unwrap()).args(arguments).envs(VARIABLES.into_iter().zip(values)).spawn()
    };
    let running: Vec<_> = (0..ranks).map(|at| rank(at).unwrap()).collect();
    for mut child in running {
        assert!(child.wait().unwrap().success());
    }
}

fn step(folder: &str, launch: &Launch, mesh: Mesh, number: &dyn Fn(&str, i64) -> i64, half: bool) {
    if number("keep", 1) != 0 {
        torch::memory::pool();
    }

    torch::device::set_threads(number("threads", 1) as usize);
    let compute = if half { Kind::BFloat16 } else { Kind::Float };
    let team = Team::join(launch, mesh, Duration::from_mins(10), Device::Cpu).unwrap();
    let peak = || torch::memory::peak(Device::Cpu).unwrap().unwrap_or(0) >> 20;
    let before = peak();
    let folder = ModelFolder::open(folder).unwrap();
    let weights = Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap();
    let builder = Builder::from_weights(weights, BuildOptions::trained(Device::Cpu));
    let family = family_of(&folder).unwrap();
    let meta = Builder::meta(BuildOptions::trained(Device::Cpu));
    let whole = family.transformer(&folder, &meta).unwrap();
    let outline = Outline::of(whole.as_ref(), &meta.finish().unwrap()).unwrap();
    let frame = Frame::new(&team, outline).unwrap();
    let builder = frame.on(&team, builder, compute);
    let model = family.transformer(&folder, &builder).unwrap();
    let parameters = builder.finish().unwrap();
    let (model, spread) = frame.spread(&team, model, &parameters).unwrap();
    let loaded = peak();
    let mut optimizer = AdamW::new(parameters.trainable(), Settings::default()).unwrap();

    let (rank, count) = team.share();
    let [side, frames, batch] = if family.clips(&folder).unwrap().is_some() { [128, 17, 2] } else { [256, 1, 2] };
    let (side, frames, batch) = (number("size", side) as u32, number("frames", frames) as u32, number("batch", batch));
    let own = batch / count as i64;
    let size = Size { batch, width: side, height: side, frames, tokens: number("text", 512) };
    let Sample { inputs, target } = Sample::rows(&folder, size, rank as i64 * own, own, compute).unwrap();

    let (mut wall, mut last) = (Vec::new(), 0.0);
    for _ in 0..=number("steps", 5) {
        team.barrier().unwrap();
        let start = Instant::now();
        optimizer.clear_gradients().unwrap();
        let recompute = Recompute { every: number("recompute", 0) as usize, offload: number("offload", 0) != 0 };
        let actions = spread.begin(1);
        let (prediction, flight) = spread.forward(model.as_ref(), &inputs, recompute, actions[0]).unwrap();
        // The mean over the global batch.
        let weight = own as f64 / batch as f64;
        let loss = prediction.map(|p| p.to_kind(Kind::Float).mse_loss(&target, tch::Reduction::Mean) * weight);
        spread.before_last_backward(actions[1]);
        spread.backward(flight, loss.as_ref().map(|loss| loss / team.redundancy() as f64)).unwrap();
        spread.finish().unwrap();
        spread.clip(&team, optimizer.parameters(), 1.0).unwrap();
        optimizer.step(1e-4).unwrap();
        wall.push(start.elapsed().as_secs_f64());
        last = team.sums(&[loss.map_or(f64::NAN, |loss| loss.double_value(&[]))]).unwrap()[0];
        team.trust();
    }
    let held: usize = parameters.trainable().iter().map(|named| named.tensor.numel()).sum();
    println!(
        "rank {rank} of {count} ({mesh})  loss {last:.6}  wall {:.3} s  tensors {} MiB  peak {} MiB, of which {before} before the model, \
         {loaded} with it; its share of weights, gradients and optimizer state {} MiB",
        median(wall.split_off(1)),
        torch::memory::most_pooled() >> 20,
        peak(),
        (4 * held * size_of::<f32>()) >> 20
    );
    team.leave().unwrap();
}

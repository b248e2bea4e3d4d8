//! A model that one process has no room for, from outside: it is told so, and four processes train it.

use std::path::Path;

use serde_json::Value;

use crate::project::{small, tiny_flux};
use crate::support::{Finished, Sandbox};

/// What each process may hold in writable memory, MiB: weights, gradients and half of the optimizer state of [`larger`], and what
/// libtorch and its threads hold themselves.
const LIMIT: u64 = 400;

/// The tiny FLUX, 15 M parameters wide: weights, gradients and optimizer state in float32 are 240 MB.
fn larger(sandbox: &Sandbox) {
    copy(&tiny_flux(), &sandbox.path("larger"));
    let path = sandbox.path("larger/transformer/config.json");
    let mut config: Value = serde_json::from_slice(&fs_err::read(&path).expect("a file")).expect("JSON");
    config["num_attention_heads"] = 32.into();
    config["num_single_layers"] = 10.into();
    fs_err::write(path, config.to_string()).expect("a written file");
}

fn copy(from: &Path, to: &Path) {
    fs_err::create_dir_all(to).expect("a folder");
    for entry in fs_err::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs_err::copy(entry.path(), target).expect("a copy");
        }
    }
}

#[test]
fn a_model_that_one_process_has_no_room_for_trains_on_four() {
    let sandbox = small();
    larger(&sandbox);
    sandbox.pipeline(&["run", "small.toml", "--until", "bucket"]).expect(0);
    let train = |ranks: &str, threads: &str| -> Finished {
        let args = ["run", "small.toml", "--only", "train", "--ranks", ranks, "--threads", threads];
        let sets = [
            "train.base_model=larger",
            "train.model.mode=pretrain",
            "train.fsdp={}",
            "train.step_scheduler.max_steps=3",
            "train.step_scheduler.ckpt_every_steps=100",
        ];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        sandbox.limited(LIMIT, &[&args[..], &sets].concat())
    };
    train("1", "1").expect(10).says(&["out of memory", "more ranks with `fsdp`"]);
    train("4", "4").expect(0).says(&["on 4 ranks", "3 steps"]);
}

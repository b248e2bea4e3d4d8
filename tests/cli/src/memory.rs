//! Memory of training, from outside: `plan` tells what a rank will need, and a model that one process has no room for trains on
//! four.

use serde_json::Value;

use crate::project::{draw_pictures, recipe, tiny_flux};
use crate::support::{Finished, Sandbox, copy_folder};

/// What a process may have of memory: less than weights and optimizer state of a FLUX with 16 single blocks take, 984 MB.
const LIMIT_MIB: u64 = 800;

/// A sandbox with a FLUX of 512 channels and so many single blocks, random in every run: `larger/`, and `NAME.toml` for each of the
/// ways to train it.
fn larger(singles: u64, ways: &[(&str, &str)]) -> Sandbox {
    let sandbox = Sandbox::new();
    draw_pictures(&sandbox.path("pictures"), 12);
    copy_folder(&tiny_flux(), &sandbox.path("larger"));
    let path = sandbox.path("larger/transformer/config.json");
    let mut config: Value = serde_json::from_slice(&fs_err::read(&path).expect("a file")).expect("JSON");
    config["num_attention_heads"] = 64.into();
    config["num_single_layers"] = singles.into();
    fs_err::write(path, config.to_string()).expect("a written file");
    let common = recipe("pictures", "larger").replace("max_pixels = 8192", "max_pixels = 18432");
    let common =
        common.replace("max_steps = 4", "max_steps = 3").replace("ckpt_every_steps = 2", "ckpt_every_steps = 9");
    let common = common.replace("[train.optimizer]\nlr = 1e-3\n", "");
    // Ways that move no number would share one result: each has a seed of its own.
    for (seed, (name, way)) in ways.iter().enumerate() {
        let own = common
            .replace("\"small\"", &format!("\"{name}\""))
            .replace("seed = 7", &format!("seed = {seed}\noptimizer.lr = 1e-3\n{way}"));
        sandbox.write(&format!("{name}.toml"), &own);
    }
    sandbox
}

/// Resident memory of the rank that had the most, by `plan` before the run and as it came.
fn told_and_measured(sandbox: &Sandbox, name: &str, ranks: &str) -> (f64, f64) {
    let file = format!("{name}.toml");
    let to_bucket = sandbox.pipeline(&["run", &file, "--until", "bucket"]);
    to_bucket.expect(0);
    let plan = sandbox.pipeline(&["plan", &file, "--ranks", ranks, "--json"]).expect(0).stdout;
    let plan: Value = serde_json::from_str(&plan).expect("JSON");
    let train = plan["stages"].as_array().expect("stages").iter().find(|stage| stage["stage"] == "train");
    let told = train.expect("a stage")["forecast"]["rank_memory_bytes"].as_f64().expect("memory is told");
    sandbox.pipeline(&["run", &file, "--only", "train", "--ranks", ranks]).expect(0);
    let query = ["sql", &file, "select max(memory_bytes) from steps", "--format", "csv"];
    let measured = sandbox.pipeline(&query).expect(0).stdout;
    (told, measured.lines().last().and_then(|line| line.parse().ok()).expect("a number"))
}

#[test]
fn plan_tells_a_ranks_peak_memory_within_a_tenth() {
    let lora = "base_model = \"trained\"\npeft.dim = 8";
    let sandbox = larger(
        6,
        &[
            ("full", "model.mode = \"pretrain\""),
            (
                "again",
                "model.mode = \"pretrain\"\nfsdp.activation_checkpointing = true\noptimizer.state_dtype = \"8bit\"",
            ),
            ("parts", "model.mode = \"pretrain\"\nfsdp.dp_size = 2"),
            ("channels", "model.mode = \"pretrain\"\nfsdp.tp_size = 2"),
            ("stages", "model.mode = \"pretrain\"\nfsdp.pp_size = 2"),
            ("adapter", lora),
        ],
    );
    let check = |name: &str, ranks: &str| {
        let (told, measured) = told_and_measured(&sandbox, name, ranks);
        let off = told / measured - 1.0;
        assert!(off.abs() < 0.1, "{name}: told {told:e}, measured {measured:e}: {:.1} % off", off * 100.0);
        measured
    };
    let full = check("full", "1");
    let trained = fs_err::read_dir(sandbox.path("runs/full/train")).expect("a folder").flatten();
    let checkpoint = trained.map(|entry| entry.path()).find(|path| path.join("transformer").is_dir());
    copy_folder(&checkpoint.expect("a checkpoint"), &sandbox.path("trained"));
    // What saves memory does.
    for (name, ranks) in [("again", "1"), ("parts", "2"), ("channels", "2"), ("stages", "2"), ("adapter", "1")] {
        let measured = check(name, ranks);
        assert!(measured < 0.9 * full, "{name}: {measured:e}, full {full:e}");
    }
}

#[test]
fn a_model_that_one_process_has_no_room_for_trains_on_four() {
    let sandbox = larger(16, &[("large", "model.mode = \"pretrain\"\nfsdp.dp_size = 4")]);
    sandbox.pipeline(&["run", "large.toml", "--until", "bucket"]).expect(0);
    let train = |ranks: &str, more: &[&str]| -> Finished {
        let args = ["run", "large.toml", "--only", "train", "--ranks", ranks, "--threads", ranks];
        sandbox.limited(LIMIT_MIB, &[&args, more].concat())
    };
    let alone = train("1", &["--set", "train.fsdp.dp_size=1"]).expect(10);
    alone.says(&["out of memory", "more ranks with `fsdp`"]);
    train("4", &[]).expect(0).says(&["3 steps"]);
}

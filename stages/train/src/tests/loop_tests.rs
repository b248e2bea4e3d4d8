//! Numbers: splits, resumes, adapters, averages, broken samples.

use serde_json::json;
use stage::Exit;
use tables::Validation;
use tch::Kind;

use super::world::{SQUARE, TALL, World, difference};

const STATE: &str = "training_state/weights.safetensors";

#[test]
fn the_split_of_a_batch_does_not_change_gradients() {
    let world = World::new(&[(SQUARE, 7), (TALL, 5)]);
    for (name, local) in [("eight", 8), ("four", 4), ("two", 2)] {
        world.run(name, json!({"step_scheduler": {"local_batch_size": local}})).unwrap();
    }
    let whole = world.losses("eight");
    for name in ["four", "two"] {
        let split = world.losses(name);
        assert_eq!(whole.keys().collect::<Vec<_>>(), split.keys().collect::<Vec<_>>());
        for (key, loss) in &whole {
            assert!((loss - split[key]).abs() <= 1e-5 * loss.abs(), "{key:?}: {loss} {}", split[key]);
        }
        for (a, b) in world.steps("eight").iter().zip(world.steps(name)) {
            assert!((a.grad_norm - b.grad_norm).abs() <= 1e-5 * a.grad_norm, "{} {}", a.grad_norm, b.grad_norm);
        }
        // AdamW divides by the root of the second moment, which magnifies rounding of tiny gradients.
        let last = format!("epoch_1_step_3/{STATE}");
        let far = difference(&world.tensors("eight", &last), &world.tensors(name, &last));
        assert!(far < 1e-3, "{far}");
    }
}

#[test]
fn every_sample_is_trained_on_once_an_epoch_and_repeats_never() {
    let world = World::new(&[(SQUARE, 7), (TALL, 5)]);
    let outcome = world.run("run", json!({})).unwrap();
    assert_eq!((outcome.ledger.taken, outcome.ledger.out), (12, 12));
    let first_epoch = world.losses("run").into_keys().filter(|(step, _)| *step < 2).count();
    assert_eq!(first_epoch, 12);
    assert_eq!(
        world.steps("run").iter().map(|step| (step.epoch, step.samples)).collect::<Vec<_>>(),
        [(0, 8), (0, 4), (1, 8), (1, 4)]
    );
    assert_eq!(world.checkpoints("run"), ["epoch_0_step_1", "epoch_1_step_3"]);
}

#[test]
fn a_resumed_run_is_the_undisturbed_one_bit_for_bit() {
    let world = World::new(&[(SQUARE, 7), (TALL, 5)]);
    let over =
        json!({"ema": {"decay": 0.9}, "step_scheduler": {"max_steps": 6}, "lr_scheduler": {"lr_warmup_steps": 2}});
    world.run("whole", over.clone()).unwrap();

    // Stopped by a signal: a checkpoint at the next step, then on from there.
    let failure = world.run_until("stopped", &over, true).unwrap_err();
    assert_eq!(failure.exit, Exit::Interrupted);
    assert_eq!(world.checkpoints("stopped"), ["epoch_0_step_0"]);
    world.run("stopped", over.clone()).unwrap();

    // Killed after a checkpoint: later rows and an unfinished folder lie around.
    world.run("killed", over.clone()).unwrap();
    fs_err::remove_dir_all(world.output("killed/epoch_2_step_5")).unwrap();
    fs_err::create_dir_all(world.output("killed/.partial-epoch_2_step_5/transformer")).unwrap();
    world.run("killed", over).unwrap();

    for name in ["stopped", "killed"] {
        assert_eq!(world.losses("whole"), world.losses(name), "{name}");
        for file in [
            "training_state/weights",
            "training_state/optimizer",
            "training_state/ema",
            "transformer/diffusion_pytorch_model",
        ] {
            let file = format!("epoch_2_step_5/{file}.safetensors");
            assert_eq!(world.tensors("whole", &file), world.tensors(name, &file), "{name} {file}");
        }
        let numbers = |name| {
            world.steps(name).into_iter().map(|s| (s.step, s.epoch, s.loss, s.lr, s.grad_norm)).collect::<Vec<_>>()
        };
        assert_eq!(numbers("whole"), numbers(name));
        assert!(!world.output(name).join(".partial-epoch_2_step_5").exists());
        assert_eq!(world.checkpoints("whole"), world.checkpoints(name));
    }
}

/// A bit of any file of the newest state: the run goes on from the one before, to the same numbers.
#[test]
fn a_damaged_state_is_not_gone_on_from() {
    let over = || json!({"step_scheduler": {"ckpt_every_steps": 2}});
    let world = World::new(&[(SQUARE, 8)]);
    world.run("whole", over()).unwrap();
    let names = world.checkpoints("whole");
    assert!(names.len() > 1, "{names:?}");
    let newest = names.last().unwrap();
    for file in ["weights.safetensors", "optimizer.safetensors", "state.json"] {
        let name = format!("hurt-{file}");
        world.run(&name, over()).unwrap();
        let path = world.output(&name).join(newest).join("training_state").join(file);
        let mut bytes = fs_err::read(&path).unwrap();
        // In the last number, so that the file still reads well.
        let at = bytes.iter().rposition(u8::is_ascii_digit).filter(|_| file == "state.json").unwrap_or(bytes.len() - 1);
        bytes[at] ^= 1;
        fs_err::write(&path, bytes).unwrap();
        let refused = world.run(&format!("from-{file}"), json!({"checkpoint": {"restore_from": path.parent().unwrap().parent().unwrap()}, "step_scheduler": {"max_steps": 9}}));
        let text = refused.unwrap_err().problem.message;
        assert!(text.contains(file) && text.contains("cannot go on from"), "{text}");
        world.run(&name, over()).unwrap();
        assert_eq!(world.losses("whole"), world.losses(&name), "{file}");
        assert_eq!(names, world.checkpoints(&name), "{file}");
        let state = format!("{newest}/{STATE}");
        assert_eq!(world.tensors("whole", &state), world.tensors(&name, &state), "{file}");
    }
}

#[test]
fn a_run_may_start_from_another_runs_state() {
    let world = World::new(&[(SQUARE, 8)]);
    world.run("short", json!({"step_scheduler": {"max_steps": 2}})).unwrap();
    world.run("whole", json!({})).unwrap();
    let from = world.output("short/epoch_1_step_1");
    world.run("on", json!({"checkpoint": {"restore_from": from}})).unwrap();
    let file = format!("epoch_3_step_3/{STATE}");
    assert_eq!(world.tensors("whole", &file), world.tensors("on", &file));
    assert_eq!(world.steps("on").iter().map(|step| step.step).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn computing_activations_again_changes_no_number() {
    let world = World::new(&[(SQUARE, 8)]);
    world.run("kept", json!({})).unwrap();
    world.run("again", json!({"fsdp": {"activation_checkpointing": true}})).unwrap();
    assert_eq!(world.losses("kept"), world.losses("again"));
}

#[test]
fn bfloat16_computes_on_float32_masters() {
    let world = World::new(&[(SQUARE, 8)]);
    world.run("f32", json!({})).unwrap();
    world.run("bf16", json!({"model": {"compute_dtype": "bfloat16"}})).unwrap();
    let masters = world.tensors("bf16", &format!("epoch_3_step_3/{STATE}"));
    assert!(masters.values().all(|tensor| tensor.kind() == tch::Kind::Float));
    // Rounding shows, and no more than rounding: bf16 also rounds the time that the model is told.
    for (a, b) in world.steps("f32").iter().zip(world.steps("bf16")) {
        assert!(a.loss != b.loss && (a.loss - b.loss).abs() < 0.1 * a.loss, "{} {}", a.loss, b.loss);
    }
}

#[test]
fn a_broken_sample_stops_the_run_and_is_named() {
    let world = World::with_latents(&[(SQUARE, 4)], |id, n| vec![if id.ends_with("-2") { f32::NAN } else { 0.1 }; n]);
    let failure = world.run("run", json!({})).unwrap_err();
    assert_eq!(failure.exit, Exit::Numbers);
    assert!(failure.problem.message.contains("at step 0"), "{}", failure.problem.message);
    assert!(failure.problem.message.contains("`64x64-2` (sigma 0."), "{}", failure.problem.message);
    assert!(!failure.problem.message.contains("64x64-1"), "{}", failure.problem.message);
    assert_eq!(world.checkpoints("run"), [""; 0]);
}

#[test]
fn loss_falls_when_there_is_little_to_learn() {
    let world = World::with_latents(&[(SQUARE, 4)], |id, n| vec![if id.ends_with('1') { 1.0 } else { -1.0 }; n]);
    let over = json!({
        "optimizer": {"lr": 5e-3},
        "step_scheduler": {"global_batch_size": 4, "local_batch_size": 4, "max_steps": 120, "ckpt_every_steps": 1000},
    });
    world.run("run", over).unwrap();
    let steps = world.steps("run");
    let mean = |rows: &[tables::Step]| rows.iter().map(|row| row.loss).sum::<f64>() / rows.len() as f64;
    let (before, after) = (mean(&steps[..10]), mean(&steps[110..]));
    assert!(after < 0.6 * before, "{before} to {after}");
}

#[test]
fn a_lora_goes_through_the_same_loop() {
    let world = World::new(&[(SQUARE, 8)]);
    let peft =
        json!({"peft": {"dim": 2, "alpha": 4, "target_modules": ["*.attn.to_q", "*.attn.to_out.0"], "dropout": 0.1}});
    world.run("lora", peft.clone()).unwrap();
    let folder = world.output("lora/epoch_3_step_3");
    for file in ["pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
    assert!(!folder.join("model_index.json").exists());
    let trained = world.tensors("lora", &format!("epoch_3_step_3/{STATE}"));
    assert!(trained.keys().all(|name| name.contains(".lora_")));
    let moved = |name: &str| {
        trained.iter().filter(|(key, _)| key.contains(name)).all(|(_, t)| t.abs().max().double_value(&[]) > 0.0)
    };
    assert!(moved("lora_B"), "B starts at 0 and must have moved");
    // Split and recomputing do not matter here either, dropout included.
    let over = json!({"step_scheduler": {"local_batch_size": 2}, "fsdp": {"activation_checkpointing": true}, "peft": peft["peft"]});
    world.run("split", over).unwrap();
    for (key, loss) in world.losses("lora") {
        let split = world.losses("split")[&key];
        assert!((loss - split).abs() <= 1e-5 * loss.abs(), "{key:?}: {loss} {split}");
    }
}

#[test]
fn weights_may_start_at_random() {
    let world = World::new(&[(SQUARE, 8)]);
    world.run("run", json!({"model": {"mode": "pretrain"}})).unwrap();
    let given = nn::Weights::open(&super::world::model().join("transformer"), "diffusion_pytorch_model").unwrap();
    let trained = world.tensors("run", "epoch_3_step_3/transformer/diffusion_pytorch_model.safetensors");
    let name = "x_embedder.weight";
    assert!((given.tensor(name).unwrap() - &trained[name]).abs().max().double_value(&[]) > 0.1);
}

#[test]
fn validation_holds_samples_out_and_repeats_itself() {
    let world = World::new(&[(SQUARE, 7), (TALL, 5)]);
    let over = json!({"optimizer": {"lr": 0.0, "weight_decay": 0.0}, "validation": {"count": 3, "every_steps": 2, "sigmas": [0.2, 0.8]}});
    let outcome = world.run("run", over).unwrap();
    assert_eq!((outcome.ledger.out, outcome.ledger.held), (9, 3));
    let rows: Vec<Validation> = tables::read(&world.output("run/validation.parquet")).unwrap();
    assert_eq!(
        rows.iter().map(|row| (row.step, row.sigma)).collect::<Vec<_>>(),
        [(1, 0.2), (1, 0.8), (3, 0.2), (3, 0.8)]
    );
    // Weights that do not move have the same loss every time.
    assert_eq!((rows[0].loss, rows[1].loss), (rows[2].loss, rows[3].loss));
    let seen: std::collections::BTreeSet<_> = world.losses("run").into_keys().map(|(_, id)| id).collect();
    assert_eq!(seen.len(), 9);
}

/// The lowest validation loss of any checkpoint, kept beside the newest, whether or not the run was interrupted.
#[test]
fn the_best_checkpoint_is_kept_and_named() {
    let world = World::new(&[(SQUARE, 8)]);
    // A rate that makes it worse after a while.
    let over = |best: &str| {
        json!({"validation": {"count": 2, "every_steps": 1}, "optimizer": {"lr": 1.0},
            "step_scheduler": {"max_steps": 6, "ckpt_every_steps": 1},
            "checkpoint": {"max_recent_checkpoints": 1, "best_metric_key": best}})
    };
    world.run("best", over("validation_loss")).unwrap();
    let rows: Vec<Validation> = tables::read(&world.output("best").join("validation.parquet")).unwrap();
    let mean = |step: i64| {
        let losses: Vec<f64> = rows.iter().filter(|row| row.step == step).map(|row| row.loss).collect();
        losses.iter().sum::<f64>() / losses.len() as f64
    };
    let lowest = (0..6).min_by(|a, b| mean(*a).total_cmp(&mean(*b))).unwrap();
    assert!(lowest < 5, "this run tests nothing");
    let names = world.checkpoints("best");
    assert!(
        names.len() == 2 && names[0].ends_with(&format!("_step_{lowest}")) && names[1].ends_with("_step_5"),
        "{names:?}"
    );
    let named = fs_err::read_to_string(world.output("best").join("best.json")).unwrap();
    let named: serde_json::Value = serde_json::from_str(&named).unwrap();
    assert_eq!((&named["checkpoint"], &named["validation_loss"]), (&json!(names[0]), &json!(mean(lowest))));

    world.run_until("stopped", &over("validation_loss"), true).unwrap_err();
    world.run("stopped", over("validation_loss")).unwrap();
    assert_eq!(world.checkpoints("stopped"), names);
    world.run("newest", over("default")).unwrap();
    assert_eq!(world.checkpoints("newest"), names[1..]);
    assert!(!world.output("newest").join("best.json").exists());
}

/// A checkpoint in bf16 is as diffusers writes it: what a model keeps in f32 there (`_keep_in_fp32_modules`) is in f32.
#[test]
fn a_checkpoint_keeps_wide_what_the_model_does() {
    World::each(&[(SQUARE, 4)], |world| {
        let over = json!({"model": {"torch_dtype": "bfloat16"}, "step_scheduler": {"max_steps": 1}});
        world.run("run", over).unwrap();
        let checkpoint = world.checkpoints("run").pop().unwrap();
        let tensors = world.tensors("run", &format!("{checkpoint}/transformer/diffusion_pytorch_model.safetensors"));
        let is_wan = tensors.keys().any(|name| name.starts_with("condition_embedder"));
        for (name, tensor) in tensors {
            let wide = ["rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"];
            let wide = is_wan && name.split('.').any(|part| wide.contains(&part));
            assert_eq!(tensor.kind(), if wide { Kind::Float } else { Kind::BFloat16 }, "{name}");
        }
    });
}

//! Law L6: a run on several ranks is the run on one, whatever the split, and goes on elsewhere.

use std::cell::Cell;

use serde_json::{Value, json};
use spec::Bucket;
use stage::Exit;
use tables::Validation;
use tch::Kind;

use super::world::{SQUARE, TALL, World, difference};

/// What is kept of each denoiser that is trained.
const STATE: [&str; 2] = ["weights", "optimizer"];
const PLACES: [&str; 2] = ["training_state", "training_state/transformer_2"];

/// Losses, gradient norms, weights and optimizer state of two runs, up to the rounding of sums taken in another order.
#[track_caller]
pub(super) fn assert_same_run(world: &World, one: &str, other: &str, last: &str) {
    let (a, b) = (world.losses(one), world.losses(other));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (key, loss) in &a {
        assert!((loss - b[key]).abs() <= 2e-5 * loss.abs(), "{key:?}: {loss} {}", b[key]);
    }
    let (a, b) = (world.steps(one), world.steps(other));
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(&b) {
        assert_eq!((a.step, a.epoch, a.samples, a.lr), (b.step, b.epoch, b.samples, b.lr));
        assert!((a.loss - b.loss).abs() <= 1e-5 * a.loss, "{} {}", a.loss, b.loss);
        assert!((a.grad_norm - b.grad_norm).abs() <= 2e-5 * a.grad_norm, "{} {}", a.grad_norm, b.grad_norm);
    }
    assert_eq!(world.checkpoints(one), world.checkpoints(other));
    let there = |place: &&str| world.output(&format!("{one}/{last}/{place}/weights.safetensors")).is_file();
    let places: Vec<&str> = PLACES.into_iter().filter(there).collect();
    assert!(!places.is_empty());
    for (place, file) in places.into_iter().flat_map(|place| STATE.map(|file| (place, file))) {
        let file = format!("{last}/{place}/{file}.safetensors");
        // AdamW divides by the root of the second moment, which magnifies rounding of tiny gradients.
        let far = difference(&world.tensors(one, &file), &world.tensors(other, &file));
        assert!(far < 1e-3, "{file}: {far}");
    }
}

pub(super) fn over(local: u64) -> Value {
    json!({"step_scheduler": {"local_batch_size": local}, "ema": {"decay": 0.9}, "dist_env": {"timeout_minutes": 2}})
}

/// `over` with the block `fsdp` or `ddp`.
pub(super) fn spread(over: &Value, block: &str, keys: Value) -> Value {
    let mut over = over.clone();
    over[block] = keys;
    over
}

#[test]
fn copies_on_ranks_train_as_one_does() {
    World::each(&[(SQUARE, 7), (TALL, 5)], |world| {
        world.run("one", over(8)).unwrap();
        // 12 samples in steps of 8 and 4: with 3 ranks of micro-batches of 2, shares differ and some are empty.
        for (ranks, local) in [(2, 4), (3, 2)] {
            let name = format!("on {ranks}");
            let outcome = world.run_ranks(&name, ranks, &spread(&over(local), "ddp", json!({}))).unwrap();
            assert_eq!((outcome.ledger.taken, outcome.ledger.out), (12, 12));
            assert_same_run(world, "one", &name, "epoch_1_step_3");
            let ema = "epoch_1_step_3/training_state/ema.safetensors";
            assert!(difference(&world.tensors("one", ema), &world.tensors(&name, ema)) < 1e-3);
        }
    });
}

#[test]
fn parts_on_ranks_train_as_one_does() {
    World::each(&[(SQUARE, 7), (TALL, 5)], |world| {
        world.run("one", over(8)).unwrap();
        let result = "epoch_1_step_3/transformer/diffusion_pytorch_model.safetensors";
        for (name, ranks, local, keys) in [
            ("two", 2, 2, json!({"activation_checkpointing": false, "fsdp2_forward_prefetch_depth": 3})),
            (
                "three, computed again, added up each time",
                3,
                2,
                json!({"activation_checkpointing": true, "defer_fsdp_grad_sync": false, "enable_fsdp2_prefetch": false}),
            ),
            ("two copies of two parts, kept", 4, 2, json!({"dp_replicate_size": 2, "reshard_after_forward": false})),
            ("one, in host memory", 1, 8, json!({"cpu_offload": true})),
            ("two, in host memory", 2, 4, json!({"cpu_offload": true, "activation_checkpointing": "selective"})),
            ("two, inputs too", 2, 4, json!({"cpu_offload": true, "activation_offload": true})),
        ] {
            world.run_ranks(name, ranks, &spread(&over(local), "fsdp", keys)).unwrap();
            assert_same_run(world, "one", name, "epoch_1_step_3");
            assert!(difference(&world.tensors("one", result), &world.tensors(name, result)) < 1e-3, "{name}");
        }
    });
}

/// Sums in bfloat16 are those sums, rounded: gradients are off by a part in 2^8, not by more and not by nothing.
#[test]
fn sums_in_bfloat16_are_near_those_in_float32() {
    let world = World::new(&[(SQUARE, 7), (TALL, 5)]);
    world.run("one", over(8)).unwrap();
    let whole = world.steps("one");
    for (name, ranks, keys) in [
        ("parts", 2, json!({"reduce_dtype": "bfloat16"})),
        (
            "copies of parts",
            4,
            json!({"reduce_dtype": "bfloat16", "dp_replicate_size": 2, "defer_fsdp_grad_sync": false}),
        ),
    ] {
        world.run_ranks(name, ranks, &spread(&over(2), "fsdp", keys)).unwrap();
        let off = |(a, b): (f64, f64)| ((a - b) / b).abs();
        let norms = world.steps(name).into_iter().zip(&whole).map(|(step, whole)| (step.grad_norm, whole.grad_norm));
        let far: Vec<f64> = norms.map(off).collect();
        assert!(far.iter().all(|far| *far < 4e-3) && far.iter().any(|far| *far > 1e-6), "{name}: {far:?}");
        for (one, other) in world.losses("one").values().zip(world.losses(name).values()) {
            assert!((one - other).abs() < 1e-2 * one, "{name}: {one} {other}");
        }
    }
}

/// Narrow optimizer state is rounded by the element's place in the whole tensor: nearly all codes are the same on any mesh, though
/// gradients differ in their last bits, and a run goes on from them, bit for bit, on its own mesh.
#[test]
fn narrow_optimizer_state_is_that_of_one_rank() {
    World::each(&[(SQUARE, 7), (TALL, 5)], |world| {
        for (kept, kinds) in [("bfloat16", vec![Kind::BFloat16]), ("8bit", vec![Kind::Uint8, Kind::Float])] {
            let over = |local| {
                let mut over = over(local);
                over["optimizer"] = json!({"state_dtype": kept, "lr": 1e-3});
                over
            };
            let (one, last) = (format!("one {kept}"), "epoch_1_step_3");
            let file = format!("{last}/training_state/optimizer.safetensors");
            world.run(&one, over(8)).unwrap();
            let expected = world.tensors(&one, &file);
            let found = |key: &String| key.rsplit_once('.').is_none_or(|(_, last)| last != "step");
            assert!(
                expected.iter().filter(|(key, _)| found(key)).all(|(_, tensor)| { kinds.contains(&tensor.kind()) })
            );
            for (ranks, keys) in
                [(2, json!({})), (3, json!({"activation_checkpointing": false})), (2, json!({"pp_size": 2}))]
            {
                let name = format!("{kept} {ranks} {keys}").replace(['"', '{', '}'], "");
                world.run_ranks(&name, ranks, &spread(&over(2), "fsdp", keys.clone())).unwrap();
                let weights = format!("{last}/training_state/weights.safetensors");
                let far = difference(&world.tensors(&one, &weights), &world.tensors(&name, &weights));
                assert!(far < 5e-3, "{name}: {far}");
                let state = world.tensors(&name, &file);
                assert_eq!(state.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
                let (mut same, mut all) = (0, 0);
                for (key, tensor) in
                    expected.iter().filter(|(_, tensor)| matches!(tensor.kind(), Kind::BFloat16 | Kind::Uint8))
                {
                    assert_eq!(state[key].kind(), tensor.kind(), "{key}");
                    same += i64::try_from(state[key].eq_tensor(tensor).sum(Kind::Int64)).unwrap();
                    all += tensor.numel() as i64;
                }
                assert!(same * 100 >= all * 95, "{name}: {same} of {all} numbers are the same");
                // From the checkpoint before the last, to the same bits.
                fs_err::remove_dir_all(world.output(&format!("{name}/{last}"))).unwrap();
                world.run_ranks(&name, ranks, &spread(&over(2), "fsdp", keys.clone())).unwrap();
                let again = world.tensors(&name, &file);
                assert!(again.iter().all(|(key, tensor)| tensor.equal(&state[key])), "{name}");
            }
        }
    });
}

/// Every family on every kind of mesh, ten steps; a model that cannot be divided so says why.
#[test]
fn every_model_trains_on_every_mesh_as_on_one_rank() {
    let meshes = [
        (2, json!({"tp_size": 2})),
        (2, json!({"cp_size": 2, "cp_ring_degree": 2})),
        (2, json!({"pp_size": 2})),
        (4, json!({"tp_size": 2, "dp_size": 2})),
        (4, json!({"cp_size": 2, "dp_size": 2, "activation_checkpointing": false})),
        (4, json!({"pp_size": 2, "dp_size": 2, "dp_replicate_size": 2, "activation_checkpointing": false})),
        (4, json!({"pp_size": 2, "tp_size": 2})),
        (4, json!({"tp_size": 2, "cp_size": 2, "cp_ring_degree": 2})),
    ];
    let trained = meshes.each_ref().map(|_| Cell::new(0));
    // Nine and fifteen tokens or so.
    let odd = |width, height| Bucket { width, height, frames: 1 };
    World::each(&[(odd(48, 48), 5), (odd(48, 80), 4)], |world| {
        let over = |local: u64| {
            let mut over = over(local);
            over["step_scheduler"] = json!({
                "global_batch_size": 4, "local_batch_size": local, "max_steps": 10, "ckpt_every_steps": 100,
            });
            over
        };
        world.run("one", over(4)).unwrap();
        let last = world.checkpoints("one").pop().unwrap();
        for ((ranks, keys), trained) in meshes.iter().zip(&trained) {
            let name = keys.to_string().replace(['"', '{', '}'], "");
            // Micro-batches of one, so that stages have several under way.
            match world.run_ranks(&name, *ranks, &spread(&over(1), "fsdp", keys.clone())) {
                Ok(_) => trained.set(trained.get() + 1),
                Err(failure) => {
                    let message = &failure.problem.message;
                    assert!(message.contains("3 attention heads do not divide into 2 shares"), "{name}: {message}");
                    continue;
                }
            }
            assert_same_run(world, "one", &name, &last);
            let result = format!("{last}/transformer/diffusion_pytorch_model.safetensors");
            assert!(difference(&world.tensors("one", &result), &world.tensors(&name, &result)) < 1e-3, "{name}");
        }
    });
    let families = models::FAMILIES.len();
    assert!(trained.iter().all(|trained| trained.get() >= families), "every mesh has trained a model of each family");
}

/// Whole files, whoever wrote them: what one mesh stopped at, another goes on from.
#[test]
fn a_run_goes_on_on_another_mesh() {
    let world = World::new(&[(SQUARE, 5), (TALL, 4)]);
    world.run("whole", over(4)).unwrap();
    let meshes = [
        (2, json!({"tp_size": 2})),
        (2, json!({"pp_size": 2})),
        (4, json!({"cp_size": 2, "dp_size": 2})),
        (1, json!({})),
        (4, json!({"pp_size": 2, "tp_size": 2})),
    ];
    for (number, first) in meshes.iter().enumerate() {
        let second = &meshes[(number + 1) % meshes.len()];
        let name = format!("{} then {}", first.1, second.1).replace(['"', '{', '}'], "");
        world.run_ranks(&name, first.0, &spread(&over(2), "fsdp", first.1.clone())).unwrap();
        fs_err::remove_dir_all(world.output(&format!("{name}/epoch_1_step_3"))).unwrap();
        world.run_ranks(&name, second.0, &spread(&over(2), "fsdp", second.1.clone())).unwrap();
        assert_same_run(&world, "whole", &name, "epoch_1_step_3");
    }
}

/// An adapter of divided layers is one adapter: the same numbers, and one file.
#[test]
fn an_adapter_is_divided_with_its_layers() {
    let world = World::new(&[(SQUARE, 8)]);
    let over = json!({
        "peft": {"dim": 2, "alpha": 4, "target_modules": ["*.attn.to_q", "*.to_out.0", "*.proj_out", "*.norm.linear"]},
        "step_scheduler": {"local_batch_size": 2},
        "validation": {"count": 3, "every_steps": 2, "sigmas": [0.2, 0.8]},
    });
    world.run("one", over.clone()).unwrap();
    let last = world.checkpoints("one").pop().unwrap();
    let validation =
        |name: &str| -> Vec<Validation> { tables::read(&world.output(name).join("validation.parquet")).unwrap() };
    for (ranks, keys) in [
        (2, json!({"tp_size": 2, "activation_checkpointing": false})),
        (4, json!({"cp_size": 2, "dp_size": 2})),
        (4, json!({"pp_size": 2, "tp_size": 2})),
    ] {
        let name = keys.to_string().replace(['"', '{', '}'], "");
        world.run_ranks(&name, ranks, &spread(&over, "fsdp", keys)).unwrap();
        assert_same_run(&world, "one", &name, &last);
        for (a, b) in validation("one").iter().zip(validation(&name)) {
            assert!(a.step == b.step && (a.loss - b.loss).abs() < 1e-5 * a.loss, "{name}: {a:?} {b:?}");
        }
        let file = format!("{last}/pytorch_lora_weights.safetensors");
        assert!(difference(&world.tensors("one", &file), &world.tensors(&name, &file)) < 1e-3, "{name}");
    }
    let mut dropped = spread(&over, "fsdp", json!({"tp_size": 2}));
    dropped["peft"]["dropout"] = json!(0.1);
    let failure = world.run_ranks("dropped", 2, &dropped).unwrap_err();
    assert_eq!(failure.exit, Exit::Recipe);
    assert!(failure.problem.message.starts_with("`peft.dropout` is 0.1 and `tp_size` is 2"), "{failure:?}");
}

/// A stage may have nothing to train, and one that draws has the help of the others.
#[test]
fn a_stage_without_anything_trained_keeps_step() {
    let world = World::new(&[(SQUARE, 8)]);
    let over = json!({
        "peft": {"dim": 2, "alpha": 4, "target_modules": ["single_transformer_blocks.1.*"]},
        "step_scheduler": {"local_batch_size": 2},
        "samples": {"prompts": ["a fool", "a sun"], "every_steps": 4, "width": 64, "height": 64, "steps": 2},
    });
    world.run("one", over.clone()).unwrap();
    let last = world.checkpoints("one").pop().unwrap();
    let picture = |name: &str, number: usize| {
        let path = world.output(&format!("{name}/samples/step_3/00{number}.png"));
        media::decode(&fs_err::read(path).unwrap(), [0; 3]).unwrap().rgb
    };
    for (ranks, keys) in [(2, json!({"pp_size": 2})), (4, json!({"pp_size": 2, "tp_size": 2}))] {
        let name = keys.to_string().replace(['"', '{', '}'], "");
        world.run_ranks(&name, ranks, &spread(&over, "fsdp", keys)).unwrap();
        assert_same_run(&world, "one", &name, &last);
        for number in 0..2 {
            let (one, other) = (picture("one", number), picture(&name, number));
            let far = one.iter().zip(&other).map(|(a, b)| a.abs_diff(*b)).max();
            assert!(one.len() == other.len() && far <= Some(1), "{name}: {far:?}");
        }
    }
}

#[test]
fn parts_in_bfloat16_are_rounded_as_the_whole_is() {
    World::each(&[(SQUARE, 8)], |world| {
        let over = json!({"model": {"compute_dtype": "bfloat16"}, "step_scheduler": {"local_batch_size": 4}});
        world.run("one", over.clone()).unwrap();
        world.run_ranks("two", 2, &spread(&over, "fsdp", json!({}))).unwrap();
        for (key, loss) in world.losses("one") {
            let two = world.losses("two")[&key];
            assert!((loss - two).abs() <= 2e-3 * loss.abs(), "{key:?}: {loss} {two}");
        }
    });
}

#[test]
fn parts_go_on_where_copies_stopped_and_the_other_way_round() {
    World::each(&[(SQUARE, 5), (TALL, 4)], |world| {
        world.run("whole", over(4)).unwrap();
        let run = |name: &str, ranks: usize, block: &str| {
            world.run_ranks(name, ranks, &spread(&over(2), block, json!({}))).unwrap();
        };
        for (name, first, second) in [
            ("parts, other parts", (2, "fsdp"), (3, "fsdp")),
            ("parts, one", (2, "fsdp"), (1, "fsdp")),
            ("copies, parts", (2, "ddp"), (2, "fsdp")),
        ] {
            run(name, first.0, first.1);
            fs_err::remove_dir_all(world.output(&format!("{name}/epoch_1_step_3"))).unwrap();
            run(name, second.0, second.1);
            assert_same_run(world, "whole", name, "epoch_1_step_3");
        }
    });
}

/// Training goes on while a checkpoint is written, so that what is written is older than what is in memory; it must not
/// show. EMA and adapters are results of another kind.
#[test]
fn checkpoints_beside_training_are_those_that_it_waits_for() {
    let kinds = [json!({"ema": {"decay": 0.9}}), json!({"ema": {"decay": 0.9}, "peft": {"dim": 2, "alpha": 2}})];
    for (index, kind) in kinds.into_iter().enumerate() {
        let world = World::new(&[(SQUARE, 5), (TALL, 3)]);
        let over = |beside: bool| {
            let mut over = kind.clone();
            over["checkpoint"] = json!({"is_async": beside, "max_recent_checkpoints": 3});
            over["step_scheduler"] = json!({"max_steps": 6, "ckpt_every_steps": 1, "local_batch_size": 2});
            over
        };
        world.run("waited", over(false)).unwrap();
        world.run("beside", over(true)).unwrap();
        world.run_ranks("beside-2", 2, &spread(&over(true), "fsdp", json!({}))).unwrap();
        world.run_ranks("waited-2", 2, &spread(&over(false), "fsdp", json!({}))).unwrap();
        for (waited, beside) in [("waited", "beside"), ("waited-2", "beside-2")] {
            let names = world.checkpoints(waited);
            assert_eq!((names.len(), &names), (3, &world.checkpoints(beside)));
            for name in names {
                let files = store::files_matching(&world.output(waited).join(&name), &[]).unwrap();
                assert!(files.len() > 3, "{files:?}");
                assert_eq!(files, store::files_matching(&world.output(beside).join(&name), &[]).unwrap());
                // The state's own digests are of these files.
                for file in files {
                    let read = |run: &str| fs_err::read(world.output(run).join(&name).join(&file)).unwrap();
                    assert!(read(waited) == read(beside), "{index} {beside} {name} {file}");
                }
            }
        }
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    World::each(&[(SQUARE, 5), (TALL, 4)], |world| {
        world.run("whole", over(4)).unwrap();
        for (first, second) in [(2, 1), (1, 2)] {
            let name = format!("{first} then {second}");
            world.run_ranks(&name, first, &spread(&over(4), "ddp", json!({}))).unwrap();
            fs_err::remove_dir_all(world.output(&format!("{name}/epoch_1_step_3"))).unwrap();
            world.run_ranks(&name, second, &spread(&over(2), "ddp", json!({}))).unwrap();
            assert_same_run(world, "whole", &name, "epoch_1_step_3");
        }
    });
}

#[test]
fn an_adapter_its_dropout_and_validation_do_not_depend_on_ranks() {
    World::each(&[(SQUARE, 8)], |world| {
        let over = json!({
            "peft": {"dim": 2, "alpha": 4, "target_modules": ["*.to_q", "*.to_out.0"], "dropout": 0.1},
            "ddp": {"activation_checkpointing": true},
            "step_scheduler": {"local_batch_size": 2},
            "validation": {"count": 3, "every_steps": 2, "sigmas": [0.2, 0.8]},
        });
        world.run("one", over.clone()).unwrap();
        let last = world.checkpoints("one").pop().unwrap();
        let rows =
            |name: &str| -> Vec<Validation> { tables::read(&world.output(name).join("validation.parquet")).unwrap() };
        let mut parts = over.clone();
        parts.as_object_mut().unwrap().remove("ddp");
        for (name, over) in
            [("copies", over), ("parts", spread(&parts, "fsdp", json!({"activation_checkpointing": false})))]
        {
            world.run_ranks(name, 2, &over).unwrap();
            assert_same_run(world, "one", name, &last);
            let (one, other) = (rows("one"), rows(name));
            assert_eq!(one.len(), other.len());
            for (a, b) in one.iter().zip(&other) {
                assert!(
                    a.step == b.step && a.sigma == b.sigma && (a.loss - b.loss).abs() < 1e-5 * a.loss,
                    "{a:?} {b:?}"
                );
            }
        }
    });
}

#[test]
fn a_broken_sample_stops_all_ranks_with_its_name() {
    let world = World::with_latents(&[(SQUARE, 4)], |id, n| vec![if id.ends_with("-2") { f32::NAN } else { 0.1 }; n]);
    let failure =
        world.run_ranks("run", 2, &json!({"step_scheduler": {"local_batch_size": 2}, "ddp": {}})).unwrap_err();
    assert_eq!(failure.exit, Exit::Numbers);
    assert!(failure.problem.message.contains("`64x64-2` (sigma 0."), "{}", failure.problem.message);
    assert_eq!(world.checkpoints("run"), [""; 0]);
}

/// With an average, validation and pictures are those of a model that begins as the checkpoint does; and looking leaves no trace in
/// what is trained, wherever parts of it were gathered to be looked at.
#[test]
fn what_is_looked_at_is_the_average_that_the_checkpoint_holds() {
    let buckets = [(SQUARE, 5), (TALL, 3)];
    let adapter = json!({"peft": {"dim": 2, "alpha": 2}});
    for (ranks, block, keys, more) in [
        (1, "fsdp", json!({}), json!({})),
        (1, "fsdp", json!({"cpu_offload": true}), json!({})),
        (2, "ddp", json!({}), json!({})),
        (2, "fsdp", json!({}), json!({})),
        (2, "fsdp", json!({"reshard_after_forward": false, "defer_fsdp_grad_sync": false}), json!({})),
        (2, "fsdp", json!({}), adapter),
        (2, "fsdp", json!({"tp_size": 2}), json!({})),
        (4, "fsdp", json!({"pp_size": 2, "dp_size": 2}), json!({})),
    ] {
        println!("{ranks} {block} {keys} {more}");
        let world = World::new(&buckets);
        let lora = more["peft"].is_object();
        let mut over = spread(&over(2), block, keys);
        over.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        over["optimizer"] = json!({"lr": 0.02});
        over["step_scheduler"]["max_steps"] = json!(3);
        let run = |name: &str, over: &Value| world.run_ranks(name, ranks, over).unwrap();
        run("unseen", &over);
        over["validation"] = json!({"count": 3, "every_steps": 1, "sigmas": [0.2, 0.8], "held_out": false});
        over["samples"] = json!({"prompts": ["a fool"], "every_steps": 1, "width": 64, "height": 64, "steps": 2});
        run("seen", &over);
        let last = world.checkpoints("seen").pop().unwrap();
        assert_eq!(world.losses("unseen"), world.losses("seen"));
        for file in ["weights", "optimizer", "ema"] {
            let file = format!("{last}/training_state/{file}.safetensors");
            assert_eq!(world.tensors("unseen", &file), world.tensors("seen", &file), "{file}");
        }
        let rows = |name: &str| -> Vec<f64> {
            let rows: Vec<Validation> = tables::read(&world.output(name).join("validation.parquet")).unwrap();
            let last = rows.iter().map(|row| row.step).max().unwrap();
            rows.into_iter().filter(|row| row.step == last).map(|row| row.loss).collect()
        };
        let apart = |a: &str, b: &str| {
            let off = |(a, b): (f64, f64)| (a - b).abs() / b.abs();
            rows(a).into_iter().zip(rows(b)).map(off).fold(0.0, f64::max)
        };
        over.as_object_mut().unwrap().remove("ema");
        run("raw", &over);
        assert!(apart("seen", "raw") > 1e-3, "the average is not what is trained: {}", apart("seen", "raw"));
        if lora {
            // No model folder: that its average is swapped is seen above.
            continue;
        }
        over["optimizer"] = json!({"lr": 0.0, "weight_decay": 0.0});
        over["step_scheduler"]["max_steps"] = json!(1);
        over["model"] = json!({"pretrained_model_name_or_path": world.output("seen").join(&last)});
        run("checkpoint", &over);
        assert!(apart("seen", "checkpoint") < 1e-5, "{}", apart("seen", "checkpoint"));
        let picture = |name: &str, step: u64| {
            let path = world.output(&format!("{name}/samples/step_{step}/000.png"));
            media::decode(&fs_err::read(path).unwrap(), [0; 3]).unwrap().rgb
        };
        let far = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        assert!(far(&picture("seen", 2), &picture("checkpoint", 0)) <= 1);
        assert!(far(&picture("seen", 2), &picture("raw", 2)) > 1, "the picture shows a difference");
    }
}

//! Ranks of a pipeline that have several runs of blocks each give the numbers of one rank.

use serde_json::{Value, json};

use super::rank_tests::{assert_same_run, over, spread};
use super::world::{SQUARE, TALL, World, difference};

/// Six blocks of one kind, or of two with a join between; steps of six and of three micro-batches.
#[test]
fn interleaved_stages_train_as_one_rank_does() {
    for (name, layers) in [("flux-tiny", 4), ("wan-tiny", 6)] {
        let world = World::deep(name, layers, &[(SQUARE, 5), (TALL, 4)]);
        let over = |local: u64| {
            let mut over = over(local);
            over["step_scheduler"] =
                json!({"global_batch_size": 6, "local_batch_size": local, "max_steps": 4, "ckpt_every_steps": 100});
            over["validation"] = json!({"count": 2, "every_steps": 2, "sigmas": [0.5]});
            over
        };
        world.run("one", over(6)).unwrap();
        let last = world.checkpoints("one").pop().unwrap();
        for (ranks, keys) in [
            (2, json!({"pp_size": 2, "pp_virtual_stages": 3})),
            (2, json!({"pp_size": 2, "pp_virtual_stages": 2, "activation_checkpointing": false})),
            (3, json!({"pp_size": 3, "pp_virtual_stages": 2})),
            (4, json!({"pp_size": 2, "pp_virtual_stages": 3, "dp_size": 2, "defer_fsdp_grad_sync": false})),
            (4, json!({"pp_size": 2, "pp_virtual_stages": 2, "dp_size": 2, "dp_replicate_size": 2})),
            (4, json!({"pp_size": 2, "pp_virtual_stages": 2, "cp_size": 2})),
        ] {
            let run = keys.to_string().replace(['"', '{', '}'], "");
            world.run_ranks(&run, ranks, &spread(&over(1), "fsdp", keys)).unwrap();
            assert_same_run(&world, "one", &run, &last);
            let result = format!("{last}/transformer/diffusion_pytorch_model.safetensors");
            assert!(difference(&world.tensors("one", &result), &world.tensors(&run, &result)) < 1e-3, "{name}: {run}");
        }
    }
}

/// Two denoisers on ranks of their own, each a pipeline; how many micro-batches an expert has depends on the noise drawn.
#[test]
fn interleaved_stages_of_experts_train_as_one_rank_does() {
    let world = World::deep("wan22-tiny", 4, &[(SQUARE, 5), (TALL, 4)]);
    let over = |local: u64, keys: &Value| {
        let mut over = spread(&over(local), "fsdp", keys.clone());
        over["model"] = json!({"boundary_ratio": 0.5});
        over["step_scheduler"] =
            json!({"global_batch_size": 6, "local_batch_size": local, "max_steps": 4, "ckpt_every_steps": 100});
        over["validation"] = json!({"count": 2, "every_steps": 2, "sigmas": [0.3, 0.7]});
        over
    };
    world.run("one", over(6, &json!({}))).unwrap();
    let last = world.checkpoints("one").pop().unwrap();
    for (ranks, keys) in [
        (2, json!({"pp_size": 2, "pp_virtual_stages": 2})),
        (4, json!({"ep_size": 2, "pp_size": 2, "pp_virtual_stages": 2})),
    ] {
        let run = keys.to_string().replace(['"', '{', '}'], "");
        world.run_ranks(&run, ranks, &over(1, &keys)).unwrap();
        assert_same_run(&world, "one", &run, &last);
        for component in ["transformer", "transformer_2"] {
            let result = format!("{last}/{component}/diffusion_pytorch_model.safetensors");
            assert!(difference(&world.tensors("one", &result), &world.tensors(&run, &result)) < 1e-3, "{run}");
        }
    }
}

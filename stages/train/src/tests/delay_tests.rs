//! Numbers do not depend on who comes when: ranks that pause at random before they call each other, and wait for each other's first
//! call as GPUs do, train as ever.

use serde_json::json;

use super::rank_tests::{assert_same_run, over, spread};
use super::world::{SQUARE, TALL, World, difference};

/// Whatever the seed of the pauses, and whatever is in flight meanwhile: the numbers of one rank, and bit by bit those of the same
/// mesh without pauses.
#[test]
fn pauses_change_no_number() {
    let world = World::new(&[(SQUARE, 5), (TALL, 4)]);
    let over = |local: u64| {
        let mut over = over(local);
        over["step_scheduler"] =
            json!({"global_batch_size": 5, "local_batch_size": local, "max_steps": 3, "ckpt_every_steps": 100});
        over
    };
    world.run("one", over(5)).unwrap();
    let last = world.checkpoints("one").pop().unwrap();
    let fsdp = |keys| spread(&over(1), "fsdp", keys);
    for (ranks, name, over) in [
        (2, "copies", spread(&over(1), "ddp", json!({}))),
        (2, "parts", fsdp(json!({"activation_checkpointing": false, "fsdp2_backward_prefetch_depth": 3}))),
        (4, "copies of parts", fsdp(json!({"dp_replicate_size": 2, "defer_fsdp_grad_sync": false}))),
        (2, "features", fsdp(json!({"tp_size": 2}))),
        (4, "tokens", fsdp(json!({"cp_size": 4, "cp_ring_degree": 2}))),
        (3, "a ring", fsdp(json!({"cp_size": 3, "cp_ring_degree": 3}))),
        (3, "stages", fsdp(json!({"pp_size": 3}))),
        (2, "runs of stages", fsdp(json!({"pp_size": 2, "pp_virtual_stages": 2}))),
        (4, "stages of parts", fsdp(json!({"pp_size": 2}))),
    ] {
        world.run_ranks(name, ranks, &over).unwrap();
        for seed in 1..=3 {
            let paused = format!("{name}, pauses {seed}");
            world.run_delayed(&paused, ranks, seed, &over).unwrap();
            assert_same_run(&world, "one", &paused, &last);
            let file = format!("{last}/training_state/weights.safetensors");
            assert_eq!(difference(&world.tensors(name, &file), &world.tensors(&paused, &file)), 0.0, "{paused}");
        }
    }
}

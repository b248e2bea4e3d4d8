//! `fsdp`, `ddp`, `performance` and the other blocks about *how* a run is done: none of them moves a number.

use serde_json::{Value, json};
use spec::Problem;

use super::reader::{Block, Report};

/// Reads the parallel blocks of `root`; whether activations are computed again in the backward pass.
pub(crate) fn activation_checkpointing(root: &mut Block<'_>) -> bool {
    let (fsdp, ddp) = (root.block("fsdp"), root.block("ddp"));
    if fsdp.is_some() && ddp.is_some() {
        root.problem("ddp", Problem::new("`fsdp` and `ddp` exclude each other").help("remove one of the two blocks"));
    }
    let recompute = fsdp.map(sharded);
    ddp.map(replicated).or(recompute).unwrap_or(false)
}

fn sharded(mut block: Block<'_>) -> bool {
    // The peer's default for this key, if the block is there at all, is true.
    let recompute = recompute(&mut block).unwrap_or(true);
    let one = &[json!(1)];
    block.without_effect("dp_size", one, "one device here; the global batch is reached by accumulation");
    for key in ["dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size", "cp_ring_degree", "cp_ulysses_degree"]
    {
        block.without_effect(key, one, "one device here");
    }
    block.without_effect("cpu_offload", &[json!(false)], "weights stay on the device");
    block.without_effect("reduce_dtype", &[json!("float32")], "gradients are summed in float32");
    block.without_effect("enable_compile", &[json!(false)], "blocks run as they are; there is no compiler");
    for key in [
        "defer_fsdp_grad_sync",
        "enable_fsdp2_prefetch",
        "fsdp2_backward_prefetch_depth",
        "fsdp2_forward_prefetch_depth",
        "reshard_after_forward",
        "use_hf_tp_plan",
        "backend",
        "sequence_parallel",
        "tp_plan",
        "mp_policy",
        "offload_policy",
        "autocast_dtype",
        "enable_async_tensor_parallel",
        "patch_is_packed_sequence",
        "multimodal",
    ] {
        block.without_effect(key, &[json!(false)], "nothing is sharded on one device");
    }
    block.finish();
    recompute
}

fn replicated(mut block: Block<'_>) -> bool {
    let recompute = recompute(&mut block).unwrap_or(false);
    for key in [
        "backend",
        "find_unused_parameters",
        "static_graph",
        "bucket_cap_mb",
        "gradient_as_bucket_view",
        "broadcast_buffers",
        "autocast_dtype",
        "dp_size",
    ] {
        block.without_effect(key, &[json!(false), json!(1)], "nothing is replicated on one device");
    }
    block.finish();
    recompute
}

fn recompute(block: &mut Block<'_>) -> Option<bool> {
    block.without_effect("activation_checkpointing_scope", &[json!("all")], "every block is one region");
    let value = block.take("activation_checkpointing")?;
    match value {
        Value::Bool(on) => Some(on),
        Value::String(mode) if mode == "full" => Some(true),
        Value::String(mode) if mode == "selective" => {
            block.note("activation_checkpointing", "`selective`: whole blocks are computed again, as for `true`");
            Some(true)
        }
        other => {
            let message = format!("`{}` is {other}", block.path("activation_checkpointing"));
            block.problem(
                "activation_checkpointing",
                Problem::new(message).help("`true`, `false`, `full` or `selective`"),
            );
            None
        }
    }
}

/// Answers the blocks that are about logging, launching and the peer's own tests.
pub(crate) fn bystanders(root: &mut Block<'_>, report: &Report) {
    if let Some(mut performance) = root.block("performance") {
        performance.without_effect("check_loss", &[json!(true)], "every loss and gradient norm is checked, always");
        performance.without_effect(
            "grad_clip_foreach",
            &[json!(true), json!(false)],
            "the norm is taken over all tensors at once",
        );
        performance.finish();
    }
    let answers = [
        ("wandb", "metrics go to the `steps` and `losses` tables and to the events of `--json`"),
        ("mlflow", "metrics go to the `steps` and `losses` tables and to the events of `--json`"),
        ("comet", "metrics go to the `steps` and `losses` tables and to the events of `--json`"),
        ("dist_env", "one device here: no process group is made"),
        ("profiling", "use `nsys` or `perf` on the stage program"),
        ("ci", "belongs to the peer's own tests"),
        ("slurm", "start `pipeline run` in a job script"),
        ("skypilot", "start `pipeline run` on the machine"),
        ("nemo_run", "start `pipeline run` on the machine"),
    ];
    for (key, why) in answers {
        if let Some(mut block) = root.block(key) {
            let values = block.rest();
            let off = ["enable", "enabled"].iter().any(|switch| values.get(*switch) == Some(&json!(false)));
            if !off && !values.is_empty() {
                report.note(format!("{key}: {why}"));
            }
        }
    }
    root.without_effect("recipe", &[json!("TrainDiffusionRecipe")], "the stage program is the recipe");
}

//! `fsdp`, `ddp`, `performance` and the other blocks about *how* a run is done: none of them moves a number.

use std::time::Duration;

use serde_json::{Value, json};
use spec::mesh::Asked;
use spec::{Mesh, Problem};

use super::reader::{Block, Report};

/// How a run is spread over ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Distributed {
    pub(crate) recompute: bool,
    asked: Asked,
    /// The block that asks for it.
    block: Option<&'static str>,
    /// Longest wait for another rank.
    pub(crate) timeout: Duration,
}

/// The peer's default is one minute, which its own recipes raise; see `dist_env.timeout_minutes`.
const TIMEOUT_MINUTES: f64 = 10.0;

impl Distributed {
    /// Reads `fsdp`, `ddp` and `dist_env` of `root`.
    pub(crate) fn read(root: &mut Block<'_>) -> Self {
        let (fsdp, ddp) = (root.block("fsdp"), root.block("ddp"));
        if fsdp.is_some() && ddp.is_some() {
            root.problem(
                "ddp",
                Problem::new("`fsdp` and `ddp` exclude each other").help("remove one of the two blocks"),
            );
        }
        let minutes = root.block("dist_env").and_then(environment).unwrap_or(TIMEOUT_MINUTES);
        let timeout = Duration::from_secs_f64(minutes * 60.0);
        let none = Asked { cp: 1, tp: 1, pp: 1, ep: 1, ..Asked::default() };
        let (block, (recompute, asked)) = match (ddp, fsdp) {
            (Some(ddp), _) => (Some("ddp"), replicated(ddp, none)),
            (None, Some(fsdp)) => (Some("fsdp"), sharded(fsdp)),
            (None, None) => (None, (false, none)),
        };
        Self { recompute, asked, block, timeout }
    }

    /// The mesh on `ranks` ranks; a mistake's field is a dotted path of the training recipe.
    pub(crate) fn mesh(&self, ranks: usize) -> Result<Mesh, Problem> {
        let block = self.block.unwrap_or("ddp");
        let at = |key: &str, problem: Problem| {
            let message = format!("`{block}`: {}", problem.message);
            Problem { message, ..problem }.field(format!("{block}.{key}"))
        };
        if self.asked.ep > 1 {
            let message = format!("ep_size {}: no model here has experts to spread", self.asked.ep);
            return Err(at("ep_size", Problem::new(message).help("set it to 1: the numbers are the same")));
        }
        if ranks == 1 {
            return Ok(Mesh::alone());
        }
        let mesh = Mesh::of(&self.asked, ranks).map_err(|problem| {
            let key = problem.field.clone().unwrap_or_default();
            at(&key, problem)
        })?;
        Ok(mesh)
    }

    /// What a run on `ranks` ranks does not do as the training recipe says.
    pub(crate) fn remarks(&self, ranks: usize) -> Vec<String> {
        let Asked { dp, dp_replicate, tp, cp, pp, .. } = self.asked;
        let batch = "the global batch is reached by accumulation";
        let whole = "it runs the whole model, and the numbers are the same";
        let degrees = [
            ("dp_size", dp, batch),
            ("dp_replicate_size", dp_replicate, batch),
            ("tp_size", Some(tp), whole),
            ("cp_size", Some(cp), whole),
            ("pp_size", Some(pp), whole),
        ];
        let wide = degrees.into_iter().filter_map(|(key, degree, so)| Some((key, degree.filter(|n| *n > 1)?, so)));
        let block = self.block.unwrap_or("fsdp");
        let remark = |(key, degree, so)| format!("{block}.{key}: {degree}: one rank here (`--ranks`); {so}");
        wide.filter(|_| ranks == 1).map(remark).collect()
    }
}

fn sharded(mut block: Block<'_>) -> (bool, Asked) {
    // The peer's default for this key, if the block is there at all, is true.
    let recompute = recompute(&mut block).unwrap_or(true);
    let mut degree = |key| block.positive(key).map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let (dp, dp_replicate) = (degree("dp_size"), degree("dp_replicate_size"));
    let [cp, tp, pp, ep] = ["cp_size", "tp_size", "pp_size", "ep_size"].map(|key| degree(key).unwrap_or(1));
    let (cp_ring, cp_ulysses) = (degree("cp_ring_degree"), degree("cp_ulysses_degree"));
    let asked = Asked { dp, dp_replicate, cp, cp_ring, cp_ulysses, tp, pp, ep, sharded: true };
    block.without_effect(
        "defer_fsdp_grad_sync",
        &[json!(false)],
        "gradients go to their shards after each micro-batch",
    );
    block.without_effect("reshard_after_forward", &[json!(true)], "a block's parameters are given up after each use");
    block.without_effect("enable_fsdp2_prefetch", &[json!(true)], "the next block is always gathered ahead");
    for key in ["fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"] {
        block.without_effect(key, &[json!(1)], "one block is gathered ahead");
    }
    block.without_effect("cpu_offload", &[json!(false)], "weights stay on the device");
    block.without_effect("reduce_dtype", &[json!("float32")], "gradients are summed in float32");
    block.without_effect("enable_compile", &[json!(false)], "blocks run as they are; there is no compiler");
    for key in [
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
        block.without_effect(key, &[json!(false)], "has no counterpart");
    }
    block.finish();
    (recompute, asked)
}

fn replicated(mut block: Block<'_>, none: Asked) -> (bool, Asked) {
    let recompute = recompute(&mut block).unwrap_or(false);
    let dp = block.positive("dp_size").map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    block.without_effect("find_unused_parameters", &[json!(false)], "unused parameters are always found");
    block.without_effect("bucket_cap_mb", &[json!(25)], "gradients are added up in buckets of 25 MiB");
    block.without_effect("gradient_as_bucket_view", &[json!(true)], "gradients are views of their buckets");
    for key in ["backend", "static_graph", "broadcast_buffers", "autocast_dtype"] {
        block.without_effect(key, &[json!(false)], "has no counterpart");
    }
    block.finish();
    (recompute, Asked { dp, ..none })
}

/// `dist_env`: the longest wait, in minutes.
fn environment(mut block: Block<'_>) -> Option<f64> {
    let minutes = block.number("timeout_minutes");
    if let Some(minutes) = minutes.filter(|minutes| !(*minutes > 0.0 && *minutes < 1e6)) {
        let message = format!("`dist_env.timeout_minutes` is {minutes}, expected a number of minutes above 0");
        block.problem("timeout_minutes", Problem::new(message));
        return None;
    }
    block.without_effect("backend", &[json!("gloo")], "Gloo between CPUs");
    block.without_effect("init_method", &[json!("env://")], "ranks meet as their environment says");
    block.rest();
    minutes
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

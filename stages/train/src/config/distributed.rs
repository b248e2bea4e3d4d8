//! `fsdp`, `ddp`, `performance` and the other blocks about *how* a run is done: none of them moves a number, but for the kind in
//! which ranks add up gradients.

use std::time::Duration;

use nn::{Dtype, Recompute};
use parallel::Options;
use serde::Serialize;
use serde_json::{Value, json};
use spec::mesh::Asked;
use spec::{Mesh, Problem};

use super::model::dtype;
use super::reader::{Block, Report};

/// How a run is spread over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Distributed {
    #[serde(skip)]
    pub(crate) recompute: Recompute,
    /// Whether weights in parts, their gradients and optimizer state lie in host memory.
    #[serde(skip)]
    pub(crate) cpu_offload: bool,
    #[serde(skip)]
    asked: Asked,
    /// Runs of blocks of each rank of a pipeline.
    #[serde(skip)]
    pub(crate) chunks: usize,
    #[serde(skip)]
    options: Options,
    /// Kind in which gradients are added up between ranks. bfloat16 rounds by more than another order of sums does.
    reduce_dtype: Dtype,
    /// The block that asks for it.
    #[serde(skip)]
    block: Option<&'static str>,
    /// Longest wait for another rank.
    #[serde(skip)]
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
        let (mut chunks, usual) = (1, (Options::default(), Dtype::Float32));
        let (block, (recompute, cpu_offload, asked), (options, reduce_dtype)) = match (ddp, fsdp) {
            (Some(ddp), _) => (Some("ddp"), replicated(ddp, none), usual),
            (None, Some(mut fsdp)) => {
                chunks = fsdp.positive("pp_virtual_stages").map_or(1, |n| usize::try_from(n).unwrap_or(usize::MAX));
                let options = options(&mut fsdp);
                (Some("fsdp"), sharded(fsdp), options)
            }
            (None, None) => (None, (Recompute::default(), false, none), usual),
        };
        Self { recompute, cpu_offload, asked, chunks, options, reduce_dtype, block, timeout }
    }

    /// When parameters and gradients travel between ranks, and in what kind.
    pub(crate) fn options(&self) -> Options {
        Options { reduce: self.reduce_dtype.into(), ..self.options }
    }

    /// Whether another number of ranks gives these numbers up to the order of sums.
    pub(crate) fn moves_no_number(&self) -> bool {
        self.reduce_dtype == Dtype::Float32
    }

    /// Groups of ranks that the experts are asked to be shared among.
    pub(crate) fn experts(&self) -> usize {
        self.asked.ep
    }

    /// The mesh on `ranks` ranks; a mistake's field is a dotted path of the training recipe.
    pub(crate) fn mesh(&self, ranks: usize) -> Result<Mesh, Problem> {
        let block = self.block.unwrap_or("ddp");
        let at = |key: &str, problem: Problem| {
            let message = format!("`{block}`: {}", problem.message);
            Problem { message, ..problem }.field(format!("{block}.{key}"))
        };
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
        let Asked { dp, dp_replicate, tp, cp, pp, ep, .. } = self.asked;
        let batch = "the global batch is reached by accumulation";
        let whole = "it runs the whole model, and the numbers are the same";
        let degrees = [
            ("dp_size", dp, batch),
            ("dp_replicate_size", dp_replicate, batch),
            ("tp_size", Some(tp), whole),
            ("cp_size", Some(cp), whole),
            ("pp_size", Some(pp), whole),
            ("ep_size", Some(ep), "it holds all experts, and the numbers are the same"),
        ];
        let wide = degrees.into_iter().filter_map(|(key, degree, so)| Some((key, degree.filter(|n| *n > 1)?, so)));
        let block = self.block.unwrap_or("fsdp");
        let remark = |(key, degree, so)| format!("{block}.{key}: {degree}: one rank here (`--ranks`); {so}");
        let coarse = (!self.moves_no_number()).then(|| {
            format!("{block}.reduce_dtype: `bfloat16`: one rank here (`--ranks`); nothing is added up between ranks")
        });
        let idle = (self.chunks > 1 && (pp == 1 || ranks == 1))
            .then(|| format!("{block}.pp_virtual_stages: {}: there is no pipeline to interleave", self.chunks));
        wide.map(remark).chain(coarse).filter(|_| ranks == 1).chain(idle).collect()
    }
}

fn sharded(mut block: Block<'_>) -> (Recompute, bool, Asked) {
    // The peer's default for this key, if the block is there at all, is true.
    let recompute = recompute(&mut block, Recompute::ALL);
    let cpu_offload = block.flag("cpu_offload").unwrap_or(false);
    let mut degree = |key| block.positive(key).map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let (dp, dp_replicate) = (degree("dp_size"), degree("dp_replicate_size"));
    let [cp, tp, pp, ep] = ["cp_size", "tp_size", "pp_size", "ep_size"].map(|key| degree(key).unwrap_or(1));
    let (cp_ring, cp_ulysses) = (degree("cp_ring_degree"), degree("cp_ulysses_degree"));
    let asked = Asked { dp, dp_replicate, cp, cp_ring, cp_ulysses, tp, pp, ep, sharded: true };
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
    (recompute, cpu_offload, asked)
}

/// When parameters and gradients travel, and in what kind gradients do.
fn options(block: &mut Block<'_>) -> (Options, Dtype) {
    let usual = Options::default();
    let prefetch = block.flag("enable_fsdp2_prefetch").unwrap_or(true);
    let mut ahead = |key, usual| {
        let asked = block.count(key).map_or(usual, |depth| usize::try_from(depth).unwrap_or(usize::MAX));
        if prefetch { asked } else { 0 }
    };
    let options = Options {
        forward_ahead: ahead("fsdp2_forward_prefetch_depth", usual.forward_ahead),
        backward_ahead: ahead("fsdp2_backward_prefetch_depth", usual.backward_ahead),
        reshard: block.flag("reshard_after_forward").or(usual.reshard),
        defer: block.flag("defer_fsdp_grad_sync").unwrap_or(usual.defer),
        ..usual
    };
    (options, dtype(block, "reduce_dtype").unwrap_or(Dtype::Float32))
}

fn replicated(mut block: Block<'_>, none: Asked) -> (Recompute, bool, Asked) {
    let recompute = recompute(&mut block, Recompute::default());
    let dp = block.positive("dp_size").map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    block.without_effect("find_unused_parameters", &[json!(false)], "unused parameters are always found");
    block.without_effect("bucket_cap_mb", &[json!(25)], "gradients are added up in buckets of 25 MiB");
    block.without_effect("gradient_as_bucket_view", &[json!(true)], "gradients are views of their buckets");
    for key in ["backend", "static_graph", "broadcast_buffers", "autocast_dtype"] {
        block.without_effect(key, &[json!(false)], "has no counterpart");
    }
    block.finish();
    (recompute, false, Asked { dp, ..none })
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

/// `activation_checkpointing` (`usual` if it is not there): all blocks, none, every second one (`selective`) or one of so many; and
/// `activation_offload`.
fn recompute(block: &mut Block<'_>, usual: Recompute) -> Recompute {
    block.without_effect("activation_checkpointing_scope", &[json!("all")], "every block is one region");
    let every = match block.take("activation_checkpointing") {
        None => usual.every,
        Some(Value::Bool(on)) => usize::from(on),
        Some(Value::String(mode)) if mode == "full" => 1,
        Some(Value::String(mode)) if mode == "selective" => 2,
        Some(Value::Number(n)) if n.as_u64().is_some_and(|n| n > 0) => n.as_u64().unwrap_or(1) as usize,
        Some(other) => {
            let message = format!("`{}` is {other}", block.path("activation_checkpointing"));
            let help = "`true` or `full`: all blocks; `selective`: every second one; a number above 0: one of so many; `false`";
            block.problem("activation_checkpointing", Problem::new(message).help(help));
            usual.every
        }
    };
    let offload = block.flag("activation_offload").unwrap_or(false);
    if offload && every == 0 {
        block.note("activation_offload", "no block is computed again, so none has inputs that wait");
    }
    Recompute { every, offload }
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

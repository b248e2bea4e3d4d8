//! Law L1, parameter by parameter, over the real programs: a semantic one moves the key of exactly the stages that depend on
//! it, an operational one moves none. A parameter that a program describes and these tables lack fails the test.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::project::{draw_pictures, small, tiny_flux};
use crate::support::{Finished, Sandbox, finish, program};

/// A value, and what it is compared with.
struct Case {
    /// `stage.parameter`.
    field: &'static str,
    /// Set on both sides.
    beside: &'static [&'static str],
    /// Set on one side: `key=value` below the stage.
    value: &'static str,
    /// Stages whose key moves, when it is not the field's own stage alone.
    moves: Option<&'static [&'static str]>,
}

const fn case(field: &'static str, value: &'static str) -> Case {
    Case { field, beside: &[], value, moves: None }
}

impl Case {
    const fn beside(self, beside: &'static [&'static str]) -> Self {
        Self { beside, ..self }
    }

    const fn moves(self, stages: &'static [&'static str]) -> Self {
        Self { moves: Some(stages), ..self }
    }

    fn stage(&self) -> &str {
        self.field.split('.').next().expect("a stage")
    }

    fn parameter(&self) -> &str {
        self.field.split('.').nth(1).expect("a parameter")
    }
}

const SEMANTIC: &[Case] = &[
    case("ingest.dataset", "dataset=others"),
    case("ingest.caption_column", "caption_column=file_name"),
    case("ingest.image_column", "image_column=picture"),
    case("ingest.limit", "limit=5"),
    case("ingest.missing_caption", "missing_caption=empty"),
    case("ingest.split", "split=train"),
    // Wired: what `ingest` itself only draws with, `encode` computes with.
    case("ingest.background", "background=#000000").moves(&["encode"]),
    case("encode.background", "background=#000000"),
    case("encode.buckets", "buckets=[\"64x128\"]"),
    case("encode.dtype", "dtype=bfloat16"),
    case("encode.max_pixels", "max_pixels=16384"),
    case("encode.max_sequence_length", "max_sequence_length=8"),
    case("encode.posterior", "posterior=sample"),
    case("encode.quantum", "quantum=32"),
    case("encode.seed", "seed=1").beside(&["encode.posterior=sample"]),
    case("encode.upscale", "upscale=reject"),
    case("encode.vae_tiling", "vae_tiling=true"),
    case("bucket.batch_size", "batch_size=2"),
    case("bucket.remainder", "remainder=drop").beside(&["bucket.batch_size=2"]),
    case("bucket.shard_bytes", "shard_bytes=100000"),
    case("bucket.where", "where=width > 1"),
    case("train.checkpoint", "checkpoint.max_recent_checkpoints=1"),
    case("train.clip_grad_norm", "clip_grad_norm.max_norm=0.25"),
    case("train.config", "config=other.yaml"),
    case("train.data", "data.dataloader.shuffle=false"),
    case("train.ema", "ema.decay=0.9"),
    // The one key of its block that rounds numbers.
    case("train.fsdp", "fsdp.reduce_dtype=bfloat16"),
    case("train.flow_matching", "flow_matching.flow_shift=1.5"),
    case("train.lr_scheduler", "lr_scheduler.lr_warmup_steps=1"),
    case("train.optimizer", "optimizer.lr=0.002"),
    case("train.peft", "peft.dim=2"),
    case("train.samples", "samples.prompts=[\"a disc\"]"),
    case("train.seed", "seed=8"),
    case("train.step_scheduler", "step_scheduler.max_steps=5"),
    case("train.validation", "validation.count=2"),
    case("generate.checkpoint", "checkpoint=epoch_0_step_1"),
    case("generate.dtype", "dtype=bfloat16"),
    case("generate.guidance", "guidance=2.5"),
    case("generate.height", "height=64"),
    case("generate.images_per_prompt", "images_per_prompt=2"),
    case("generate.lora", "lora=LORA"),
    case("generate.lora_scale", "lora_scale=0.5").beside(&["generate.lora=LORA"]),
    case("generate.max_sequence_length", "max_sequence_length=8"),
    case("generate.negative_prompt", "negative_prompt=rain"),
    case("generate.palette", "palette=[\"#ff0000\"]"),
    case("generate.prompts", "prompts=[\"a square\"]"),
    case("generate.prompts_file", "prompts_file=more.txt"),
    case("generate.seed", "seed=4"),
    case("generate.steps", "steps=3"),
    case("generate.trigger", "trigger=a trtcrd of"),
    case("generate.true_cfg_scale", "true_cfg_scale=2.0").beside(&["generate.negative_prompt=rain"]),
    case("generate.vae_tiling", "vae_tiling=true"),
    case("generate.width", "width=128"),
    case("generate.with_base", "with_base=true"),
];

const OPERATIONAL: &[Case] = &[
    // Where a thing lies and what it is called is no part of what it is.
    case("ingest.dataset", "dataset=same"),
    case("encode.model", "model=MODEL"),
    case("train.base_model", "base_model=MODEL"),
    case("generate.model", "model=MODEL"),
    case("ingest.dump", "dump=seen"),
    case("encode.batch_size", "batch_size=3"),
    case("encode.text_batch_size", "text_batch_size=3"),
    case("train.comet", "comet.project=x"),
    case("train.ddp", "ddp={}"),
    case("train.dist_env", "dist_env.timeout_minutes=7"),
    case("train.fsdp", "fsdp.activation_checkpointing=true"),
    case("train.fsdp", "fsdp.reshard_after_forward=false"),
    case("train.fsdp", "fsdp.defer_fsdp_grad_sync=false"),
    case("train.fsdp", "fsdp.fsdp2_backward_prefetch_depth=0"),
    case("train.mlflow", "mlflow.experiment_name=x"),
    case("train.performance", "performance.check_loss=false"),
    case("train.profiling", "profiling.enabled=false"),
    case("train.wandb", "wandb.project=x"),
    case("generate.batch_size", "batch_size=3"),
];

/// Parameters that have no place in a recipe of pictures in a folder, and who holds them against their keys instead.
const ELSEWHERE: &[&str] = &[
    "ingest.config",       // of the Hub only: tests of `ingest::parameters`
    "ingest.revision",     // of the Hub only: moves the commit, so the source's identity
    "encode.frame_rule",   // of clips only
    "encode.max_frames",   // of clips only
    "encode.frames",       // of clips only: tests of `encode::parameters`
    "generate.frames",     // of clips only
    "generate.fps",        // of clips only
    "generate.frame_pngs", // of clips only
    "generate.guidance_2", // of two denoisers only: tests of `generate`
    "train.model",         // another way to write `base_model`
    "train.optim",         // the old name of `optimizer`
];

/// The small project, run once, with a second data set, a model and files that the tables name.
fn world() -> Sandbox {
    let sandbox = small();
    draw_pictures(&sandbox.path("same"), 12);
    draw_pictures(&sandbox.path("others"), 11);
    sandbox.write("more.txt", "a triangle\n");
    sandbox.write("other.yaml", "seed: 11\noptimizer:\n  weight_decay: 0.5\n");
    let copied = std::process::Command::new("cp").arg("-rL").arg(tiny_flux()).arg(sandbox.path("model")).status();
    assert!(copied.expect("cp").success());
    sandbox.pipeline(&["run", "small.toml"]).expect(0);
    sandbox
}

/// Stage → key, `None` for one that waits.
fn keys(sandbox: &Sandbox, sets: &[String]) -> BTreeMap<String, Option<String>> {
    let mut args = vec!["plan".to_owned(), "small.toml".to_owned(), "--json".to_owned()];
    args.extend(sets.iter().flat_map(|set| ["--set".to_owned(), set.clone()]));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let Finished { code, stdout, stderr } = sandbox.pipeline(&args);
    assert_eq!(code, Some(0), "{sets:?}\n{stdout}{stderr}");
    let plan: Value = serde_json::from_str(&stdout).expect("JSON");
    let stages = plan["stages"].as_array().expect("stages").iter();
    stages.map(|s| (s["stage"].as_str().expect("a name").to_owned(), s["key"].as_str().map(str::to_owned))).collect()
}

fn sets(sandbox: &Sandbox, case: &Case) -> (Vec<String>, Vec<String>) {
    let filled = |text: &str| {
        let path = |name: &str| sandbox.path(name).display().to_string();
        let lora = tiny_flux().join("lora_peft").display().to_string();
        text.replace("MODEL", &path("model")).replace("LORA", &lora)
    };
    let base: Vec<String> = case.beside.iter().map(|set| filled(set)).collect();
    let changed = base.iter().cloned().chain([format!("{}.{}", case.stage(), filled(case.value))]).collect();
    (base, changed)
}

/// Stages whose keys differ; those that wait are not known to.
fn moved(sandbox: &Sandbox, case: &Case) -> (BTreeSet<String>, BTreeSet<String>) {
    let (base, changed) = sets(sandbox, case);
    let (before, after) = (keys(sandbox, &base), keys(sandbox, &changed));
    let of = |differs: fn(&Option<String>, &Option<String>) -> bool| -> BTreeSet<String> {
        before.iter().filter(|(stage, key)| differs(key, &after[*stage])).map(|(stage, _)| stage.clone()).collect()
    };
    (of(|a, b| b.is_some() && a.is_some() && a != b), of(|a, b| a.is_some() && b.is_none()))
}

#[test]
fn each_semantic_parameter_moves_exactly_what_depends_on_it_and_no_operational_one_moves_any() {
    let sandbox = world();
    // What comes after a stage, in the graph of `pipeline.toml`.
    let after: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("ingest", &["encode", "bucket", "train", "generate"][..]),
        ("encode", &["bucket", "train", "generate"]),
        ("bucket", &["train", "generate"]),
        ("train", &["generate"]),
        ("generate", &[]),
    ]);
    for case in SEMANTIC {
        let (moved, waits) = moved(&sandbox, case);
        let own = [case.stage()];
        let expected: BTreeSet<String> = case.moves.unwrap_or(&own).iter().map(|stage| (*stage).to_owned()).collect();
        assert_eq!(moved, expected, "{} with {}", case.field, case.value);
        let below: BTreeSet<&str> = expected.iter().flat_map(|stage| after[stage.as_str()]).copied().collect();
        assert!(waits.iter().all(|stage| below.contains(stage.as_str())), "{}: {waits:?}", case.field);
        // Below one that is otherwise cached, all wait: what comes out is not known yet.
        assert!(!case.beside.is_empty() || waits.len() == below.len(), "{}: {waits:?}", case.field);
    }
    for case in OPERATIONAL {
        let (moved, waits) = moved(&sandbox, case);
        assert_eq!((moved, waits), Default::default(), "{} with {}", case.field, case.value);
    }
    // The runner's own.
    let cached = keys(&sandbox, &[]);
    for set in ["threads=1", "train.threads=2", "encode.device=cpu", "train.ranks=2"] {
        assert_eq!(keys(&sandbox, &[set.to_owned()]), cached, "{set}");
    }
    // What moved is told with its place, in the file that the recipe names, too.
    let explain = |set: &str| sandbox.pipeline(&["explain", "small.toml", "train", "--set", set]);
    let told = explain("train.config=other.yaml").expect(0);
    told.says(&["`optimizer.weight_decay` changed 0.01 → 0.5 (other.yaml:3)"]);
    explain("train.seed=8").expect(0).says(&["`seed` changed 7 → 8 (--set)"]);
}

/// Texts are drawn from as they were trained with: where `[generate]` names no length, that of `[encode]` holds, with its key.
#[test]
fn texts_to_draw_are_as_long_as_those_that_were_encoded() {
    let sandbox = small();
    // Without `[train]` nothing that `generate` reads must run first, so its key is known.
    let whole = fs_err::read_to_string(sandbox.path("small.toml")).expect("the recipe");
    let table = |name: &str| {
        let table = whole.split("\n\n").find(|table| table.starts_with(&format!("[{name}]")));
        table.unwrap_or_else(|| panic!("{whole}")).to_owned()
    };
    let generate = table("generate").replace("max_sequence_length = 16\n", "");
    let key = |encode: &str, sets: &[&str]| {
        let recipe = ["name = \"small\"", &table("ingest"), encode, &generate].join("\n\n");
        sandbox.write("small.toml", &recipe);
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        keys(&sandbox, &sets)["generate"].clone().expect("a key")
    };
    let encode = table("encode");
    let followed = key(&encode, &[]);
    assert_eq!(followed, key(&encode, &["generate.max_sequence_length=16"]));
    assert_eq!(key(&encode, &["encode.max_sequence_length=8"]), key(&encode, &["generate.max_sequence_length=8"]));
    assert_ne!(followed, key(&encode, &["generate.max_sequence_length=8"]));
    // Neither says anything: both have the same default.
    let silent = encode.replace("max_sequence_length = 16", "");
    assert_eq!(key(&silent, &[]), key(&silent, &["generate.max_sequence_length=512"]));
}

#[test]
fn every_parameter_of_every_stage_is_in_the_tables() {
    let named = |table: &[Case]| -> BTreeSet<String> {
        table.iter().map(|case| format!("{}.{}", case.stage(), case.parameter())).collect()
    };
    let (semantic, operational) = (named(SEMANTIC), named(OPERATIONAL));
    for stage in ["ingest", "encode", "bucket", "train", "generate"] {
        let said = finish(std::process::Command::new(program(&format!("pipeline-{stage}"))).arg("describe")).expect(0);
        let description: Value = serde_json::from_str(&said.stdout).expect("JSON");
        let fields = |part: &str| -> Vec<String> {
            let properties = description[part]["properties"].as_object();
            properties.into_iter().flatten().map(|(name, _)| format!("{stage}.{name}")).collect()
        };
        for field in fields("parameters") {
            let by_location =
                ["dataset", "model", "base_model"].iter().any(|name| field.ends_with(&format!(".{name}")));
            let is_known = semantic.contains(&field) || by_location && operational.contains(&field);
            assert!(is_known || ELSEWHERE.contains(&field.as_str()), "semantic `{field}` is in no table");
        }
        for field in fields("settings") {
            let is_wired = field == "ingest.background";
            assert!(operational.contains(&field) || is_wired, "operational `{field}` is in no table");
        }
    }
}

//! What the schema promises: published files are accepted, every key is answered, mistakes have a place.

use serde_json::{Value, json};

use super::*;

/// Settings of the peer's published files, old and new schema, as a user would bring them.
const OLD_SCHEMA: &str = r#"
model:
  pretrained_model_name_or_path: "black-forest-labs/FLUX.1-dev"
  mode: "finetune"
  cache_dir: null
  attention_backend: "flash"
optim:
  learning_rate: 3e-5
  optimizer:
    weight_decay: 0.02
    betas: [0.9, 0.98]
    fused: true
step_scheduler:
  log_every: 1
  global_batch_size: 16
  local_batch_size: 2
flow_matching:
  adapter_type: "flux"
dist_env:
  backend: "nccl"
  init_method: "env://"
ci:
  recipe_owner: someone
"#;

fn table(json: Value) -> Map<String, Value> {
    let Value::Object(table) = json else { panic!("{json}") };
    table
}

fn loaded(yaml: &str, over: Value) -> Loaded {
    let dir = tempfile::tempdir().unwrap();
    fs_err::write(dir.path().join("x.yaml"), yaml).unwrap();
    load(Some("x.yaml"), table(over), dir.path()).unwrap()
}

fn recipes() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes")
}

#[test]
fn the_published_files_of_wan_are_accepted() {
    for file in ["wan2_1_t2v_flow.yaml", "wan2_1_t2v_flow_lora.yaml", "wan2_2_t2v_flow.yaml"] {
        let loaded = load(Some(file), Map::new(), &recipes()).unwrap();
        assert_eq!(loaded.problems, [], "{file}");
        let (config, lora) = (loaded.config, file.contains("lora"));
        let flow = config.flow_matching;
        assert_eq!((flow.timestep_sampling, flow.flow_shift, flow.mix_uniform_ratio), ("uniform", 3.0, 0.1));
        assert_eq!((flow.loss_weighting, flow.cfg_dropout_prob, flow.family), (Some("linear"), 0.0, None));
        assert_eq!((config.optimizer.lr, config.optimizer.weight_decay), (5e-6, 0.01));
        let batches = (config.step_scheduler.local_batch_size, config.step_scheduler.global_batch_size);
        assert_eq!(batches, if lora { (2, 16) } else { (1, 8) });
        let peft = config.peft.map(|peft| (peft.dim, peft.alpha, peft.target_modules));
        assert_eq!(peft, lora.then(|| (64, 64.0, vec!["to_q".to_owned(), "to_v".to_owned()])));
    }
    let asked =
        load(Some("wan2_1_t2v_flow.yaml"), table(json!({"flow_matching": {"cfg_dropout_prob": 0.2}})), &recipes());
    assert_eq!(asked.unwrap().config.flow_matching.cfg_dropout_prob, 0.2);
}

#[test]
fn our_copies_of_the_published_files_are_accepted() {
    for file in ["flux_t2i_flow.yaml", "flux_t2i_flow_lora.yaml"] {
        let loaded = load(Some(file), Map::new(), &recipes()).unwrap();
        assert_eq!(loaded.problems, [], "{file}");
        let config = loaded.config;
        assert_eq!(
            (config.seed, config.flow_matching.flow_shift, config.flow_matching.loss_weighting),
            (42, 1.0, None)
        );
        assert_eq!((config.flow_matching.cfg_dropout_prob, config.flow_matching.guidance_scale), (0.1, 1.0));
        assert_eq!((config.optimizer.lr, config.clip_grad_norm), (2e-5, Some(1.0)));
        assert_eq!(config.peft.is_some(), file.contains("lora"));
        assert_eq!(config.distributed.recompute, nn::Recompute::default());
    }
}

#[test]
fn no_file_means_our_copy_of_the_published_full_fine_tune() {
    let none = load(None, Map::new(), Path::new("/nowhere")).unwrap();
    let file = load(Some("flux_t2i_flow.yaml"), Map::new(), &recipes()).unwrap();
    assert_eq!(none.config, file.config);
    assert_eq!((none.config.step_scheduler.global_batch_size, none.config.step_scheduler.local_batch_size), (32, 4));
}

#[test]
fn keys_without_effect_are_answered_in_one_line_each() {
    let notes = load(Some("flux_t2i_flow.yaml"), Map::new(), &recipes()).unwrap().notes;
    for key in ["model.transformer_engine_fp8:", "model.attention_backend:"] {
        assert_eq!(notes.iter().filter(|note| note.starts_with(key)).count(), 1, "{key} in {notes:#?}");
    }
    assert!(notes.iter().all(|note| !note.contains('\n')));
    // Without a file, only what the table says is answered.
    let table = json!({"model": {"attention_backend": "flash"}}).as_object().cloned().unwrap();
    let notes = load(None, table, Path::new("/nowhere")).unwrap().notes;
    assert!(notes.iter().any(|note| note.starts_with("model.attention_backend:")), "{notes:#?}");
    assert!(!notes.iter().any(|note| note.contains("transformer_engine")), "{notes:#?}");
}

#[test]
fn the_old_schema_is_read_with_a_note_each() {
    let loaded = loaded(OLD_SCHEMA, json!({}));
    assert_eq!(loaded.problems, []);
    assert_eq!(
        loaded.config.optimizer,
        Optimizer { lr: 3e-5, weight_decay: 0.02, betas: (0.9, 0.98), eps: 1e-8, state: State::default() }
    );
    for key in ["optim.learning_rate", "optim.optimizer", "step_scheduler.log_every", "ci"] {
        assert!(loaded.notes.iter().any(|note| note.starts_with(key)), "{key}");
    }
    // Absent keys take the peer's class defaults.
    assert_eq!(
        (loaded.config.flow_matching.flow_shift, loaded.config.flow_matching.loss_weighting),
        (3.0, Some("linear"))
    );
}

/// None of these moves a number.
#[test]
fn activations_are_kept_computed_again_or_sent_away_as_asked() {
    let usual = serde_json::to_value(load(None, Map::new(), Path::new("/")).unwrap().config).unwrap();
    for (fsdp, every, offload) in [
        (json!({"activation_checkpointing": false}), 0, false),
        (json!({"activation_checkpointing": true}), 1, false),
        (json!({"activation_checkpointing": "full", "activation_offload": true}), 1, true),
        (json!({"activation_checkpointing": "selective"}), 2, false),
        (json!({"activation_checkpointing": 3}), 3, false),
    ] {
        let loaded = load(None, table(json!({"fsdp": fsdp})), Path::new("/")).unwrap();
        assert_eq!(loaded.problems, [], "{fsdp}");
        assert_eq!(loaded.config.distributed.recompute, nn::Recompute { every, offload }, "{fsdp}");
        assert_eq!(serde_json::to_value(loaded.config).unwrap(), usual);
    }
    let wrong = load(None, table(json!({"fsdp": {"activation_checkpointing": "some"}})), Path::new("/")).unwrap();
    assert_eq!(wrong.problems[0].message, "`fsdp.activation_checkpointing` is \"some\"");
    let idle = table(json!({"fsdp": {"activation_checkpointing": false, "activation_offload": true}}));
    let idle = load(None, idle, Path::new("/")).unwrap();
    assert!(idle.notes.iter().any(|note| note.starts_with("fsdp.activation_offload: no block")), "{:?}", idle.notes);
    let away = load(None, table(json!({"fsdp": {"cpu_offload": true}})), Path::new("/")).unwrap();
    assert!(away.config.distributed.cpu_offload && away.notes.iter().all(|note| !note.contains("cpu_offload")));
}

/// What users of torch, Transformer Engine and bitsandbytes write about optimizer state; it moves numbers, so it is in the key,
/// but for what was always so.
#[test]
fn optimizer_state_is_kept_as_asked() {
    use nn::optim::Keeping::{BFloat16, EightBit, Float32};
    let usual = serde_json::to_value(load(None, Map::new(), Path::new("/")).unwrap().config).unwrap();
    assert_eq!(usual["optimizer"].get("state"), None);
    for (optimizer, exp_avg, exp_avg_sq) in [
        (json!({}), Float32, Float32),
        (json!({"state_dtype": "bfloat16"}), BFloat16, BFloat16),
        (json!({"state_dtype": "8bit"}), EightBit, EightBit),
        (json!({"exp_avg_dtype": "torch.bfloat16"}), BFloat16, Float32),
        (json!({"state_dtype": "8bit", "exp_avg_sq_dtype": "float32"}), EightBit, Float32),
        (json!({"_target_": "bitsandbytes.optim.AdamW8bit", "min_8bit_size": 4096}), EightBit, EightBit),
        (json!({"_target_": "bitsandbytes.optim.AdamW", "optim_bits": 8}), EightBit, EightBit),
        (json!({"exp_avg_dtype": "torch.float16"}), Float32, Float32),
    ] {
        let loaded = load(None, table(json!({"optimizer": optimizer})), Path::new("/")).unwrap();
        assert_eq!(loaded.problems, [], "{optimizer}");
        assert_eq!(loaded.config.optimizer.state, State { exp_avg, exp_avg_sq }, "{optimizer}");
        let key = serde_json::to_value(loaded.config).unwrap();
        assert_eq!(key == usual, (exp_avg, exp_avg_sq) == (Float32, Float32), "{optimizer}");
    }
    let problems = load(None, table(json!({"optimizer": {"state_dtype": "float8"}})), Path::new("/")).unwrap().problems;
    assert_eq!(problems[0].message, "`optimizer.state_dtype` is \"float8\", which no state is kept in");
}

/// What is left out is the peer's default, and `null` is what is written.
#[test]
fn what_is_left_out_is_as_the_peer_has_it() {
    let flow = |yaml: &str| loaded(yaml, json!({})).config.flow_matching.cfg_dropout_prob;
    assert_eq!(flow("seed: 1\n"), 0.0, "`simple` drops no captions");
    assert_eq!(flow("flow_matching: {adapter_type: simple}\n"), 0.0);
    assert_eq!(flow("flow_matching: {adapter_type: flux}\n"), 0.1);
    let every = |yaml: &str| loaded(yaml, json!({})).config.step_scheduler.ckpt_every_steps;
    assert_eq!(every("seed: 1\n"), Some(100));
    assert_eq!(every("step_scheduler: {ckpt_every_steps: null}\n"), None, "at the end of each epoch");
}

#[test]
fn the_recipes_table_overrides_the_file() {
    let over = json!({"seed": 7, "optimizer": {"lr": 1e-3}, "model": {"pretrained_model_name_or_path": "here"}});
    let config = loaded(OLD_SCHEMA, over).config;
    assert_eq!((config.seed, config.optimizer.lr, config.optimizer.weight_decay), (7, 1e-3, 0.02));
    assert_eq!(config.model.name, "here");
}

#[test]
fn an_unknown_key_is_a_mistake_with_file_line_and_suggestion() {
    let problems = loaded(&OLD_SCHEMA.replace("global_batch_size", "globl_batch_size"), json!({})).problems;
    let [problem] = problems.as_slice() else { panic!("{problems:?}") };
    assert_eq!(problem.message, "unknown key `globl_batch_size` in `step_scheduler`");
    assert_eq!(problem.help.as_deref(), Some("did you mean `global_batch_size`?"));
    assert!(problem.file.as_ref().is_some_and(|file| file.ends_with("x.yaml")));
    assert_eq!(problem.line, Some(15));
    // The same mistake in the recipe's own table is placed by field.
    let problems = loaded(OLD_SCHEMA, json!({"step_scheduler": {"globl_batch_size": 8}})).problems;
    assert_eq!(problems[0].field.as_deref(), Some("step_scheduler.globl_batch_size"));
}

#[test]
fn mistakes_are_all_found_at_once() {
    let over = json!({
        "optimizer": {"lr": "fast", "_target_": "dion.Muon"},
        "flow_matching": {"timestep_sampling": "logitnormal", "sigma_min": 0.9, "sigma_max": 0.8},
        "step_scheduler": {"global_batch_size": 10, "local_batch_size": 4},
        "lr_scheduler": {"lr_decay_style": "cosin", "lr_warmup_steps": 0.1},
        "data": {"dataloader": {"dynamic_batch_size": true}},
        "fsdp": {}, "ddp": {},
    });
    let fields: Vec<_> = loaded(OLD_SCHEMA, over).problems.into_iter().filter_map(|problem| problem.field).collect();
    for field in [
        "optimizer.lr",
        "optimizer._target_",
        "flow_matching.timestep_sampling",
        "flow_matching.sigma_max",
        "step_scheduler.global_batch_size",
        "lr_scheduler.lr_decay_style",
        "lr_scheduler.lr_warmup_steps",
        "data.dataloader.dynamic_batch_size",
        "ddp",
    ] {
        assert!(fields.iter().any(|f| f == field), "{field} in {fields:?}");
    }
}

#[test]
fn a_missing_file_names_itself_and_the_nearest_one() {
    let Err(problem) = load(Some("flux_t2i_flow_lra.yaml"), Map::new(), &recipes()) else { panic!("found") };
    assert!(problem.message.contains("flux_t2i_flow_lra.yaml") && problem.message.contains("no such file"));
    assert_eq!(problem.help.as_deref(), Some("did you mean `flux_t2i_flow_lora.yaml`?"));
}

#[test]
fn bad_yaml_is_placed_by_line() {
    let dir = tempfile::tempdir().unwrap();
    fs_err::write(dir.path().join("x.yaml"), "model:\n  mode: a\n bad: [1\n").unwrap();
    let Err(problem) = load(Some("x.yaml"), Map::new(), dir.path()) else { panic!("parsed") };
    assert!(problem.line.is_some() && problem.message.contains("not valid YAML"), "{problem:?}");
}

fn key(over: Value) -> Value {
    let loaded = loaded(OLD_SCHEMA, over);
    assert_eq!(loaded.problems, []);
    serde_json::to_value(loaded.config).unwrap()
}

#[test]
fn what_does_not_move_a_number_does_not_move_the_key() {
    let plain = key(json!({}));
    for over in [
        json!({"fsdp": {"dp_size": 8, "activation_checkpointing": true}}),
        json!({"fsdp": {"reshard_after_forward": false, "defer_fsdp_grad_sync": false, "enable_fsdp2_prefetch": false}}),
        json!({"fsdp": {"fsdp2_backward_prefetch_depth": 4, "fsdp2_forward_prefetch_depth": 3, "reduce_dtype": "float32"}}),
        json!({"ddp": {"find_unused_parameters": true}}),
        json!({"dist_env": {"timeout_minutes": 3}}),
        json!({"wandb": {"enable": true, "project": "x"}}),
        json!({"data": {"dataloader": {"num_workers": 9, "cache_dir": "/tmp/x"}}}),
        json!({"step_scheduler": {"log_remote_every_steps": 5, "local_batch_size": 4}}),
        json!({"checkpoint": {"checkpoint_dir": "/tmp/y"}}),
        json!({"model": {"attention_backend": "native", "pretrained_model_name_or_path": "another/name"}}),
        json!({"optimizer": {"foreach": true}}),
        json!({"performance": {"check_loss": true}}),
    ] {
        assert_eq!(key(over.clone()), plain, "{over}");
    }
}

#[test]
fn what_moves_a_number_moves_the_key() {
    let plain = key(json!({}));
    let overs = [
        json!({"seed": 1}),
        json!({"model": {"mode": "pretrain"}}),
        json!({"model": {"torch_dtype": "float32"}}),
        json!({"model": {"compute_dtype": "float32"}}),
        json!({"optimizer": {"lr": 1.0}}),
        json!({"optimizer": {"weight_decay": 1.0}}),
        json!({"optimizer": {"betas": [0.1, 0.2]}}),
        json!({"optimizer": {"eps": 1e-4}}),
        json!({"clip_grad_norm": {"max_norm": 2}}),
        json!({"lr_scheduler": {"lr_decay_style": "linear"}}),
        json!({"flow_matching": {"timestep_sampling": "mode"}}),
        json!({"flow_matching": {"logit_mean": 1}}),
        json!({"flow_matching": {"logit_std": 2}}),
        json!({"flow_matching": {"flow_shift": 2}}),
        json!({"flow_matching": {"mix_uniform_ratio": 0.5}}),
        json!({"flow_matching": {"sigma_min": 0.5}}),
        json!({"flow_matching": {"sigma_max": 0.5}}),
        json!({"flow_matching": {"use_sigma_noise": false}}),
        json!({"flow_matching": {"use_loss_weighting": false}}),
        json!({"flow_matching": {"loss_weighting_scheme": "bsmntw"}}),
        json!({"flow_matching": {"cfg_dropout_prob": 0}}),
        json!({"flow_matching": {"adapter_kwargs": {"guidance_scale": 2}}}),
        json!({"step_scheduler": {"global_batch_size": 8}}),
        json!({"step_scheduler": {"num_epochs": 3}}),
        json!({"step_scheduler": {"max_steps": 3}}),
        json!({"step_scheduler": {"ckpt_every_steps": 3}}),
        json!({"step_scheduler": {"save_checkpoint_every_epoch": false}}),
        json!({"data": {"dataloader": {"shuffle": false}}}),
        json!({"data": {"dataloader": {"drop_last": true}}}),
        json!({"checkpoint": {"max_recent_checkpoints": 1}}),
        json!({"peft": {"dim": 4}}),
        json!({"peft": {"alpha": 4}}),
        json!({"peft": {"target_modules": ["*"]}}),
        json!({"ema": {}}),
        json!({"ema": {"decay": 0.9}}),
        json!({"validation": {}}),
        json!({"validation": {"count": 3}}),
        json!({"samples": {"prompts": ["x"]}}),
        json!({"samples": {"prompts": ["y"]}}),
        json!({"fsdp": {"reduce_dtype": "bfloat16"}}),
    ];
    let mut seen = vec![plain];
    for over in overs {
        let key = key(over.clone());
        assert!(!seen.contains(&key), "{over}");
        seen.push(key);
    }
}

#[test]
fn a_mesh_that_does_not_fit_is_refused_in_one_line() {
    let refused = |over: Value, ranks| {
        let problem = loaded(OLD_SCHEMA, over).config.distributed.mesh(ranks).unwrap_err();
        (problem.field.unwrap_or_default(), problem.message)
    };
    let (field, message) = refused(json!({"ddp": {"dp_size": 8}}), 2);
    assert_eq!(
        (field.as_str(), message.as_str()),
        ("ddp.dp_size", "`ddp`: dp_size 8 is 8 ranks, but the run has 2 ranks")
    );
    let (field, message) = refused(json!({"fsdp": {"ep_size": 2}}), 3);
    assert_eq!(field, "fsdp.dp_size");
    assert_eq!(message, "`fsdp`: ep_size 2 need a multiple of 2 ranks, but the run has 3 ranks");
    let (field, message) = refused(json!({"fsdp": {"cp_size": 2, "cp_ring_degree": 4}}), 2);
    assert_eq!(field, "fsdp.cp_ring_degree");
    assert_eq!(message, "`fsdp`: cp_ring_degree 4 does not divide cp_size 2");
    let mesh = |over: Value, ranks| loaded(OLD_SCHEMA, over).config.distributed.mesh(ranks).unwrap();
    assert_eq!(mesh(json!({"fsdp": {"dp_size": 8}}), 1), spec::Mesh::alone());
    let remarks = loaded(OLD_SCHEMA, json!({"fsdp": {"dp_size": 8}})).config.distributed.remarks(1);
    assert!(remarks.len() == 1 && remarks[0].starts_with("fsdp.dp_size: 8: one rank here"), "{remarks:?}");
    assert_eq!(mesh(json!({"fsdp": {"tp_size": 2}}), 1), spec::Mesh::alone());
    let remarks = loaded(OLD_SCHEMA, json!({"fsdp": {"tp_size": 2}})).config.distributed.remarks(1);
    assert!(remarks.len() == 1 && remarks[0].starts_with("fsdp.tp_size: 2: one rank here"), "{remarks:?}");
    let remarks = loaded(OLD_SCHEMA, json!({"fsdp": {"ep_size": 2}})).config.distributed.remarks(1);
    assert!(remarks.len() == 1 && remarks[0].starts_with("fsdp.ep_size: 2: one rank here"), "{remarks:?}");
    let all = mesh(json!({"fsdp": {"tp_size": 2, "cp_size": 2, "cp_ring_degree": 2, "pp_size": 2}}), 16);
    assert_eq!((all.to_string().as_str(), all.ulysses()), ("pp 2 × dp_shard 2 × cp 2 × tp 2", 1));
    assert_eq!(mesh(json!({"ddp": {}}), 3), spec::Mesh::replicated(3));
    assert_eq!(mesh(json!({}), 3), spec::Mesh::replicated(3));
    assert_eq!(mesh(json!({"fsdp": {}}), 4).to_string(), "dp_shard 4");
    assert_eq!(mesh(json!({"fsdp": {"dp_replicate_size": 2}}), 4).to_string(), "dp_replicate 2 × dp_shard 2");
    assert_eq!(
        loaded(OLD_SCHEMA, json!({"dist_env": {"timeout_minutes": 0.5}})).config.distributed.timeout.as_secs(),
        30
    );
}

#[test]
fn the_keys_of_fsdp_say_when_parameters_and_gradients_travel() {
    let options = |keys: Value| {
        let loaded = loaded(OLD_SCHEMA, json!({"fsdp": keys}));
        assert_eq!(loaded.problems, []);
        assert!(!loaded.notes.iter().any(|note| note.starts_with("fsdp")), "{:?}", loaded.notes);
        loaded.config.distributed.options()
    };
    let usual = parallel::Options::default();
    assert_eq!(options(json!({})), usual);
    let none = parallel::Options { forward_ahead: 0, backward_ahead: 0, ..usual };
    assert_eq!(options(json!({"enable_fsdp2_prefetch": false, "fsdp2_backward_prefetch_depth": 3})), none);
    let depths =
        json!({"enable_fsdp2_prefetch": true, "fsdp2_backward_prefetch_depth": 3, "fsdp2_forward_prefetch_depth": 0});
    assert_eq!(options(depths), parallel::Options { forward_ahead: 0, backward_ahead: 3, ..usual });
    for reshard in [true, false] {
        let found = options(json!({"reshard_after_forward": reshard, "defer_fsdp_grad_sync": reshard}));
        assert_eq!(found, parallel::Options { reshard: Some(reshard), defer: reshard, ..usual });
    }
    assert_eq!(options(json!({"reshard_after_forward": null})), usual);
    let half = parallel::Options { reduce: tch::Kind::BFloat16, ..usual };
    assert_eq!(options(json!({"reduce_dtype": "bfloat16"})), half);
    let one = loaded(OLD_SCHEMA, json!({"fsdp": {"reduce_dtype": "bf16"}})).config.distributed.remarks(1);
    assert!(one.len() == 1 && one[0].starts_with("fsdp.reduce_dtype: `bfloat16`: one rank here"), "{one:?}");
    for (key, value) in [("reduce_dtype", json!("float16")), ("fsdp2_forward_prefetch_depth", json!(-1))] {
        let problems = loaded(OLD_SCHEMA, json!({"fsdp": {key: value}})).problems;
        assert!(problems.len() == 1 && problems[0].message.contains(key), "{problems:?}");
    }
}

#[test]
fn a_block_of_the_table_takes_the_place_of_the_files_other_one() {
    let file = format!("{OLD_SCHEMA}\nfsdp:\n  dp_size: 8\n");
    let ddp = loaded(&file, json!({"ddp": {}}));
    assert_eq!(ddp.problems, []);
    assert_eq!(ddp.config.distributed.mesh(2).unwrap(), spec::Mesh::replicated(2));
    assert_eq!(loaded(&file, json!({"fsdp": {"dp_size": 2}})).problems, []);
}

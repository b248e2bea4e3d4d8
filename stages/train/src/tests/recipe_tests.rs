//! Files: what a checkpoint holds, what is linked, what is removed; and what `check` finds.

use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;

use diffusion::sample::{Denoiser, Guidance, sample};
use diffusion::schedule::{Scheduler, Spacing};
use models::ModelFolder;
use nn::{BuildOptions, Builder, Weights};
use serde_json::{Map, Value, json};
use spec::Bucket;
use stage::{Checked, Exit, Stage};
use tch::{Device, Kind};

use super::world::{SQUARE, World, fixture, model};
use crate::Train;
use crate::session::STEM;

#[test]
fn a_checkpoint_is_a_whole_pipeline_and_unchanged_parts_are_shared() {
    let world = World::new(&[(SQUARE, 8)]);
    world.run("run", json!({"model": {"torch_dtype": "bfloat16"}})).unwrap();
    let [first, last] = ["epoch_1_step_1", "epoch_3_step_3"].map(|name| world.output("run").join(name));
    for part in ["model_index.json", "scheduler/scheduler_config.json", "vae/config.json", "transformer/config.json"] {
        assert_eq!(fs_err::read(last.join(part)).unwrap(), fs_err::read(model().join(part)).unwrap(), "{part}");
    }
    let inode = |path: std::path::PathBuf| fs_err::metadata(path).unwrap().ino();
    let vae = "vae/diffusion_pytorch_model.safetensors";
    assert_eq!(inode(first.join(vae)), inode(last.join(vae)), "checkpoints share what training does not change");
    assert_ne!(inode(first.join(vae)), inode(model().join(vae)), "a user's own folder may change in place");
    let weights = nn::Weights::open(&last.join("transformer"), "diffusion_pytorch_model").unwrap();
    assert_eq!(weights.kind("x_embedder.weight"), Some(tch::Kind::BFloat16));
    let state = nn::Weights::file(&last.join("training_state/weights.safetensors")).unwrap();
    assert_eq!(state.kind("x_embedder.weight"), Some(tch::Kind::Float));
    let folder = ModelFolder::open(&last).unwrap();
    assert_eq!(models::family_of(&folder).unwrap().name(), "flux");
}

#[test]
fn only_the_asked_number_of_checkpoints_stays() {
    let world = World::new(&[(SQUARE, 8)]);
    world.run("run", json!({"checkpoint": {"max_recent_checkpoints": 1}})).unwrap();
    assert_eq!(world.checkpoints("run"), ["epoch_3_step_3"]);
}

#[test]
fn a_checkpoint_holds_the_average_when_there_is_one() {
    let world = World::new(&[(SQUARE, 8)]);
    world.run("run", json!({"ema": {"decay": 0.9}})).unwrap();
    let tensors = |file: &str| world.tensors("run", &format!("epoch_3_step_3/{file}.safetensors"));
    let written = tensors("transformer/diffusion_pytorch_model");
    assert_eq!(written, tensors("training_state/ema"));
    assert_ne!(written, tensors("training_state/weights"));
}

#[test]
fn pictures_are_drawn_on_schedule() {
    let world = World::new(&[(SQUARE, 8)]);
    let samples = json!({"prompts": ["a fool", "a sun"], "every_steps": 2, "width": 64, "height": 128, "steps": 2});
    world.run("run", json!({"samples": samples})).unwrap();
    for step in [1, 3] {
        for number in 0..2 {
            let path = world.output(&format!("run/samples/step_{step}/00{number}.png"));
            let picture = media::decode(&fs_err::read(path).unwrap(), [0; 3]).unwrap();
            assert_eq!((picture.width, picture.height), (64, 128));
        }
    }
}

/// A sample begins with the noise that `generate` and diffusers begin with, which bfloat16 has numbers of its own for.
#[test]
fn a_sample_begins_with_the_noise_of_its_seed_and_kind() {
    const TOKENS: usize = 8;
    let world = World::new(&[(SQUARE, 8)]);
    let folder = ModelFolder::open(model()).unwrap();
    let family = models::family_of(&folder).unwrap();
    let frozen = |kind| BuildOptions::frozen(Device::Cpu, kind);
    for (dtype, kind) in [("float32", Kind::Float), ("bfloat16", Kind::BFloat16)] {
        let samples =
            json!({"prompts": ["a fool"], "width": 64, "height": 128, "steps": 2, "seed": 7, "guidance": 3.5});
        let over = json!({
            "model": {"compute_dtype": dtype}, "optimizer": {"lr": 0.0, "weight_decay": 0.0},
            "step_scheduler": {"max_steps": 1}, "samples": samples,
        });
        world.run(dtype, over).unwrap();
        let path = world.output(&format!("{dtype}/samples/step_0/000.png"));
        let drawn = media::decode(&fs_err::read(path).unwrap(), [0; 3]).unwrap().rgb;

        let weights = Weights::open(&folder.path.join("transformer"), STEM).unwrap();
        let transformer = family.transformer(&folder, &Builder::from_weights(weights, frozen(Kind::Float))).unwrap();
        let encoders = family.text_encoders(&folder, frozen(kind)).unwrap();
        let vae = family.vae(&folder, frozen(Kind::Float)).unwrap();
        let shape = vae.latent_shape(64, 128, 1);
        let expected = tch::no_grad(|| {
            let text = encoders.encode(&["a fool".to_owned()], TOKENS).unwrap().remove(0);
            let positive = family.conditions(&[&text], TOKENS, Device::Cpu, kind).unwrap();
            let guidance = Guidance { positive: &positive, negative: None, distilled: Some(3.5) };
            let scheduler = folder.json("scheduler/scheduler_config.json", "").unwrap();
            let tokens = family.image_tokens(&shape[1..]) as usize;
            let schedule = Scheduler::from_config(&scheduler).unwrap().schedule(2, tokens, Spacing::Even).unwrap();
            let noise = torch::ops::noise_seeded(7, &[&[1], shape.as_slice()].concat(), kind).unwrap();
            let denoisers = [Denoiser::new(transformer.as_ref(), 0.0, 1.0)];
            let on = &mut |_, _| ControlFlow::Continue(());
            let latents = sample(&denoisers, &schedule, noise, &guidance, kind, on).unwrap().unwrap();
            let pixels = (vae.decode(&latents).unwrap() / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0;
            pixels.round().squeeze_dim(0).permute([1, 2, 0]).to_kind(Kind::Uint8).contiguous().view(-1)
        });
        let expected = Vec::<u8>::try_from(expected).unwrap();
        let far = drawn.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        assert!(drawn.len() == expected.len() && far <= 1, "{dtype}: {far}");
    }
}

fn check(table: Value) -> Checked {
    let parameters = serde_json::from_value(table.clone()).unwrap();
    Train::check(&parameters, &crate::Settings::default(), &stage::CheckRequest::new(table, "/"))
}

#[test]
fn check_names_the_model_and_finds_nothing_wrong() {
    let checked = check(json!({"base_model": model()}));
    assert_eq!(checked.problems, []);
    assert_eq!(checked.sources.len(), 1);
    assert!(checked.key["optimizer"]["lr"].is_number());
    assert!(!checked.key.to_string().contains("fixtures"), "no location in the key");
}

#[test]
fn a_pattern_that_matches_nothing_is_found_before_anything_runs() {
    let checked = check(json!({"base_model": model(), "peft": {"target_modules": ["*.attn.to_qq"]}}));
    let [problem] = checked.problems.as_slice() else { panic!("{:?}", checked.problems) };
    assert!(problem.message.contains("`*.attn.to_qq`"), "{problem:?}");
    assert_eq!(problem.field.as_deref(), Some("peft.target_modules"));
}

#[test]
fn an_adapter_of_another_family_and_a_missing_model_are_mistakes() {
    let checked = check(json!({"base_model": model(), "flow_matching": {"adapter_type": "flux2"}}));
    assert_eq!(checked.problems[0].field.as_deref(), Some("flow_matching.adapter_type"));
    let checked = check(json!({"base_model": "no such folder"}));
    assert_eq!(checked.problems[0].field.as_deref(), Some("base_model"));
    let checked = check(json!({"base_model": model(), "samples": {"prompts": ["x"], "width": 70}}));
    assert_eq!(checked.problems[0].field.as_deref(), Some("samples.width"));
}

/// What a mesh asks of a model that it cannot do is a mistake with its arithmetic, before anything runs.
#[test]
fn a_model_that_does_not_divide_is_found_before_anything_runs() {
    let refused = |fsdp: Value, ranks, more: Value| {
        let mut table = json!({"base_model": model(), "fsdp": fsdp});
        table.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (settings, parameters): (Map<_, _>, Map<_, _>) =
            table.as_object().unwrap().clone().into_iter().partition(|(key, _)| key == "fsdp");
        let request = stage::CheckRequest { ranks, ..stage::CheckRequest::new(table, "/") };
        let parameters = serde_json::from_value(Value::Object(parameters)).unwrap();
        let settings = serde_json::from_value(Value::Object(settings)).unwrap();
        let mut problems = Train::check(&parameters, &settings, &request).problems;
        assert!(problems.len() <= 1, "{problems:?}");
        problems.pop().map(|problem| (problem.field.unwrap_or_default(), problem.message))
    };
    let none = || json!({});
    let told = |field: &str, message: &str| Some((field.to_owned(), message.to_owned()));
    assert_eq!(refused(json!({"tp_size": 2}), 2, none()), None);
    assert_eq!(
        refused(json!({"tp_size": 3}), 3, none()),
        told("fsdp.tp_size", "tp_size 3: 2 attention heads do not divide into 3 shares")
    );
    assert_eq!(
        refused(json!({"cp_size": 4}), 4, none()),
        told("fsdp.cp_size", "cp_ulysses_degree 4: 2 attention heads do not divide into 4 shares")
    );
    assert_eq!(refused(json!({"cp_size": 4, "cp_ring_degree": 4}), 4, none()), None);
    assert_eq!(
        refused(json!({"tp_size": 2, "cp_size": 2}), 4, none()),
        told("fsdp.tp_size", "tp_size 2 × cp_ulysses_degree 2: 2 attention heads do not divide into 4 shares")
    );
    assert_eq!(
        refused(json!({"pp_size": 5}), 5, none()),
        told("fsdp.pp_size", "pp_size 5: 4 blocks do not make 5 stages")
    );
    let chunks = |chunks: u64| json!({"pp_size": 2, "pp_virtual_stages": chunks});
    assert_eq!(refused(chunks(2), 2, none()), None);
    assert_eq!(
        refused(chunks(3), 2, none()),
        told("fsdp.pp_virtual_stages", "pp_size 2 × pp_virtual_stages 3: 4 blocks do not make 6 stages")
    );
    assert_eq!(
        refused(chunks(2), 2, json!({"step_scheduler": {"global_batch_size": 8, "local_batch_size": 8}})),
        told(
            "fsdp.pp_virtual_stages",
            "`pp_virtual_stages` is 2, but global_batch_size 8 / (local_batch_size 8 × 1 data-parallel rank) makes 1 micro-batch \
             a step for pp_size 2"
        )
    );
    let dropout = json!({"peft": {"dim": 2, "alpha": 2, "dropout": 0.5}});
    let (field, message) = refused(json!({"cp_size": 2}), 2, dropout).unwrap();
    assert_eq!(field, "peft.dropout");
    assert!(message.starts_with("`peft.dropout` is 0.5 and `cp_size` is 2"), "{message}");
}

#[test]
fn the_recipes_own_model_wins_over_the_wired_one() {
    let checked = check(json!({"base_model": "no such folder", "model": {"pretrained_model_name_or_path": model()}}));
    assert_eq!(checked.problems, []);
    let checked = check(json!({"base_model": model(), "model": {"mode": "pretrain"}}));
    assert_eq!((checked.problems.len(), checked.sources.len()), (0, 1));
}

/// A model of the Hub is not looked at before it was fetched: the run says what `check` says of a folder, and as a mistake in the
/// recipe.
#[test]
fn a_run_refuses_what_check_refuses_of_a_folder() {
    let clip = Bucket { frames: 5, ..SQUARE };
    let no_recipe = || json!({"flow_matching": null});
    for (name, bucket, ranks, over) in [
        // Clips under the settings of FLUX, which hold when no `config` is named.
        ("wan-tiny", clip, 1, no_recipe()),
        ("wan22-tiny", clip, 1, no_recipe()),
        ("flux-tiny", SQUARE, 1, json!({"flow_matching": {"adapter_type": "flux2"}})),
        ("flux-tiny", SQUARE, 1, json!({"model": {"model_type": "wan"}})),
        ("flux-tiny", SQUARE, 1, json!({"model": {"stage": "high_noise"}})),
        ("flux-tiny", SQUARE, 1, json!({"model": {"pipeline_spec": {"transformer_cls": "WanTransformer3DModel"}}})),
        ("flux-tiny", SQUARE, 1, json!({"peft": {"target_modules": ["*.attn.to_qq"]}})),
        ("flux-tiny", SQUARE, 1, json!({"samples": {"prompts": ["x"], "width": 70}})),
        ("flux-tiny", SQUARE, 3, json!({"fsdp": {"tp_size": 3}})),
    ] {
        let folder = ModelFolder::open(fixture(name)).unwrap();
        let world = World::of(&folder, &[(bucket, 8)], |_, n| vec![0.5; n]);
        let (parameters, settings) = world.table(&over);
        let request = stage::CheckRequest { ranks, ..stage::CheckRequest::new(json!({}), "/") };
        let problem = Train::check(&parameters, &settings, &request).problems.remove(0);
        let failure = world.run_ranks("run", ranks, &over).unwrap_err();
        assert_eq!(failure.exit, Exit::Recipe, "{over}: {failure:?}");
        assert_eq!(failure.problem, problem, "{over}");
    }
}

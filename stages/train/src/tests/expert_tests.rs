//! Two denoisers for two ranges of noise: which samples go through which, and what is written of each.

use std::path::Path;

use diffusion::flow;
use models::{ModelFolder, family_of};
use nn::lora_file::AdapterFile;
use nn::optim::gradient_norm;
use nn::{BuildOptions, Builder, Inputs, Weights};
use serde_json::{Map, Value, json};
use spec::{Bucket, Mesh};
use stage::{Checked, Stage};
use tables::{Loss, Validation};
use tch::{Device, Kind};

use super::rank_tests::assert_same_run;
use super::world::{World, difference, fixture, model};
use crate::batch::Recipe;
use crate::dataset::Dataset;
use crate::{Train, config, experts};

const CLIP: Bucket = Bucket { width: 32, height: 48, frames: 5 };
const LONG: Bucket = Bucket { width: 32, height: 32, frames: 9 };
/// Levels fall on both sides.
const HALF: f64 = 0.5;
const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

fn world_of(model: &Path, buckets: &[(Bucket, usize)]) -> World {
    let latent = |id: &str, n| nn::rng::Stream::new(1, &["latent".into(), id.into()]).normals(n);
    World::of(&ModelFolder::open(model).unwrap(), buckets, latent)
}

fn world(buckets: &[(Bucket, usize)]) -> World {
    world_of(&fixture("wan22-tiny"), buckets)
}

/// A folder with one of the two denoisers, as its only one.
fn alone(component: &str) -> tempfile::TempDir {
    let (folder, from) = (tempfile::tempdir().unwrap(), fixture("wan22-tiny"));
    for (part, name) in [(component, "transformer"), ("vae", "vae")] {
        fs_err::create_dir_all(folder.path().join(name)).unwrap();
        for file in ["config.json", WEIGHTS] {
            fs_err::copy(from.join(part).join(file), folder.path().join(name).join(file)).unwrap();
        }
    }
    let mut index: Value = serde_json::from_slice(&fs_err::read(from.join("model_index.json")).unwrap()).unwrap();
    let parts = index.as_object_mut().unwrap();
    parts.retain(|name, _| ["_class_name", "transformer", "vae"].contains(&name.as_str()));
    fs_err::write(folder.path().join("model_index.json"), index.to_string()).unwrap();
    folder
}

fn levels(world: &World, name: &str) -> Vec<f32> {
    let rows: Vec<Loss> = tables::read(&world.output(name).join("losses.parquet")).unwrap();
    rows.into_iter().map(|row| row.sigma).collect()
}

#[test]
fn an_expert_that_takes_every_sample_is_its_model_alone_and_the_other_rests() {
    let buckets = [(CLIP, 5), (LONG, 3)];
    let both = world(&buckets);
    let over = |model: Value| json!({"model": model, "ema": {"decay": 0.9}, "step_scheduler": {"local_batch_size": 2}});
    let places = [("transformer", ""), ("transformer_2", "transformer_2/")];
    for (taking, resting, boundary) in [(0, 1, 1e-6), (1, 0, 0.999_999)] {
        both.run("run", over(json!({"boundary_ratio": boundary}))).unwrap();
        let (component, place) = places[taking];
        let folder = alone(component);
        let one = world_of(folder.path(), &buckets);
        one.run("run", over(json!({}))).unwrap();
        assert_eq!(both.losses("run"), one.losses("run"), "{component}");
        let last = both.checkpoints("run").pop().unwrap();
        for file in ["weights", "optimizer", "ema"] {
            let ours = both.tensors("run", &format!("{last}/training_state/{place}{file}.safetensors"));
            assert_eq!(ours, one.tensors("run", &format!("{last}/training_state/{file}.safetensors")), "{file}");
        }
        let ours = both.tensors("run", &format!("{last}/{component}/{WEIGHTS}"));
        assert_eq!(ours, one.tensors("run", &format!("{last}/transformer/{WEIGHTS}")));
        // Without a sample there is no gradient: nothing moves, and no moment begins.
        let (component, place) = places[resting];
        let given = Weights::file(&fixture("wan22-tiny").join(component).join(WEIGHTS)).unwrap();
        for (name, tensor) in both.tensors("run", &format!("{last}/{component}/{WEIGHTS}")) {
            assert!(tensor.equal(&given.tensor(&name).unwrap()), "{name}");
        }
        assert!(both.tensors("run", &format!("{last}/training_state/{place}optimizer.safetensors")).is_empty());
        fs_err::remove_dir_all(both.output("run")).unwrap();
    }
}

/// The gradient norm of a step, from the two models and the samples themselves: each sample through the model of its level,
/// weighing one over the global batch.
#[test]
fn each_sample_weighs_one_over_the_global_batch_in_the_expert_of_its_level() {
    let world = world(&[(CLIP, 8)]);
    let over = json!({"model": {"boundary_ratio": HALF}, "step_scheduler": {"max_steps": 1, "local_batch_size": 4}});
    world.run("run", over).unwrap();
    let folder = ModelFolder::open(fixture("wan22-tiny")).unwrap();
    let family = family_of(&folder).unwrap();
    let [bucket, encode] = ["bucket", "encode"].map(|name| world.output(name));
    let dataset = Dataset::open(&bucket, &encode).unwrap();
    let config = config::load(None, Map::new(), Path::new("/")).unwrap().config;
    let recipe = Recipe {
        seed: 5,
        levels: config.flow_matching.levels().unwrap(),
        windows: Vec::new(),
        weighting: config.flow_matching.weighting().unwrap(),
        dropout: config.flow_matching.cfg_dropout_prob,
        family,
        compute: Kind::Float,
        device: Device::Cpu,
    };
    let (mut squares, mut counts) = (0.0, [0, 0]);
    for (number, component) in ["transformer", "transformer_2"].into_iter().enumerate() {
        let weights = Weights::open(&folder.path.join(component), "diffusion_pytorch_model").unwrap();
        let builder = Builder::from_weights(weights, BuildOptions::trained(Device::Cpu));
        let model = family.transformer(&folder, &builder).unwrap();
        let parameters = builder.finish().unwrap();
        for sample in 0..dataset.items().len() {
            let batch = recipe.batch(&dataset, &[sample], 0).unwrap();
            let draw = batch.draws[0];
            if (f64::from(draw.sigma) < HALF) != (number == 1) {
                continue;
            }
            counts[number] += 1;
            let sigma = tch::Tensor::from_slice(&[draw.sigma]);
            let latents = flow::interpolate(&batch.clean, &batch.noise, &sigma);
            let conditions = batch.conditions;
            let inputs = Inputs { latents, sigma, conditions, guidance: None, compute: Kind::Float };
            let prediction = model.forward(&inputs, false.into()).unwrap();
            let losses = flow::sample_losses(&prediction, &flow::target(&batch.clean, &batch.noise));
            (losses.sum(Kind::Float) * f64::from(draw.weight) / 8.0).backward();
        }
        squares += gradient_norm(&parameters.trainable()).unwrap().powi(2);
    }
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
    let (ours, expected) = (world.steps("run")[0].grad_norm, squares.sqrt());
    assert!((ours - expected).abs() < 1e-5 * expected, "{ours} {expected}");
}

#[test]
fn one_stage_trains_one_denoiser_in_its_window_and_leaves_the_other_as_it_is() {
    let world = world(&[(CLIP, 8)]);
    let given = fixture("wan22-tiny");
    let bytes = |path: &Path| fs_err::read(path).unwrap();
    for (stage, trained, resting, state) in [
        ("high_noise", "transformer", "transformer_2", "training_state"),
        ("low_noise", "transformer_2", "transformer", "training_state/transformer_2"),
    ] {
        let over = json!({
            "model": {"stage": stage, "boundary_ratio": HALF},
            "validation": {"count": 2, "every_steps": 2, "sigmas": [0.2, 0.5, 0.8]},
            "samples": {"prompts": ["a fool"], "every_steps": 4, "width": 32, "height": 32, "steps": 3, "guidance": 2.0, "guidance_2": 3.0},
        });
        world.run(stage, over).unwrap();
        let high = |sigma: &f32| f64::from(*sigma) >= HALF;
        assert!(levels(&world, stage).iter().all(|sigma| high(sigma) == (stage == "high_noise")));
        let rows: Vec<Validation> = tables::read(&world.output(stage).join("validation.parquet")).unwrap();
        let seen: Vec<f32> = rows.iter().filter(|row| row.step == 1).map(|row| row.sigma).collect();
        assert_eq!(seen, if stage == "high_noise" { vec![0.5, 0.8] } else { vec![0.2] });
        assert!(world.output(stage).join("samples/step_3/000.png").is_file());
        let last = world.output(stage).join(world.checkpoints(stage).pop().unwrap());
        assert_eq!(bytes(&last.join(resting).join(WEIGHTS)), bytes(&given.join(resting).join(WEIGHTS)));
        assert_ne!(bytes(&last.join(trained).join(WEIGHTS)), bytes(&given.join(trained).join(WEIGHTS)));
        assert!(last.join(state).join("optimizer.safetensors").is_file());
        assert_eq!(last.join("training_state/weights.safetensors").is_file(), stage == "high_noise");
        // A folder that draws as it was trained.
        let folder = ModelFolder::open(&last).unwrap();
        assert_eq!(family_of(&folder).unwrap().denoisers(&folder).unwrap()[0].from, HALF);
    }
    // Where no border is named the model's own holds, and its index is not touched.
    world.run("own", json!({"model": {"stage": "high_noise"}, "step_scheduler": {"max_steps": 2}})).unwrap();
    assert!(levels(&world, "own").iter().all(|sigma| *sigma >= 0.875));
    let last = world.output("own").join(world.checkpoints("own").pop().unwrap());
    assert_eq!(bytes(&last.join("model_index.json")), bytes(&given.join("model_index.json")));
}

#[test]
fn experts_go_on_bit_for_bit_and_from_each_others_runs_not_at_all() {
    let world = world(&[(CLIP, 5), (LONG, 4)]);
    let over = json!({
        "model": {"boundary_ratio": HALF}, "ema": {"decay": 0.9},
        "step_scheduler": {"global_batch_size": 4, "local_batch_size": 2, "max_steps": 6, "ckpt_every_steps": 3},
    });
    world.run("whole", over.clone()).unwrap();
    world.run("killed", over.clone()).unwrap();
    let last = world.checkpoints("whole").pop().unwrap();
    fs_err::remove_dir_all(world.output("killed").join(&last)).unwrap();
    world.run("killed", over).unwrap();
    assert_eq!(world.losses("whole"), world.losses("killed"));
    for file in ["weights", "optimizer", "ema"] {
        for place in ["training_state", "training_state/transformer_2"] {
            let file = format!("{last}/{place}/{file}.safetensors");
            assert_eq!(world.tensors("whole", &file), world.tensors("killed", &file), "{file}");
        }
    }
    // A bit of the second expert's state: the run goes on from the one before.
    let path = world.output(&format!("killed/{last}/training_state/transformer_2/weights.safetensors"));
    let mut bytes = fs_err::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs_err::write(&path, bytes).unwrap();
    let damaged = crate::checkpoint::remove_damaged(&world.output("killed")).unwrap();
    assert!(damaged.len() == 1 && damaged[0].contains("`transformer_2/weights.safetensors`"), "{damaged:?}");

    world.run("high", json!({"model": {"stage": "high_noise"}, "step_scheduler": {"max_steps": 1}})).unwrap();
    let from = world.output("high").join(world.checkpoints("high").pop().unwrap());
    let failure = world.run("both", json!({"checkpoint": {"restore_from": from}})).unwrap_err();
    assert!(failure.problem.message.ends_with("it holds no state of `transformer_2`"), "{failure:?}");
}

/// Numbers of one rank on every mesh that shares out the experts; some steps have no sample for one of them.
#[test]
fn experts_on_ranks_of_their_own_train_as_on_one() {
    let world = world(&[(CLIP, 5), (LONG, 4)]);
    let over = |local: u64, block: &str, keys: Value| {
        json!({
            "model": {"boundary_ratio": HALF},
            "ema": {"decay": 0.9},
            "validation": {"count": 3, "every_steps": 5, "sigmas": [0.2, 0.8]},
            "samples": {"prompts": ["a fool", "a sun", "a moon"], "every_steps": 10, "width": 32, "height": 32, "steps": 4, "guidance": 2.0},
            "step_scheduler": {"global_batch_size": 2, "local_batch_size": local, "max_steps": 10, "ckpt_every_steps": 5},
            "dist_env": {"timeout_minutes": 2},
            block: keys,
        })
    };
    world.run("one", over(2, "fsdp", json!({}))).unwrap();
    let last = world.checkpoints("one").pop().unwrap();
    let rows: Vec<Loss> = tables::read(&world.output("one").join("losses.parquet")).unwrap();
    let high = |step: i64| rows.iter().filter(|row| row.step == step && f64::from(row.sigma) >= HALF).count();
    let counts: Vec<usize> = (0..10).map(high).collect();
    assert!(counts.contains(&0) && counts.contains(&1) && counts.contains(&2), "{counts:?}");
    let validation =
        |name: &str| -> Vec<Validation> { tables::read(&world.output(name).join("validation.parquet")).unwrap() };
    let picture = |name: &str, number: usize| {
        let path = world.output(&format!("{name}/samples/step_9/00{number}.png"));
        media::decode(&fs_err::read(path).unwrap(), [0; 3]).unwrap().rgb
    };
    for (ranks, block, keys) in [
        (2, "fsdp", json!({"ep_size": 2})),
        (2, "fsdp", json!({"ep_size": 1})),
        // Ranks that hold both, some of which have no sample for one of them.
        (2, "ddp", json!({})),
        (3, "ddp", json!({})),
        (4, "fsdp", json!({"ep_size": 2, "dp_size": 2})),
        (4, "fsdp", json!({"ep_size": 2, "dp_size": 2, "dp_replicate_size": 2, "activation_checkpointing": false})),
        (4, "fsdp", json!({"ep_size": 2, "tp_size": 2})),
        (4, "fsdp", json!({"ep_size": 2, "cp_size": 2, "cp_ring_degree": 2})),
        (4, "fsdp", json!({"ep_size": 2, "pp_size": 2})),
        (8, "fsdp", json!({"ep_size": 2, "pp_size": 2, "dp_size": 2})),
    ] {
        let name = format!("{block} {ranks} {keys}").replace(['"', '{', '}'], "");
        println!("{name}");
        world.run_ranks(&name, ranks, &over(1, block, keys)).unwrap();
        assert_same_run(&world, "one", &name, &last);
        for component in ["transformer", "transformer_2"] {
            let result = format!("{last}/{component}/{WEIGHTS}");
            assert!(difference(&world.tensors("one", &result), &world.tensors(&name, &result)) < 1e-3, "{name}");
        }
        let (one, other) = (validation("one"), validation(&name));
        assert_eq!(one.len(), other.len());
        for (a, b) in one.iter().zip(&other) {
            let same = a.step == b.step && a.sigma == b.sigma && (a.loss - b.loss).abs() < 1e-5 * a.loss;
            assert!(same, "{name}: {a:?} {b:?}");
        }
        for number in 0..3 {
            let far = picture("one", number).iter().zip(picture(&name, number)).map(|(a, b)| a.abs_diff(b)).max();
            assert!(far <= Some(2), "{name}: {far:?}");
        }
    }
}

/// What one mesh stopped at another goes on from, with the experts together or apart.
#[test]
fn experts_go_on_together_or_apart() {
    let world = world(&[(CLIP, 5), (LONG, 4)]);
    let over = |local: u64, keys: Value| {
        json!({
            "model": {"boundary_ratio": HALF},
            "step_scheduler": {"global_batch_size": 3, "local_batch_size": local, "max_steps": 6, "ckpt_every_steps": 3},
            "fsdp": keys,
        })
    };
    world.run("whole", over(3, json!({}))).unwrap();
    let last = world.checkpoints("whole").pop().unwrap();
    let meshes = [(1, json!({})), (2, json!({"ep_size": 2})), (4, json!({"ep_size": 2})), (2, json!({}))];
    for (number, first) in meshes.iter().enumerate() {
        let second = &meshes[(number + 1) % meshes.len()];
        let name = format!("{first:?} then {second:?}").replace(['"', '{', '}', '(', ')'], "");
        world.run_ranks(&name, first.0, &over(1, first.1.clone())).unwrap();
        fs_err::remove_dir_all(world.output(&name).join(&last)).unwrap();
        world.run_ranks(&name, second.0, &over(1, second.1.clone())).unwrap();
        assert_same_run(&world, "whole", &name, &last);
    }
}

#[test]
fn each_expert_has_an_adapter_of_its_own_where_diffusers_looks_for_it() {
    let world = world(&[(CLIP, 8)]);
    let over = json!({
        "model": {"boundary_ratio": HALF},
        "peft": {"dim": 2, "alpha": 4, "target_modules": ["to_q", "to_out.0"]},
        "step_scheduler": {"local_batch_size": 2},
    });
    world.run("one", over.clone()).unwrap();
    let last = world.checkpoints("one").pop().unwrap();
    let folder = world.output("one").join(&last);
    let [first, second] = ["", "transformer_2"].map(|place| AdapterFile::open(&folder.join(place)).unwrap());
    assert_eq!(first.spec().rank, second.spec().rank);
    let file = "pytorch_lora_weights.safetensors";
    let tensors = |name: &str, place: &str| world.tensors(name, &format!("{last}/{place}{file}"));
    let (one, other) = (tensors("one", ""), tensors("one", "transformer_2/"));
    assert!(one.keys().all(|name| name.starts_with("transformer.blocks.")) && one.keys().eq(other.keys()));
    assert!(difference(&one, &other) > 0.1, "they have seen other samples");
    let mut apart = over;
    apart["fsdp"] = json!({"ep_size": 2, "activation_checkpointing": false});
    world.run_ranks("apart", 4, &apart).unwrap();
    assert_same_run(&world, "one", "apart", &last);
    for place in ["", "transformer_2/"] {
        assert!(difference(&tensors("one", place), &tensors("apart", place)) < 1e-3);
    }
}

#[test]
fn a_broken_sample_of_one_expert_stops_the_ranks_of_both() {
    let folder = ModelFolder::open(fixture("wan22-tiny")).unwrap();
    let broken = |id: &str, n| vec![if id.ends_with("-2") { f32::NAN } else { 0.1 }; n];
    let world = World::of(&folder, &[(CLIP, 4)], broken);
    let over =
        json!({"model": {"boundary_ratio": HALF}, "fsdp": {"ep_size": 2}, "step_scheduler": {"local_batch_size": 1}});
    let failure = world.run_ranks("run", 2, &over).unwrap_err();
    assert_eq!(failure.exit, stage::Exit::Numbers);
    assert!(failure.problem.message.contains("-2` (sigma 0."), "{}", failure.problem.message);
}

#[expect(clippy::needless_pass_by_value, reason = "calls with `json!` read better")]
fn check(model: &Path, over: Value, ranks: usize) -> Checked {
    let mut table = json!({"base_model": model, "flow_matching": {"adapter_type": "simple"}});
    table.as_object_mut().unwrap().extend(over.as_object().unwrap().clone());
    let (settings, parameters): (Map<_, _>, Map<_, _>) =
        table.as_object().unwrap().clone().into_iter().partition(|(key, _)| key == "fsdp");
    let request = stage::CheckRequest { ranks, ..stage::CheckRequest::new(table, "/") };
    let of = |map| serde_json::from_value(Value::Object(map)).unwrap();
    Train::check(&of(parameters), &serde_json::from_value(Value::Object(settings)).unwrap(), &request)
}

#[test]
fn what_two_denoisers_cannot_be_asked_is_found_before_anything_runs() {
    let refused = |model: &Path, over: Value, ranks| {
        let mut problems = check(model, over, ranks).problems;
        assert!(problems.len() <= 1, "{problems:?}");
        problems.pop().map(|problem| (problem.field.unwrap_or_default(), problem.message))
    };
    let told = |field: &str, message: &str| Some((field.to_owned(), message.to_owned()));
    let (two, one) = (fixture("wan22-tiny"), model());
    for ranks in [1, 2] {
        assert_eq!(refused(&two, json!({"fsdp": {"ep_size": 2}}), ranks), None);
        assert_eq!(
            refused(&one, json!({"fsdp": {"ep_size": 2}}), ranks),
            told("fsdp.ep_size", "`fsdp`: ep_size 2: 1 expert to share among 2 groups of ranks")
        );
        let single = json!({"fsdp": {"ep_size": 2}, "model": {"stage": "low_noise"}});
        assert_eq!(
            refused(&two, single, ranks),
            told("fsdp.ep_size", "`fsdp`: ep_size 2: 1 expert to share among 2 groups of ranks")
        );
    }
    assert_eq!(
        refused(&two, json!({"fsdp": {"ep_size": 4}}), 4),
        told("fsdp.ep_size", "`fsdp`: ep_size 4: 2 experts to share among 4 groups of ranks")
    );
    assert_eq!(
        refused(&one, json!({"model": {"stage": "high_noise"}}), 1),
        told("model.stage", "`model.stage` is `high_noise`, but the model has one denoiser")
    );
    assert_eq!(
        refused(&one, json!({"model": {"boundary_ratio": 0.9}}), 1),
        told("model.boundary_ratio", "`model.boundary_ratio` is 0.9, but the model has one denoiser")
    );
    assert_eq!(
        refused(&two, json!({"model": {"boundary_ratio": 1.5}}), 1),
        told("model.boundary_ratio", "`model.boundary_ratio` is 1.5, expected a number between 0 and 1")
    );
    let (field, message) = refused(&two, json!({"model": {"stage": "middle"}}), 1).unwrap();
    assert!(field == "model.stage" && message.contains("`middle`"), "{message}");
    let narrow = json!({"model": {"stage": "high_noise"}, "flow_matching": {"adapter_type": "simple", "logit_mean": -9.0, "mix_uniform_ratio": 0.0}});
    let (field, message) = refused(&two, narrow, 1).unwrap();
    assert_eq!(field, "flow_matching.timestep_sampling");
    assert!(message.starts_with("fewer than one noise level in a thousand is drawn from 0.875"), "{message}");
    let unseen = json!({"model": {"stage": "high_noise"}, "validation": {"sigmas": [0.1, 0.3]}});
    assert_eq!(refused(&two, unseen, 1).unwrap().0, "validation.sigmas");
    // What is trained is part of the key; where, is not.
    let key = |over: Value, ranks| check(&two, over, ranks).key;
    let plain = key(json!({}), 1);
    assert_eq!(plain, key(json!({"fsdp": {"ep_size": 2}}), 2));
    assert_eq!(plain, key(json!({"model": {"stage": "both"}}), 1));
    let others = [json!({"stage": "high_noise"}), json!({"stage": "low_noise"}), json!({"boundary_ratio": 0.9})];
    let keys = others.map(|model| key(json!({"model": model}), 1));
    assert!(keys.iter().all(|other| *other != plain) && keys[0] != keys[1]);
}

/// Shares of the data and the experts that they go through, for any number of groups.
#[test]
fn groups_of_ranks_share_out_the_experts() {
    let of = |experts, groups, shares: usize| {
        let division = experts::Division { experts, groups, shares };
        (0..shares).map(|share| division.of(share)).collect::<Vec<_>>()
    };
    assert_eq!(of(2, 1, 2), [(0..2, 0), (0..2, 1)]);
    assert_eq!(of(2, 2, 4), [(0..1, 0), (0..1, 1), (1..2, 0), (1..2, 1)]);
    assert_eq!(of(1, 1, 1), [(0..1, 0)]);
    assert_eq!(Mesh::alone().degree(spec::mesh::Axis::Ep), 1);
}

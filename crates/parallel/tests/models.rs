//! Every model of the registry in parts: the prediction of the whole model, and its gradients.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use models::{ModelFolder, family_of};
use nn::{BuildOptions, Builder, Conditions, Inputs, Parameters, Part, Weights};
use parallel::fsdp::{self, Model};
use tch::{Device, Kind, Tensor};

const FOLDERS: [&str; 4] = ["flux-tiny", "flux-odd", "wan-tiny", "wan-odd"];

fn wave(shape: &[i64], phase: f64) -> Tensor {
    let n = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    ((n * 0.739_085_1 + phase).sin() * 1.4).to_kind(Kind::Float).view(shape)
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures").join(name)
}

fn build(name: &str, part: Option<Part>) -> (Model, Parameters) {
    let folder = ModelFolder::open(folder(name)).unwrap();
    let weights = Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap();
    let builder = Builder::from_weights(weights, BuildOptions::trained(Device::Cpu));
    let builder = match part {
        Some(part) => builder.split(part, Kind::Float),
        None => builder,
    };
    let model = family_of(&folder).unwrap().transformer(&folder, &builder).unwrap();
    (model, builder.finish().unwrap())
}

fn inputs(name: &str) -> Inputs {
    let config: serde_json::Value =
        serde_json::from_slice(&fs_err::read(folder(name).join("transformer/config.json")).unwrap()).unwrap();
    let size = |key: &str| config[key].as_i64().unwrap();
    let (latents, conditions) = if name.starts_with("flux") {
        let conditions = [
            ("t5".to_owned(), wave(&[2, 5, size("joint_attention_dim")], 0.4)),
            ("clip_pooled".to_owned(), wave(&[2, size("pooled_projection_dim")], 0.3)),
        ];
        (wave(&[2, size("in_channels") / 4, 4, 6], 0.1), Conditions::from(conditions))
    } else {
        let conditions = [("umt5".to_owned(), wave(&[2, 5, size("text_dim")], 0.4))];
        (wave(&[2, size("in_channels"), 3, 4, 6], 0.1), Conditions::from(conditions))
    };
    let guided = config["guidance_embeds"].as_bool().unwrap_or(false);
    Inputs {
        latents,
        sigma: Tensor::from_slice(&[0.3f32, 0.8]),
        conditions,
        guidance: guided.then(|| Tensor::from_slice(&[3.5f32, 2.0])),
        compute: Kind::Float,
    }
}

/// The prediction; backward of a number made of it, times `weight`.
fn pass(model: &Model, inputs: &Inputs, recompute: bool, weight: f64) -> Vec<f32> {
    let prediction = model.forward(inputs, recompute).unwrap();
    let loss = (&prediction * wave(&prediction.size(), 0.7)).sum(Kind::Float) * weight;
    torch::autograd::backward(&[loss], &[], false).unwrap();
    Vec::try_from(prediction.detach().reshape([-1])).unwrap()
}

#[test]
fn a_model_in_parts_is_the_whole_model() {
    for name in FOLDERS {
        let (model, parameters) = build(name, None);
        let expected = pass(&model, &inputs(name), false, 1.0);
        let gradient = |tensor: &Tensor| -> Vec<f32> { Vec::try_from(tensor.grad().reshape([-1])).unwrap() };
        let gradients: BTreeMap<String, Vec<f32>> =
            parameters.weights.iter().map(|named| (named.name.clone(), gradient(&named.tensor))).collect();
        for (ranks, recompute) in [(1, false), (2, false), (2, true), (4, true)] {
            comm::testing::ranks(ranks, Duration::from_mins(2), |world| {
                let part = Part { index: world.rank(), count: ranks };
                let (model, parameters) = build(name, Some(part));
                let (model, shards) = fsdp::apply(model, &parameters, world.everyone().unwrap()).unwrap();
                let freed = || parameters.weights.iter().map(|named| torch::storage::bytes(&named.tensor)).sum::<u64>();
                assert_eq!(freed(), 0, "nobody holds the whole");
                // Twice: gradients of micro-batches add up.
                for times in 1..=2 {
                    let found = pass(&model, &inputs(name), recompute, 1.0 / ranks as f64);
                    assert_eq!(found, expected, "{name}");
                    shards.end_backward().unwrap();
                    assert_eq!(freed(), 0);
                    for named in &parameters.parts {
                        let (found, expected) = (
                            gradient(&named.tensor),
                            &gradients[&named.name][part.range(gradients[&named.name].len())],
                        );
                        let scale = gradients[&named.name].iter().fold(0f32, |most, x| most.max(x.abs()));
                        assert_eq!(found.len(), expected.len());
                        for (found, expected) in found.iter().zip(expected) {
                            let expected = expected * times as f32;
                            assert!(
                                (found - expected).abs() <= 2e-5 * scale * times as f32,
                                "{name} {} {found} {expected}",
                                named.name
                            );
                        }
                    }
                }
                shards.finish().unwrap();
            });
        }
    }
}

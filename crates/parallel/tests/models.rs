//! Every model of the registry in parts: the prediction of the whole model, and its gradients.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

use std::collections::BTreeMap;
use std::time::Duration;

use models::testing::{Sample, Size, fixtures, wave};
use models::{ModelFolder, family_of};
use nn::{BuildOptions, Builder, Inputs, Parameters, Part, Weights};
use parallel::Options;
use parallel::fsdp::{self, Model};
use tch::{Device, Kind, Tensor};

fn build(folder: &ModelFolder, part: Option<Part>) -> (Model, Parameters) {
    let weights = Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap();
    let builder = Builder::from_weights(weights, BuildOptions::trained(Device::Cpu));
    let builder = match part {
        Some(part) => builder.split(part, Kind::Float),
        None => builder,
    };
    let model = family_of(folder).unwrap().transformer(folder, &builder).unwrap();
    (model, builder.finish().unwrap())
}

fn inputs(folder: &ModelFolder) -> Inputs {
    Sample::new(folder, Size::small(folder).unwrap(), Kind::Float).unwrap().inputs
}

/// The prediction; backward of a number made of it, times `weight`.
fn pass(model: &Model, inputs: &Inputs, recompute: bool, weight: f64) -> Vec<f32> {
    let prediction = model.forward(inputs, recompute.into()).unwrap();
    let loss = (&prediction * wave(&prediction.size(), 0.7)).sum(Kind::Float) * weight;
    torch::autograd::backward(&[loss], &[], false).unwrap();
    Vec::try_from(prediction.detach().reshape([-1])).unwrap()
}

#[test]
fn a_model_in_parts_is_the_whole_model() {
    for (name, folder) in fixtures() {
        let (model, parameters) = build(&folder, None);
        let expected = pass(&model, &inputs(&folder), false, 1.0);
        let gradient = |tensor: &Tensor| -> Vec<f32> { Vec::try_from(tensor.grad().reshape([-1])).unwrap() };
        let gradients: BTreeMap<String, Vec<f32>> =
            parameters.weights.iter().map(|named| (named.name.clone(), gradient(&named.tensor))).collect();
        let usual = Options::default();
        for (ranks, recompute, options) in [
            (1, false, usual),
            (2, false, Options { reshard: Some(false), forward_ahead: 0, backward_ahead: 0, defer: false, ..usual }),
            (2, true, Options { reshard: Some(true), forward_ahead: 9, backward_ahead: 9, ..usual }),
            (4, true, Options { backward_ahead: 0, defer: false, ..usual }),
            (2, false, Options { reduce: Kind::BFloat16, ..usual }),
        ] {
            // Of two ranks' halves, of their sum, and of that added to the earlier one.
            let most = if options.reduce == Kind::BFloat16 { 3.0 * 2f32.powi(-8) } else { 2e-5 };
            comm::testing::ranks(ranks, Duration::from_mins(2), |world| {
                let part = Part { index: world.rank(), count: ranks };
                let (model, parameters) = build(&folder, Some(part));
                let blocks = 0..model.blocks().len();
                let everyone = world.everyone().unwrap();
                let (model, shards) = fsdp::apply(model, &parameters, everyone, options, &[blocks]).unwrap();
                let freed = || parameters.weights.iter().map(|named| torch::storage::bytes(&named.tensor)).sum::<u64>();
                assert_eq!(freed(), 0, "nobody holds the whole");
                // Twice: gradients of micro-batches add up.
                for times in 1..=2 {
                    if times == 2 {
                        shards.before_last_backward(0);
                    }
                    let found = pass(&model, &inputs(&folder), recompute, 1.0 / ranks as f64);
                    assert_eq!(found, expected, "{name}");
                    shards.end_backward(0).unwrap();
                    assert_eq!(freed(), 0);
                    if options.defer && times == 1 {
                        assert!(parameters.parts.iter().all(|named| !named.tensor.grad().defined()));
                        continue;
                    }
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
                                (found - expected).abs() <= most * scale * times as f32,
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
    assert_eq!(nn::attention::unfused(), None);
}

//! Every model of the registry, on every kind of mesh that fits it: predictions, and after a backward the gradients of all
//! parameters, are those of one rank.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use models::testing::{Sample, Size, fixtures, wave};
use models::{ModelFolder, family_of};
use nn::{BuildOptions, Builder, Inputs, Parameters, Shared, Weights};
use parallel::fsdp::Model;
use parallel::{Frame, Outline, Pass, Team};
use spec::Mesh;
use spec::mesh::{Asked, Axis};
use tch::{Device, Kind, Tensor};

/// Parts of the sample's gradient, of which stages may have several under way.
const BATCHES: usize = 3;

/// A sample that threads may share.
struct Given {
    latents: Shared,
    sigma: Shared,
    conditions: BTreeMap<String, Shared>,
    guidance: Option<Shared>,
}

impl Given {
    /// With as many tokens as divide badly.
    fn new(folder: &ModelFolder) -> Self {
        let Inputs { latents, sigma, conditions, guidance, .. } =
            Sample::new(folder, Size::small(folder).unwrap(), Kind::Float).unwrap().inputs;
        Self {
            latents: latents.into(),
            sigma: sigma.into(),
            conditions: conditions.into_iter().map(|(name, tensor)| (name, tensor.into())).collect(),
            guidance: guidance.map(Shared::from),
        }
    }

    fn inputs(&self) -> Inputs {
        Inputs {
            latents: self.latents.handle(),
            sigma: self.sigma.handle(),
            conditions: self.conditions.iter().map(|(name, tensor)| (name.clone(), tensor.handle())).collect(),
            guidance: self.guidance.as_ref().map(Shared::handle),
            compute: Kind::Float,
        }
    }
}

fn builder(folder: &ModelFolder) -> Builder {
    let weights = Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap();
    Builder::from_weights(weights, BuildOptions::trained(Device::Cpu))
}

fn build(folder: &ModelFolder, builder: &Builder) -> (Model, Parameters) {
    let model = family_of(folder).unwrap().transformer(folder, builder).unwrap();
    (model, builder.finish().unwrap())
}

/// A number made of the prediction, whose gradient is not even.
fn loss(prediction: &Tensor) -> Tensor {
    (prediction * wave(&prediction.size(), 0.7)).sum(Kind::Float)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.reshape([-1]).contiguous()).unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], scale: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let far = found.iter().zip(expected).fold(0f32, |far, (a, b)| far.max((a - b).abs()));
    assert!(far <= 3e-5 * scale.max(1e-6), "{what}: {far:e} of {scale:e}");
}

fn mesh(asked: &Asked) -> Mesh {
    let Asked { cp, tp, pp, .. } = *asked;
    let [cp, tp, pp] = [cp, tp, pp].map(|degree| degree.max(1));
    let asked = Asked { cp, tp, pp, ep: 1, sharded: true, ..*asked };
    Mesh::of(&asked, asked.dp.unwrap_or(1) * cp * tp * pp).unwrap()
}

/// Meshes, with the runs of blocks of each rank.
fn meshes() -> Vec<(Mesh, usize)> {
    let none = Asked::default();
    let asked = [
        Asked { tp: 2, ..none },
        Asked { tp: 3, ..none },
        Asked { tp: 2, dp: Some(2), ..none },
        Asked { tp: 2, dp: Some(2), dp_replicate: Some(2), ..none },
        Asked { cp: 2, ..none },
        Asked { cp: 3, ..none },
        Asked { cp: 4, cp_ring: Some(2), ..none },
        Asked { cp: 2, cp_ring: Some(2), dp: Some(2), ..none },
        Asked { cp: 2, cp_ring: Some(2), tp: 2, ..none },
        Asked { pp: 2, ..none },
        Asked { pp: 3, ..none },
        Asked { pp: 2, dp: Some(2), ..none },
        Asked { pp: 2, dp: Some(2), dp_replicate: Some(2), ..none },
        Asked { pp: 2, tp: 2, ..none },
        Asked { pp: 2, cp: 2, ..none },
        Asked { pp: 2, tp: 2, cp: 2, cp_ring: Some(2), ..none },
        Asked { pp: 2, tp: 2, dp: Some(2), ..none },
    ];
    let interleaved = [
        (Asked { pp: 2, ..none }, 2),
        (Asked { pp: 2, dp: Some(2), ..none }, 2),
        (Asked { pp: 2, dp: Some(2), dp_replicate: Some(2), ..none }, 2),
        (Asked { pp: 2, cp: 2, ..none }, 2),
    ];
    let whole = asked.iter().map(|asked| (mesh(asked), 1));
    whole.chain(interleaved.iter().map(|(asked, chunks)| (mesh(asked), *chunks))).collect()
}

fn outline(folder: &ModelFolder) -> Outline {
    let (model, parameters) = build(folder, &Builder::meta(BuildOptions::trained(Device::Cpu)));
    Outline::of(model.as_ref(), &parameters).unwrap()
}

/// The model on one rank: its prediction, and the gradient of each parameter.
fn reference(folder: &ModelFolder, inputs: &Inputs) -> (Vec<f32>, BTreeMap<String, Vec<f32>>) {
    let (model, parameters) = build(folder, &builder(folder));
    let prediction = model.forward(inputs, false.into()).unwrap();
    torch::autograd::backward(&[loss(&prediction)], &[], false).unwrap();
    let gradients = parameters.weights.iter().map(|named| (named.name.clone(), values(&named.tensor.grad())));
    (values(&prediction.detach()), gradients.collect())
}

/// Whether the layers of the model can be divided so.
fn fits(folder: &ModelFolder, mesh: &Mesh, chunks: usize) -> bool {
    if outline(folder).stages(mesh.degree(Axis::Pp) * chunks).is_err() {
        return false;
    }
    let Some(division) = parallel::tokens::division(mesh) else { return true };
    let builder = Builder::meta(BuildOptions::trained(Device::Cpu)).divided(division);
    match family_of(folder).unwrap().transformer(folder, &builder) {
        Ok(_) => true,
        Err(error) if error.to_string().contains("do not divide into") => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_model_on_a_mesh_is_the_model() {
    let mut ran = BTreeSet::new();
    for (name, folder) in fixtures() {
        let (family, given) = (family_of(&folder).unwrap().name(), Given::new(&folder));
        let (expected, gradients) = reference(&folder, &given.inputs());
        let fitting = meshes().into_iter().enumerate().filter(|(_, (mesh, chunks))| fits(&folder, mesh, *chunks));
        for (number, (mesh, chunks)) in fitting {
            let wide = Axis::ALL.into_iter().filter(|axis| mesh.degree(*axis) > 1);
            ran.extend(wide.map(|axis| (family, axis)));
            let recompute = number % 2 == 1;
            comm::testing::launches(mesh.world(), |launch| {
                let what = format!("{name} on {mesh}, {chunks} each, recompute {recompute}");
                let team = Team::join(launch, mesh, Duration::from_mins(2), Device::Cpu).unwrap();
                let frame = Frame::new(&team, outline(&folder)).unwrap().interleaved(&team, chunks).unwrap();
                let builder = frame.on(&team, builder(&folder), Kind::Float);
                let (model, parameters) = build(&folder, &builder);
                let (model, spread) = frame.spread(&team, model, &parameters).unwrap();
                // Every share of the data has the same samples, each of which counts as if it had a share of them.
                let weight = 1.0 / (team.redundancy() * team.share().1) as f64;
                let own = given.inputs();
                let mut under_way = BTreeMap::new();
                for action in spread.begin(BATCHES) {
                    let key = (action.chunk, action.batch);
                    match action.pass {
                        Pass::Forward => {
                            let (prediction, flight) =
                                spread.forward(model.as_ref(), &own, recompute.into(), action).unwrap();
                            let scale = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
                            if let Some(prediction) = &prediction {
                                let found = values(&prediction.detach());
                                assert_close(&format!("{what}: prediction"), &found, &expected, scale);
                            }
                            let part = weight / BATCHES as f64;
                            under_way.insert(key, (flight, prediction.map(|prediction| loss(&prediction) * part)));
                        }
                        Pass::Backward => {
                            let (flight, loss) = under_way.remove(&key).unwrap();
                            if action.batch + 1 == BATCHES {
                                spread.before_last_backward(action);
                            }
                            spread.backward(flight, loss).unwrap();
                        }
                    }
                }
                spread.finish().unwrap();
                for named in parameters.trainable() {
                    let whole = &gradients[&named.name];
                    let runs = spread.share(&named.name).unwrap().runs();
                    let own: Vec<f32> =
                        runs.iter().flat_map(|run| &whole[run.first..][..run.length]).copied().collect();
                    let scale = whole.iter().fold(0f32, |most, x| most.max(x.abs()));
                    assert_close(&format!("{what}: {}", named.name), &values(&named.tensor.grad()), &own, scale);
                }
                team.leave().unwrap();
            });
        }
    }
    for family in models::FAMILIES {
        for axis in [Axis::Pp, Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Tp] {
            assert!(ran.contains(&(family.name(), axis)), "no model of `{}` ran along {axis}", family.name());
        }
    }
}

//! Divided layers are the whole layers, in float64: outputs, gradients of inputs, gradients of parameters.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nn::attention::SelfAttention;
use nn::{
    Block, BuildOptions, Builder, Columns, Conditions, Inputs, Linear, RmsNorm, SharedBlock, State, Transformer,
    attention, rotary,
};
use parallel::Team;
use parallel::tokens::Tokens;
use spec::Mesh;
use spec::mesh::Asked;
use tch::{Device, Kind, Tensor};

const WIDTH: i64 = 24;
const HEADS: i64 = 4;
const HEAD: i64 = WIDTH / HEADS;

/// Attention with all that can be divided in it: norms over all heads, a modulated input, a stream that looks at a text.
struct Attention {
    modulation: Linear,
    qkv: Vec<Columns<3>>,
    norms: [RmsNorm; 2],
    attention: SelfAttention,
    out: Vec<Linear>,
    to_text: (Columns<1>, Columns<2>, Linear),
}

/// A feed-forward beside attention, brought back by one matrix over both.
struct Fused {
    inputs: Columns<4>,
    attention: SelfAttention,
    out: Linear,
}

struct Join;

struct Model {
    first: Linear,
    last: Linear,
    blocks: Vec<SharedBlock>,
}

fn heads(x: &Tensor) -> Tensor {
    x.unflatten(2, [-1, HEAD])
}

impl Block for Attention {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        let (vector, table, text) = (&shared[0], &shared[1], &shared[2]);
        let scale = self.modulation.forward(vector)?.unsqueeze(1);
        let projected: Vec<[Tensor; 3]> =
            stream.iter().zip(&self.qkv).map(|(x, qkv)| qkv.forward(&(x * &scale))).collect::<nn::Result<_>>()?;
        let joint = |i: usize| Tensor::cat(&projected.iter().map(|qkv| &qkv[i]).collect::<Vec<_>>(), 1);
        let turned = |norm: &RmsNorm, i| rotary::turn(&heads(&norm.forward(&joint(i))?), table);
        let out =
            self.attention.forward(&turned(&self.norms[0], 0)?, &turned(&self.norms[1], 1)?, &heads(&joint(2)))?;
        let lengths: Vec<i64> = projected.iter().map(|qkv| qkv[0].size()[1]).collect();
        let parts = out.split_with_sizes(lengths.as_slice(), 1);
        let (q, kv, to_text) = &self.to_text;
        let step = |((x, part), out): ((&Tensor, &Tensor), &Linear)| {
            let x = x + out.forward(part)?;
            let ([q], [k, v]) = (q.forward(&x)?, kv.forward(text)?);
            let [q, k, v] = [q, k, v].map(|x| heads(&x).transpose(1, 2));
            let seen = attention::merge_heads(&attention::scaled_dot_product(&q, &k, &v, None, None)?)?;
            Ok(&x + to_text.forward(&seen)?)
        };
        stream.iter().zip(&parts).zip(&self.out).map(step).collect()
    }
}

impl Block for Join {
    fn forward(&self, stream: &[Tensor], _: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        Ok(vec![Tensor::cat(stream, 1)])
    }

    fn has_parameters(&self) -> bool {
        false
    }
}

impl Block for Fused {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        let [q, k, v, hidden] = self.inputs.forward(&stream[0])?;
        let (q, k) = (rotary::turn(&heads(&q), &shared[1])?, rotary::turn(&heads(&k), &shared[1])?);
        let both = Tensor::cat(&[self.attention.forward(&q, &k, &heads(&v))?, hidden.gelu("tanh")], 2);
        Ok(vec![&stream[0] + self.out.forward(&both)?])
    }
}

impl Transformer for Model {
    fn embed(&self, inputs: &Inputs) -> nn::Result<State> {
        let of = |name: &str| inputs.conditions[name].shallow_clone();
        let stream = vec![self.first.forward(&of("a"))?, self.first.forward(&of("b"))?];
        Ok(State {
            stream,
            shared: vec![of("vector"), of("table"), of("text")],
            by_token: vec![1],
            latent_size: vec![],
        })
    }

    fn blocks(&self) -> &[SharedBlock] {
        &self.blocks
    }

    fn head(&self, state: State) -> nn::Result<Tensor> {
        self.last.forward(&state.stream[0])
    }
}

fn model(b: &Builder) -> nn::Result<Model> {
    let block = b.pp("blocks.0");
    let three = |name: &str| block.pp(name).columns(WIDTH, ["q", "k", "v"].map(|path| (path, WIDTH)), true);
    let cross = block.pp("cross");
    let first = Attention {
        modulation: block.pp("modulation").joined(8, WIDTH, true)?,
        qkv: vec![three("a")?, three("b")?],
        norms: [
            block.pp("norm_q").torch_rms_norm_of_heads(WIDTH, 1e-6)?,
            block.pp("norm_k").torch_rms_norm_of_heads(WIDTH, 1e-6)?,
        ],
        attention: block.self_attention(HEADS)?,
        out: vec![block.pp("out_a").rows(&[WIDTH], WIDTH, true)?, block.pp("out_b").rows(&[WIDTH], WIDTH, false)?],
        to_text: (
            cross.columns(WIDTH, [("q", WIDTH)], true)?,
            cross.columns_of_shared(10, [("k", WIDTH), ("v", WIDTH)], true)?,
            cross.pp("out").rows(&[WIDTH], WIDTH, true)?,
        ),
    };
    let block = b.pp("singles.0");
    let second = Fused {
        inputs: block.columns(WIDTH, [("q", WIDTH), ("k", WIDTH), ("v", WIDTH), ("mlp", 2 * WIDTH)], true)?,
        attention: block.self_attention(HEADS)?,
        out: block.pp("out").rows(&[WIDTH, 2 * WIDTH], WIDTH, true)?,
    };
    Ok(Model {
        first: b.pp("first").linear(6, WIDTH, true)?,
        last: b.pp("last").linear(WIDTH, 5, true)?,
        blocks: vec![Arc::new(first), Arc::new(Join), Arc::new(second)],
    })
}

fn wave(shape: &[i64], phase: f64) -> Tensor {
    let n = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    ((n * 0.739_085_1 + phase).sin() * 1.4).view(shape)
}

/// Streams of `a` and `b` tokens.
fn inputs(a: i64, b: i64) -> Inputs {
    let angles = wave(&[a + b, HEAD / 2], 0.9);
    let leaves = [("a", wave(&[2, a, 6], 0.1)), ("b", wave(&[2, b, 6], 0.2)), ("vector", wave(&[2, 8], 0.3))];
    let leaves = leaves.into_iter().chain([("text", wave(&[2, 3, 10], 0.4))]);
    let mut conditions: Conditions =
        leaves.map(|(name, tensor)| (name.to_owned(), tensor.set_requires_grad(true))).collect();
    conditions.insert("table".to_owned(), Tensor::stack(&[angles.cos(), angles.sin()], -1));
    let none = Tensor::zeros([2], (Kind::Double, Device::Cpu));
    Inputs { latents: none.shallow_clone(), sigma: none, conditions, guidance: None, compute: Kind::Double }
}

fn builder() -> Builder {
    let options = BuildOptions { device: Device::Cpu, storage: Kind::Double, trainable: true, adapter: None };
    Builder::random(7, options)
}

fn backward(model: &dyn Transformer, inputs: &Inputs, recompute: bool, weight: f64) -> Tensor {
    let y = model.forward(inputs, recompute.into()).unwrap();
    let loss = (&y * wave(&y.size(), 0.7)).sum(Kind::Double) * weight;
    torch::autograd::backward(&[loss], &[], false).unwrap();
    y.detach()
}

/// Name → value, of the whole model on one rank.
fn reference(inputs: &Inputs) -> BTreeMap<String, Tensor> {
    let builder = builder();
    let whole = model(&builder).unwrap();
    let y = backward(&whole, inputs, false, 1.0);
    let parameters = builder.finish().unwrap();
    let weights = parameters.weights.iter().map(|named| (named.name.clone(), named.tensor.grad()));
    weights.chain(leaves(inputs)).chain([("y".to_owned(), y)]).collect()
}

/// Gradients of the inputs.
fn leaves(inputs: &Inputs) -> Vec<(String, Tensor)> {
    let of = inputs.conditions.iter().filter(|(_, tensor)| tensor.requires_grad());
    of.map(|(name, tensor)| (format!("d {name}"), tensor.grad())).collect()
}

#[track_caller]
fn assert_same(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{what}");
    // A shift of all keys changes nothing, so the gradient of their bias is rounding around 0.
    let far = (found - expected).abs().max().double_value(&[]) / expected.abs().max().double_value(&[]).max(1e-3);
    assert!(far <= 1e-10, "{what}: {far:e}");
}

/// So many ranks divide features, so many the context, of which so many in a ring.
fn mesh(tp: usize, cp: usize, ring: usize) -> Mesh {
    let asked = Asked { tp, cp, cp_ring: Some(ring), pp: 1, ep: 1, sharded: true, ..Asked::default() };
    Mesh::of(&asked, tp * cp).unwrap()
}

/// Checks every tensor of every rank against the whole model's.
fn check(mesh: Mesh, a: i64, b: i64, recompute: bool) {
    let what = format!("{mesh}, {a} and {b} tokens, recompute {recompute}");
    let expected = reference(&inputs(a, b));
    let whole = nn::Shared::from(expected["y"].shallow_clone());
    let sums = comm::testing::launches(mesh.world(), |launch| {
        let team = Team::join(launch, mesh, Duration::from_mins(1), Device::Cpu).unwrap();
        let tokens = Tokens::new(&team).unwrap().unwrap();
        let builder = builder().divided(tokens.division(team.mesh()).unwrap());
        let divided = tokens.apply(Box::new(model(&builder).unwrap()));
        let parameters = builder.finish().unwrap();
        let own = inputs(a, b);
        let y = backward(divided.as_ref(), &own, recompute, 1.0 / team.redundancy() as f64);
        assert_same(&format!("{what}: y"), &y, &whole);
        // Each rank holds gradients of its own; those of the inputs are the sums over ranks.
        let weights = parameters.weights.iter().map(|named| (named.name.clone(), named.tensor.grad()));
        (leaves(&own).into_iter().chain(weights).collect::<Vec<_>>(), parameters.shares)
    });
    // What ranks hold of a tensor adds up to the whole tensor, copies included.
    for (name, whole) in expected.iter().filter(|(name, _)| *name != "y") {
        let total = Tensor::zeros([whole.numel() as i64], (Kind::Double, Device::Cpu));
        for (gradients, shares) in &sums {
            let (_, gradient) = gradients.iter().find(|(other, _)| other == name).unwrap();
            let share = shares.get(name).cloned().unwrap_or_else(|| nn::Share::whole(&whole.size()));
            let (flat, mut from) = (gradient.reshape([-1]).to_kind(Kind::Double), 0);
            for run in share.runs() {
                let length = run.length as i64;
                let _ = total.narrow(0, run.first as i64, length).f_add_(&flat.narrow(0, from, length)).unwrap();
                from += length;
            }
        }
        assert_same(&format!("{what}: {name}"), &total.view(whole.size().as_slice()), whole);
    }
}

#[test]
fn features_and_tokens_on_several_ranks_are_the_whole() {
    for (tp, a, b, recompute) in [(2, 4, 6, false), (2, 3, 5, true), (4, 5, 9, false)] {
        check(mesh(tp, 1, 1), a, b, recompute);
    }
}

#[test]
fn a_context_on_several_ranks_is_the_whole() {
    // Ranks that trade heads; a ring; a ring of pairs that trade heads; both with features divided as well.
    for (tp, cp, ring, a, b, recompute) in [
        (1, 2, 1, 4, 6, false),
        (1, 2, 2, 3, 5, false),
        (1, 4, 4, 3, 9, true),
        (1, 4, 2, 3, 6, false),
        (2, 2, 1, 1, 7, true),
        (2, 2, 2, 3, 5, false),
    ] {
        check(mesh(tp, cp, ring), a, b, recompute);
    }
}

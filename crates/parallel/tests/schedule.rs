//! What one step asks of the other ranks, call by call: no more than theory says.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use models::{ModelFolder, family_of};
use nn::{BuildOptions, Builder, Conditions, Inputs, Transformer, Weights};
use parallel::{Action, Flight, Frame, Options, Outline, Pass, Spread, Team};
use spec::Mesh;
use spec::mesh::Asked;
use tch::{Device, Kind, Tensor};

/// Sizes of the tiny FLUX, and of what it is given: one sample of 4 image and 4 text tokens.
const WIDTH: usize = 16;
const BLOCKS: usize = 2;
const TOKENS: usize = 8;
const F32: usize = 4;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures/flux-tiny")
}

fn inputs() -> Inputs {
    let ones = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
    let conditions = [("t5".to_owned(), ones(&[1, 4, 16])), ("clip_pooled".to_owned(), ones(&[1, 16]))];
    Inputs {
        latents: ones(&[1, 16, 4, 4]),
        sigma: ones(&[1]),
        conditions: Conditions::from(conditions),
        guidance: Some(ones(&[1])),
        compute: Kind::Float,
    }
}

/// (call, members, bytes) → how often each rank makes it, in forward and in backward of one micro-batch; by rank.
type Counts = BTreeMap<(&'static str, usize, usize), usize>;

/// The one forward of a step of one micro-batch.
fn forward(model: &dyn Transformer, spread: &Spread) -> (Option<Tensor>, Flight) {
    let action: Action = spread.begin(1)[0];
    spread.forward(model, &inputs(), false.into(), action).unwrap()
}

fn backward(spread: &Spread, (prediction, flight): (Option<Tensor>, Flight)) {
    spread.backward(flight, prediction.map(|prediction| prediction.sum(Kind::Float))).unwrap();
}

/// Of each rank of a mesh, what `body` gives on its share of the tiny FLUX.
fn spread<T: Send>(
    asked: &Asked,
    options: Options,
    body: impl Fn(&Team, &dyn Transformer, &Spread) -> T + Sync,
) -> Vec<T> {
    let [cp, tp, pp] = [asked.cp, asked.tp, asked.pp].map(|degree| degree.max(1));
    let world = asked.dp.unwrap_or(1) * cp * tp * pp;
    let mesh = Mesh::of(&Asked { cp, tp, pp, ep: 1, sharded: true, ..*asked }, world).unwrap();
    comm::testing::launches(mesh.world(), |launch| {
        let team = Team::join(launch, mesh, Duration::from_mins(1), Device::Cpu).unwrap();
        let folder = ModelFolder::open(folder()).unwrap();
        let family = family_of(&folder).unwrap();
        let meta = Builder::meta(BuildOptions::trained(Device::Cpu));
        let whole = family.transformer(&folder, &meta).unwrap();
        let frame = Frame::new(&team, Outline::of(whole.as_ref(), &meta.finish().unwrap()).unwrap()).unwrap();
        let frame = frame.with(options);
        let weights = Weights::open(&folder.path.join("transformer"), "diffusion_pytorch_model").unwrap();
        let builder = Builder::from_weights(weights, BuildOptions::trained(Device::Cpu));
        let builder = frame.on(&team, builder, Kind::Float);
        let model = family.transformer(&folder, &builder).unwrap();
        let (model, spread) = frame.spread(&team, model, &builder.finish().unwrap()).unwrap();
        let given = body(&team, model.as_ref(), &spread);
        team.leave().unwrap();
        given
    })
}

fn counted(asked: &Asked, named: &[&str]) -> Vec<[Counts; 2]> {
    spread(asked, Options::default(), |team, model, spread| {
        let count = || {
            let mut counts = Counts::new();
            for call in team.trace().end().into_iter().filter(|call| named.contains(&call.name)) {
                *counts.entry((call.name, call.members, call.bytes)).or_default() += 1;
            }
            counts
        };
        team.trace().begin();
        let under_way = forward(model, spread);
        let there = count();
        team.trace().begin();
        backward(spread, under_way);
        let back = count();
        spread.finish().unwrap();
        [there, back]
    })
}

fn of<const N: usize>(calls: [(&'static str, usize, usize, usize); N]) -> Counts {
    let mut counts = Counts::new();
    for (name, members, bytes, times) in calls {
        *counts.entry((name, members, bytes)).or_default() += times;
    }
    counts
}

/// Of two ranks. Two-stream blocks gather and scatter each stream twice (attention, feed-forward), one-stream blocks once;
/// vectors of modulation are gathered, and at the end the tokens. Backward is the mirror image.
#[test]
fn features_are_gathered_and_scattered_once_a_layer() {
    let stream = TOKENS / 2 * WIDTH * F32; // of one stream, all ranks
    let vectors = [(6, 2 * BLOCKS), (3, BLOCKS), (2, 1)]; // of so many widths, so often
    for [forward, backward] in
        counted(&Asked { tp: 2, ..Asked::default() }, &["all_gather", "reduce_scatter", "all_reduce"])
    {
        let mut expected = of([
            ("all_gather", 2, stream / 2, 4 * BLOCKS),
            ("all_gather", 2, stream, BLOCKS + 1),
            ("reduce_scatter", 2, stream, 4 * BLOCKS),
            ("reduce_scatter", 2, 2 * stream, BLOCKS),
        ]);
        for (widths, times) in vectors {
            *expected.entry(("all_gather", 2, widths * WIDTH / 2 * F32)).or_default() += times;
        }
        assert_eq!(forward, expected);
        let mirrored = expected.into_iter().map(|((name, members, bytes), times)| match name {
            "all_gather" => (("reduce_scatter", members, bytes * members), times),
            _ => (("all_gather", members, bytes / members), times),
        });
        let mut expected = Counts::new();
        mirrored.for_each(|(call, times)| *expected.entry(call).or_default() += times);
        assert_eq!(backward, expected);
    }
}

/// Ranks that trade heads: queries, keys and values together there, the result back.
#[test]
fn tokens_are_traded_for_heads_twice_a_block() {
    let own = TOKENS / 2 * WIDTH * F32;
    for [forward, backward] in counted(&Asked { cp: 2, ..Asked::default() }, &["all_to_all", "send", "receive"]) {
        let expected = of([("all_to_all", 2, 3 * own, 2 * BLOCKS), ("all_to_all", 2, own, 2 * BLOCKS)]);
        assert_eq!((&forward, &backward), (&expected, &expected));
    }
}

/// A ring of n: keys and values move on n - 1 times; in backward they do so again, and their gradients n times, back home.
#[test]
fn keys_and_values_go_round_the_ring_once() {
    for ranks in [2, 4] {
        let block = 2 * TOKENS / ranks * WIDTH * F32;
        let asked = Asked { cp: ranks, cp_ring: Some(ranks), ..Asked::default() };
        for [forward, backward] in counted(&asked, &["all_to_all", "send", "receive"]) {
            let moved = |times| of([("send", ranks, block, times), ("receive", ranks, block, times)]);
            assert_eq!(forward, moved((ranks - 1) * 2 * BLOCKS));
            assert_eq!(backward, moved((2 * ranks - 1) * 2 * BLOCKS));
        }
    }
}

/// Between two stages: the two streams there, with their number and shapes, and their gradients back.
#[test]
fn only_streams_go_from_stage_to_stage() {
    let ranks = counted(&Asked { pp: 2, ..Asked::default() }, &["send", "receive"]);
    let (number, shape, stream) = (8, 9 * 8, TOKENS / 2 * WIDTH * F32);
    let there = |name| of([(name, 2, number, 1), (name, 2, shape, 2), (name, 2, stream, 2)]);
    let back = |name| of([(name, 2, stream, 2)]);
    assert_eq!(ranks[0], [there("send"), back("receive")]);
    assert_eq!(ranks[1], [there("receive"), back("send")]);
}

/// What two ranks in parts do in one step of so many micro-batches, in order: `g` gathers, `r` reduces; of the root `o`, a
/// two-stream block `d`, or a one-stream block `s`.
fn course(options: Options, batches: usize) -> String {
    let mut ranks = spread(&Asked { dp: Some(2), ..Asked::default() }, options, |team, model, spread| {
        team.trace().begin();
        for batch in 1..=batches {
            let under_way = forward(model, spread);
            if batch == batches {
                spread.before_last_backward(Action { pass: Pass::Backward, chunk: 0, batch: 0 });
            }
            backward(spread, under_way);
        }
        let calls = team.trace().end();
        spread.finish().unwrap();
        calls
    });
    let calls = ranks.swap_remove(0);
    // What is gathered first is the root. A gather's bytes are one rank's, a reduction's those of both.
    let gathers: Vec<usize> = calls.iter().filter(|call| call.name == "all_gather").map(|call| call.bytes).collect();
    let mut sizes: Vec<usize> = Vec::new();
    for bytes in gathers {
        if !sizes.contains(&bytes) {
            sizes.push(bytes);
        }
    }
    assert_eq!(sizes.len(), 3, "the root and two kinds of blocks");
    let of = |bytes: usize| ["o", "d", "s"][sizes.iter().position(|size| *size == bytes).unwrap()];
    let told = |call: &comm::Call| match call.name {
        "all_gather" => format!("g{}", of(call.bytes)),
        "reduce_scatter" => format!("r{}", of(call.bytes / 2 * F32 / options.reduce.elt_size_in_bytes())),
        _ => panic!("{call:?}"),
    };
    calls.iter().map(told).collect::<Vec<_>>().join(" ")
}

/// At most two gathers and one reduction a block; fewer if a block stays between forward and backward. What is gathered ahead
/// changes the order alone.
#[test]
fn blocks_are_gathered_as_the_options_say() {
    let usual = Options { defer: false, ..Options::default() };
    let forward = "go gd gd gs gs";
    let reduced = |reshard, backward_ahead| course(Options { reshard, backward_ahead, ..usual }, 1);
    assert_eq!(reduced(Some(true), 0), format!("{forward} gs rs gs rs gd rd gd rd ro"));
    assert_eq!(reduced(Some(true), 1), format!("{forward} gs gs rs gd rs gd rd rd ro"));
    assert_eq!(reduced(Some(true), 2), format!("{forward} gs gs gd rs gd rs rd rd ro"));
    // The last block stays: its backward is next.
    assert_eq!(reduced(None, 2), format!("{forward} gs gd rs gd rs rd rd ro"));
    assert_eq!(reduced(Some(false), 2), format!("{forward} rs rs rd rd ro"));
    let half = Options { reduce: Kind::BFloat16, reshard: Some(false), ..usual };
    assert_eq!(course(half, 1), format!("{forward} rs rs rd rd ro"), "as many, of half the bytes");
}

/// Of a step of three micro-batches: three reductions of everything, or one.
#[test]
fn deferred_gradients_travel_once_a_step() {
    let options = Options { reshard: Some(false), ..Options::default() };
    let (forward, backward) = ("go gd gd gs gs", "rs rs rd rd ro");
    let each = course(Options { defer: false, ..options }, 3);
    assert_eq!(each, [forward, backward].repeat(3).join(" "));
    assert_eq!(course(options, 3), [forward, forward, forward, backward].join(" "));
}

/// Blocks that are here or on their way when the first one meets the ranks that have the other channels.
#[test]
fn as_many_blocks_are_gathered_ahead_as_asked() {
    let [tokens, _] = &counted(&Asked { tp: 2, ..Asked::default() }, &["all_gather"])[0];
    let of_tokens = |call: &comm::Call| tokens.keys().any(|(_, _, bytes)| *bytes == call.bytes);
    for ahead in [0, 1, 3] {
        let options = Options { forward_ahead: ahead, ..Options::default() };
        let gathered = spread(&Asked { dp: Some(2), tp: 2, ..Asked::default() }, options, |team, model, spread| {
            team.trace().begin();
            let under_way = forward(model, spread);
            let calls = team.trace().end();
            backward(spread, under_way);
            spread.finish().unwrap();
            calls.iter().take_while(|call| !of_tokens(call)).count()
        });
        assert_eq!(gathered, [2 + ahead; 4], "the root, the first block, and those ahead");
    }
}

//! Checkpointing gives the plain path's gradients, bit for bit, and backward nodes report what goes wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nn::{Block, BuildOptions, Builder, Linear, Named, Recompute, SharedBlock, State, lora, remat};
use tch::{Kind, Tensor};

use crate::{CPU, assert_same, random};

/// Two streams that mix, modulated by a shared vector: the shape of a FLUX block.
struct Mix {
    left: Linear,
    right: Linear,
    modulation: Linear,
    runs: Arc<AtomicUsize>,
}

impl Block for Mix {
    fn forward(&self, stream: &[Tensor], shared: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        self.runs.fetch_add(1, Ordering::SeqCst);
        let scale = self.modulation.forward(&shared[0])?.unsqueeze(1);
        let left = &stream[0] + self.left.forward(&stream[1])?.gelu("tanh") * &scale;
        let right = &stream[1] + self.right.forward(&left)?.tanh() * &stream[1];
        Ok(vec![left, right, stream[2].shallow_clone()]) // the last one is passed on
    }
}

struct Chain {
    blocks: Vec<SharedBlock>,
    parameters: Vec<Named>,
    runs: Arc<AtomicUsize>,
}

fn chain(adapter: Option<lora::Spec>) -> Chain {
    let b = Builder::random(7, BuildOptions { device: CPU, storage: Kind::Float, trainable: true, adapter });
    let runs = Arc::new(AtomicUsize::new(0));
    let blocks = (0..3).map(|i| -> SharedBlock {
        let b = b.pp(i);
        let layer = |name: &str| b.pp(name).linear(16, 16, true).unwrap();
        Arc::new(Mix {
            left: layer("left"),
            right: layer("right"),
            modulation: layer("modulation"),
            runs: Arc::clone(&runs),
        })
    });
    let blocks = blocks.collect();
    let built = b.finish().unwrap();
    // B is 0 at the start; without this A would get no gradient to compare.
    for (i, named) in built.adapter.iter().enumerate() {
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&(random(i as u64, &named.tensor.size()) * 0.1)));
    }
    Chain { blocks, parameters: built.trainable(), runs }
}

/// Outputs, and gradients of all parameters and inputs.
fn run(chain: &Chain, frozen_inputs: bool, recompute: Recompute, kind: Kind) -> Vec<Tensor> {
    let tensors: Vec<_> = chain.parameters.iter().map(|named| named.tensor.shallow_clone()).collect();
    torch::autograd::clear_gradients(&tensors).unwrap();
    let input = |seed| random(seed, &[2, 5, 16]).to_kind(kind).set_requires_grad(!frozen_inputs);
    let inputs = [input(1), input(2), input(3)];
    let time = random(4, &[2, 16]).to_kind(kind).set_requires_grad(!frozen_inputs);
    let mut state = State {
        stream: inputs.iter().map(Tensor::shallow_clone).collect(),
        shared: vec![time.shallow_clone()],
        by_token: vec![],
        latent_size: vec![],
    };
    for (index, block) in chain.blocks.iter().enumerate() {
        let next = if recompute.covers(index) {
            remat::checkpoint(block, &state, recompute.offload)
        } else {
            block.forward(&state.stream, &state.shared)
        };
        state.stream = next.unwrap();
    }
    let loss =
        state.stream.iter().map(|x| x.to_kind(Kind::Float).square().sum(Kind::Float)).reduce(|a, b| a + b).unwrap();
    loss.backward();
    let leaves = tensors.iter().chain(&inputs).chain([&time]);
    let gradients = leaves
        .map(|leaf| if leaf.grad().defined() { leaf.grad().copy() } else { Tensor::zeros([0], (Kind::Float, CPU)) });
    state.stream.iter().map(Tensor::detach).chain(gradients.collect::<Vec<_>>()).collect()
}

fn compare(adapter: Option<lora::Spec>, frozen_inputs: bool, kind: Kind) {
    let chain = chain(adapter);
    let plain = run(&chain, frozen_inputs, Recompute::default(), kind);
    assert_eq!(chain.runs.swap(0, Ordering::SeqCst), 3);
    // All three blocks run twice; or, of every two the first.
    for (every, offload, runs) in [(1, false, 6), (1, true, 6), (2, false, 5), (2, true, 5), (3, false, 4)] {
        let recomputed = run(&chain, frozen_inputs, Recompute { every, offload }, kind);
        assert_eq!(chain.runs.swap(0, Ordering::SeqCst), runs);
        assert_eq!(plain.len(), recomputed.len());
        for (found, expected) in recomputed.iter().zip(&plain) {
            assert_same(found, expected);
        }
    }
    let trained = &plain[3..3 + chain.parameters.len()];
    assert!(trained.iter().all(|gradient| gradient.numel() > 0 && f64::try_from(gradient.abs().max()).unwrap() > 0.0));
}

#[test]
fn a_full_fine_tune_is_bit_equal() {
    compare(None, false, Kind::Float);
    compare(None, true, Kind::Float);
    compare(None, true, Kind::BFloat16);
}

#[test]
fn lora_is_bit_equal_although_inputs_and_base_are_frozen() {
    compare(Some(lora::Spec::new(4, 8.0, ["left", "right", "modulation"])), true, Kind::Float);
    compare(Some(lora::Spec::new(4, 8.0, ["right"])), false, Kind::BFloat16);
}

#[test]
fn without_gradients_a_block_runs_once_and_leaves_no_graph() {
    let chain = chain(None);
    let state = State {
        stream: (0..3).map(|i| random(i, &[2, 5, 16])).collect(),
        shared: vec![random(4, &[2, 16])],
        by_token: vec![],
        latent_size: vec![],
    };
    let outputs = tch::no_grad(|| remat::checkpoint(&chain.blocks[0], &state, false)).unwrap();
    assert!(outputs.iter().all(|output| !output.requires_grad()));
    assert_eq!(chain.runs.load(Ordering::SeqCst), 1);
}

/// Fails when it runs for the second time.
struct Flaky(AtomicUsize, Failure);

type Failure = fn() -> nn::Error;

impl Block for Flaky {
    fn forward(&self, stream: &[Tensor], _: &[Tensor]) -> nn::Result<Vec<Tensor>> {
        if self.0.fetch_add(1, Ordering::SeqCst) == 1 { Err((self.1)()) } else { Ok(vec![&stream[0] * 2.0]) }
    }
}

#[test]
fn an_error_or_panic_while_recomputing_comes_out_of_backward() {
    let cases: [(Failure, &str); 2] = [
        (|| nn::Error::Invalid("the block is gone".to_owned()), "libtorch: Checkpoint: the block is gone"),
        (|| panic!("the block fell over"), "libtorch: Checkpoint: panic in backward: the block fell over"),
    ];
    for (failure, expected) in cases {
        let block: SharedBlock = Arc::new(Flaky(AtomicUsize::new(0), failure));
        let state = State {
            stream: vec![random(0, &[3]).set_requires_grad(true)],
            shared: vec![],
            by_token: vec![],
            latent_size: vec![],
        };
        let output = remat::checkpoint(&block, &state, false).unwrap().remove(0).sum(Kind::Float);
        let error = torch::autograd::backward(&[output], &[], false).unwrap_err().to_string();
        assert_eq!(error, expected);
    }
}

#[test]
fn a_second_backward_says_that_the_inputs_are_freed() {
    let chain = chain(None);
    let state = State {
        stream: (0..3).map(|i| random(i, &[2, 5, 16])).collect(),
        shared: vec![random(4, &[2, 16])],
        by_token: vec![],
        latent_size: vec![],
    };
    let loss = remat::checkpoint(&chain.blocks[0], &state, false).unwrap()[0].sum(Kind::Float);
    torch::autograd::backward(&[loss.shallow_clone()], &[], false).unwrap();
    let error = torch::autograd::backward(&[loss], &[], false).unwrap_err().to_string();
    assert!(error.contains("second time"), "{error}");
}

#[test]
fn a_block_is_let_go_after_backward_and_with_an_unused_graph() {
    let chain = chain(None);
    let state = State {
        stream: (0..3).map(|i| random(i, &[2, 5, 16])).collect(),
        shared: vec![random(4, &[2, 16])],
        by_token: vec![],
        latent_size: vec![],
    };
    let outputs = remat::checkpoint(&chain.blocks[0], &state, false).unwrap();
    assert_eq!(Arc::strong_count(&chain.blocks[0]), 2);
    drop(outputs);
    assert_eq!(Arc::strong_count(&chain.blocks[0]), 1);
    let loss = remat::checkpoint(&chain.blocks[0], &state, false).unwrap()[0].sum(Kind::Float);
    torch::autograd::backward(&[loss.shallow_clone()], &[], false).unwrap();
    assert_eq!(Arc::strong_count(&chain.blocks[0]), 1); // although the graph itself still lives in `loss`
}

#[test]
fn a_rust_backward_gives_its_gradients() {
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0]).set_requires_grad(true);
    let (y, kept) = (tch::no_grad(|| x.square()), x.detach());
    let joined = torch::autograd::custom_node("Square", &[x.shallow_clone()], &[y.shallow_clone()], move |gradients| {
        Ok(vec![gradients[0].as_ref().map(|gradient| gradient * &kept * 2.0)])
    });
    assert!(joined.unwrap());
    torch::autograd::backward(&[(y * 3.0).sum(Kind::Float)], &[], false).unwrap();
    assert_same(&x.grad(), &Tensor::from_slice(&[6f32, 12.0, 18.0]));
}

#[test]
fn a_wrong_number_of_gradients_is_an_error() {
    let x = random(0, &[2]).set_requires_grad(true);
    let y = tch::no_grad(|| &x * 1.0);
    torch::autograd::custom_node("Short", &[x.shallow_clone()], &[y.shallow_clone()], |_| Ok(vec![])).unwrap();
    let error = torch::autograd::backward(&[y.sum(Kind::Float)], &[], false).unwrap_err().to_string();
    assert_eq!(error, "libtorch: Short: gradients from backward: 0 given, 1 needed");
    let error = torch::autograd::backward(&[random(0, &[1])], &[random(0, &[1]), random(0, &[1])], false).unwrap_err();
    assert_eq!(error.to_string(), "gradients for backward: 2 given, 1 needed");
}

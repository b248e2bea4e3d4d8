//! The layers against torch, diffusers and PEFT (`tools/nn_fixtures.py`), files against their reference implementation.

#![expect(clippy::unwrap_used, reason = "in a test, a failed unwrap is a finding")]

mod builder;
mod files;
mod layers;
mod lora;
mod optim;
mod remat;

use std::path::PathBuf;

use nn::Weights;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn golden() -> Weights {
    Weights::file(&fixture("golden.safetensors")).unwrap()
}

/// Every element and the kind are the same; NaN equals nothing.
#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor) {
    assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()));
    assert!(found.equal(expected), "largest difference {}", largest_difference(found, expected));
}

/// Within rounding of the kind, measured against the largest magnitude. (Kernels round differently from one CPU to another.)
#[track_caller]
fn assert_close(found: &Tensor, expected: &Tensor) {
    assert_within(if expected.kind() == Kind::BFloat16 { 1.0 / 256.0 } else { 1e-6 }, found, expected);
}

#[track_caller]
fn assert_within(tolerance: f64, found: &Tensor, expected: &Tensor) {
    assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()));
    let scale = f64::try_from(expected.to_kind(Kind::Double).abs().max()).unwrap();
    let difference = largest_difference(found, expected);
    assert!(difference <= tolerance * scale, "{difference} of {scale}");
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    f64::try_from((a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max()).unwrap()
}

fn random(seed: u64, shape: &[i64]) -> Tensor {
    torch::ops::randn_seeded(seed, shape).unwrap()
}

//! AdamW, clipping and averages against torch and diffusers, step by step.

use std::collections::BTreeMap;

use nn::ema::Ema;
use nn::optim::{self, AdamW, Settings};
use nn::{Error, Named, Weights, save};
use tch::{Kind, Tensor};

use crate::{CPU, assert_close, assert_same, golden};

fn leaf(name: &str, values: &Tensor) -> Named {
    Named { name: name.to_owned(), tensor: values.copy().set_requires_grad(true) }
}

/// Gives `named` this gradient, as backward would.
fn set_gradient(named: &Named, gradient: &Tensor) {
    torch::autograd::backward(&[&named.tensor * 1.0], &[gradient.shallow_clone()], false).unwrap();
}

fn start(golden: &Weights) -> (Vec<Named>, AdamW) {
    let parameters: Vec<_> =
        ["a", "b", "c"].map(|name| leaf(name, &golden.tensor(&format!("adamw/start/{name}")).unwrap())).into();
    let settings = Settings { betas: (0.9, 0.95), weight_decay: 0.1, eps: 1e-8 };
    let optimizer = AdamW::new(parameters.clone(), settings).unwrap();
    (parameters, optimizer)
}

/// One step of the fixture; returns the norm before clipping.
fn step(golden: &Weights, parameters: &[Named], optimizer: &mut AdamW, step: usize) -> f64 {
    optimizer.clear_gradients().unwrap();
    for named in parameters {
        if let Ok(gradient) = golden.tensor(&format!("adamw/gradient/{step}/{}", named.name)) {
            set_gradient(named, &gradient);
        }
    }
    let norm = optim::clip_gradients(parameters, 1.0).unwrap();
    optimizer.step(1e-2 / (step + 1) as f64).unwrap();
    norm
}

#[test]
fn steps_clipping_and_averages_equal_those_of_torch() {
    let golden = golden();
    let (parameters, mut optimizer) = start(&golden);
    let mut ema = Ema::new(parameters.clone()).unwrap();
    for i in 0..6 {
        let norm = step(&golden, &parameters, &mut optimizer, i);
        let expected = golden.tensor("adamw/norms").unwrap().double_value(&[i as i64]);
        assert!((norm - expected).abs() <= 1e-6 * expected, "step {i}: {norm}, not {expected}");
        ema.update(0.9).unwrap();
        for named in &parameters {
            assert_close(&named.tensor.detach(), &golden.tensor(&format!("adamw/after/{i}/{}", named.name)).unwrap());
        }
    }
    for named in optimizer.state() {
        assert_close(&named.tensor, &golden.tensor(&format!("adamw/state/{}", named.name)).unwrap());
    }
    for named in ema.state() {
        assert_close(&named.tensor, &golden.tensor(&format!("adamw/average/{}", named.name)).unwrap());
    }
}

#[test]
fn a_resumed_optimizer_continues_bitwise() {
    let golden = golden();
    let folder = tempfile::tempdir().unwrap();
    let (parameters, mut optimizer) = start(&golden);
    for i in 0..3 {
        step(&golden, &parameters, &mut optimizer, i);
    }
    let path = folder.path().join("optimizer.safetensors");
    let state = optimizer.state();
    save::save_safetensors(&path, state.iter().map(|named| (named.name.as_str(), &named.tensor)), &BTreeMap::new())
        .unwrap();

    let resumed: Vec<_> = parameters.iter().map(|named| leaf(&named.name, &named.tensor.detach())).collect();
    let settings = Settings { betas: (0.9, 0.95), weight_decay: 0.1, eps: 1e-8 };
    let mut again = AdamW::new(resumed.clone(), settings).unwrap();
    again.load_state(&Weights::file(&path).unwrap()).unwrap();
    for i in 3..6 {
        step(&golden, &resumed, &mut again, i);
    }
    for i in 3..6 {
        step(&golden, &parameters, &mut optimizer, i);
    }
    for (resumed, undisturbed) in resumed.iter().zip(&parameters) {
        assert_same(&resumed.tensor.detach(), &undisturbed.tensor.detach());
    }

    let mut other = AdamW::new(resumed[..2].to_vec(), settings).unwrap();
    let error = other.load_state(&Weights::file(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("3 tensor(s)") && error.contains("`c.exp_avg`"), "{error}");
}

#[test]
fn a_gradient_that_is_not_finite_is_named_and_left_alone() {
    let parameters = ["fine", "broken"].map(|name| leaf(name, &Tensor::ones([2], (Kind::Float, CPU))));
    set_gradient(&parameters[0], &Tensor::from_slice(&[3f32, 4.0]));
    set_gradient(&parameters[1], &Tensor::from_slice(&[f32::NAN, 0.0]));
    let Error::NonFinite { norm, names } = optim::clip_gradients(&parameters, 1.0).unwrap_err() else { panic!() };
    assert!(norm.is_nan());
    assert_eq!(names, "`broken`");
    assert_same(&parameters[0].tensor.grad(), &Tensor::from_slice(&[3f32, 4.0]));
    assert_eq!(optim::clip_gradients(&parameters[..1], 10.0).unwrap(), 5.0);
    assert_same(&parameters[0].tensor.grad(), &Tensor::from_slice(&[3f32, 4.0]));
}

#[test]
fn no_gradient_at_all_is_norm_zero_and_no_step() {
    let parameters = vec![leaf("a", &Tensor::ones([2], (Kind::Float, CPU)))];
    assert_eq!(optim::clip_gradients(&parameters, 1.0).unwrap(), 0.0);
    assert_eq!(optim::gradient_norm(&parameters).unwrap(), 0.0);
    let mut optimizer = AdamW::new(parameters.clone(), Settings::default()).unwrap();
    optimizer.step(1.0).unwrap();
    assert_same(&parameters[0].tensor.detach(), &Tensor::ones([2], (Kind::Float, CPU)));
    assert!(optimizer.state().is_empty());
}

#[test]
fn low_precision_masters_are_refused() {
    let half = leaf("w", &Tensor::ones([2], (Kind::BFloat16, CPU)));
    let error = AdamW::new(vec![half], Settings::default()).unwrap_err().to_string();
    assert_eq!(error, "parameter `w` is BFloat16; trained weights must be f32");
}

#[test]
fn swapping_averages_twice_restores_both() {
    let parameters = vec![leaf("a", &Tensor::ones([2], (Kind::Float, CPU)))];
    let mut ema = Ema::new(parameters.clone()).unwrap();
    let weight = &parameters[0].tensor;
    let _ = tch::no_grad(|| weight.shallow_clone().fill_(5.0));
    ema.update(0.75).unwrap(); // 1 + 0.25 * 4
    ema.swap().unwrap();
    assert_same(&weight.detach(), &Tensor::from_slice(&[2f32, 2.0]));
    ema.swap().unwrap();
    assert_same(&weight.detach(), &Tensor::from_slice(&[5f32, 5.0]));
    assert_same(&ema.state()[0].tensor, &Tensor::from_slice(&[2f32, 2.0]));
    assert!(weight.requires_grad());
}

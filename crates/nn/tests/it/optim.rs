//! AdamW, clipping and averages against torch and diffusers, step by step.

use std::collections::BTreeMap;

use nn::ema::Ema;
use nn::optim::{self, AdamW, Keeping, Kept, Settings};
use nn::rng::Stream;
use nn::{Error, Named, Part, Share, Weights, save};
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

/// A quadratic whose curvatures span three powers of ten, with noisy gradients: as far down as the same updates in f64 get.
#[test]
fn narrow_state_converges_as_f64_does() {
    const COUNT: i64 = 8192;
    let curvature = Tensor::logspace(-1.0, 2.0, COUNT, 10.0, (Kind::Float, CPU));
    let goal = Tensor::from_slice(&Stream::new(1, &["goal".into()]).normals(COUNT as usize));
    let noise = |step: u64| Tensor::from_slice(&Stream::new(2, &[step.into()]).normals(COUNT as usize));
    let settings = Settings { betas: (0.9, 0.999), weight_decay: 0.0, eps: 1e-8 };
    let (steps, lr) = (600, |step: u64| 0.02 * (1.0 - step as f64 / 600.0));
    let distance = |x: &Tensor| (x.to_kind(Kind::Double) - &goal).square().mean(Kind::Double).double_value(&[]);

    let wide = |x: &Tensor| x.to_kind(Kind::Double);
    let mut x = Tensor::zeros([COUNT], (Kind::Double, CPU));
    let (mut mean, mut square) = (x.zeros_like(), x.zeros_like());
    for step in 0..steps {
        let gradient = wide(&curvature) * (&x - wide(&goal)) + wide(&noise(step)) * 0.1;
        let (b, c) = settings.betas;
        mean = mean * b + &gradient * (1.0 - b);
        square = square * c + gradient.square() * (1.0 - c);
        let (m, v) = (&mean / (1.0 - b.powi(step as i32 + 1)), &square / (1.0 - c.powi(step as i32 + 1)));
        x -= m / (v.sqrt() + settings.eps) * lr(step);
    }
    let reference = distance(&x);
    for keeping in [Keeping::Float32, Keeping::BFloat16, Keeping::EightBit] {
        let parameter = leaf("x", &Tensor::zeros([COUNT], (Kind::Float, CPU)));
        let kept = Kept { exp_avg: keeping, exp_avg_sq: keeping, seed: 3 };
        let mut optimizer =
            AdamW::new(vec![parameter.clone()], settings).unwrap().kept(kept, &BTreeMap::new()).unwrap();
        for step in 0..steps {
            optimizer.clear_gradients().unwrap();
            let x = parameter.tensor.detach();
            set_gradient(&parameter, &(&curvature * (x - &goal) + noise(step) * 0.1));
            optimizer.step(lr(step)).unwrap();
        }
        let far = distance(&parameter.tensor.detach());
        let most = if keeping == Keeping::Float32 { 1.001 } else { 1.1 };
        assert!(far < most * reference, "{keeping:?}: {far}, not {reference}");
        // The second moment is that of f64, element by element, up to the rounding of a few steps, and on the mean exactly.
        let second = &second_moment(&optimizer, keeping, COUNT) / &square.to_kind(Kind::Float);
        let mean = second.mean(Kind::Double).double_value(&[]);
        assert!((mean - 1.0).abs() < 0.02, "{keeping:?}: {mean}");
        let bytes: usize =
            optimizer.state().iter().map(|n| n.tensor.numel() * n.tensor.kind().elt_size_in_bytes()).sum();
        assert_eq!(bytes, optimizer.state_bytes());
        let each = match keeping {
            Keeping::Float32 => 8.0,
            Keeping::BFloat16 => 4.0,
            Keeping::EightBit => 2.0 + 8.0 / 256.0,
        };
        assert_eq!(bytes, (each * COUNT as f64) as usize + 4);
    }
}

/// Through a file, into an optimizer that keeps f32.
fn second_moment(optimizer: &AdamW, keeping: Keeping, count: i64) -> Tensor {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(&folder, optimizer);
    let parameter = leaf("x", &Tensor::zeros([count], (Kind::Float, CPU)));
    let mut wide = AdamW::new(vec![parameter], Settings::default()).unwrap();
    wide.load_state(&Weights::file(&path).unwrap()).unwrap();
    let state = wide.state();
    let found = state.iter().find(|named| named.name == "x.exp_avg_sq").unwrap().tensor.shallow_clone();
    if keeping == Keeping::EightBit {
        // And back: a state in eight bits is its own nearest.
        let again_path = saved(&folder, &wide);
        let parameter = leaf("x", &Tensor::zeros([count], (Kind::Float, CPU)));
        let kept = Kept { exp_avg: keeping, exp_avg_sq: keeping, seed: 0 };
        let mut again = AdamW::new(vec![parameter], Settings::default()).unwrap().kept(kept, &BTreeMap::new()).unwrap();
        again.load_state(&Weights::file(&again_path).unwrap()).unwrap();
        for (a, b) in again.state().iter().zip(optimizer.state()) {
            assert_eq!(a.name, b.name);
            assert_same(&a.tensor, &b.tensor);
        }
    }
    found
}

fn saved(folder: &tempfile::TempDir, optimizer: &AdamW) -> std::path::PathBuf {
    let (path, state) = (folder.path().join("state.safetensors"), optimizer.state());
    save::save_safetensors(&path, state.iter().map(|named| (named.name.as_str(), &named.tensor)), &BTreeMap::new())
        .unwrap();
    path
}

/// A second moment that decays by a thousandth a step: to the nearest bf16 or level it would stand still.
#[test]
fn narrow_state_does_not_stall() {
    const COUNT: i64 = 4096;
    for keeping in [Keeping::BFloat16, Keeping::EightBit] {
        let parameter = leaf("x", &Tensor::zeros([COUNT], (Kind::Float, CPU)));
        let kept = Kept { exp_avg: keeping, exp_avg_sq: keeping, seed: 3 };
        let mut optimizer =
            AdamW::new(vec![parameter.clone()], Settings::default()).unwrap().kept(kept, &BTreeMap::new()).unwrap();
        // Within a block the largest decays exactly with its scale; the others must keep up.
        let gradient = Tensor::linspace(0.1, 1.0, COUNT, (Kind::Float, CPU));
        for step in 0..401 {
            optimizer.clear_gradients().unwrap();
            set_gradient(&parameter, &(if step == 0 { gradient.shallow_clone() } else { gradient.zeros_like() }));
            optimizer.step(1e-4).unwrap();
        }
        let expected = gradient.square() * (0.001 * 0.999f64.powi(400));
        let ratio = (&second_moment(&optimizer, keeping, COUNT) / expected).mean(Kind::Double).double_value(&[]);
        assert!((ratio - 1.0).abs() < 0.01, "{keeping:?}: {ratio}");
    }
}

/// Whatever runs of elements it is held in, and however often it is saved and taken up.
#[test]
fn narrow_state_depends_on_no_split_and_no_resume() {
    let shape = [48, 200];
    let values = |name: &str| {
        Tensor::from_slice(&Stream::new(5, &[name.into()]).normals((shape[0] * shape[1]) as usize)).reshape(shape)
    };
    let (start, gradients) = (values("start"), [values("a"), values("b"), values("c")]);
    for keeping in [Keeping::BFloat16, Keeping::EightBit] {
        let kept = Kept { exp_avg: keeping, exp_avg_sq: keeping, seed: 7 };
        let train = |share: &Share, resumed: bool| -> (Tensor, Vec<Tensor>) {
            let make = |value: &Tensor| {
                let parameter = leaf("w", value);
                let shares = BTreeMap::from([("w".to_owned(), share.clone())]);
                let optimizer = AdamW::new(vec![parameter.clone()], Settings::default()).unwrap();
                (parameter, optimizer.kept(kept, &shares).unwrap())
            };
            let (mut parameter, mut optimizer) = make(&share.of(&start).unwrap());
            for gradient in &gradients {
                if resumed {
                    let folder = tempfile::tempdir().unwrap();
                    let path = saved(&folder, &optimizer);
                    (parameter, optimizer) = make(&parameter.tensor.detach());
                    optimizer.load_state(&Weights::file(&path).unwrap()).unwrap();
                }
                optimizer.clear_gradients().unwrap();
                set_gradient(&parameter, &share.of(gradient).unwrap());
                optimizer.step(1e-2).unwrap();
            }
            (parameter.tensor.detach(), optimizer.state().into_iter().map(|named| named.tensor).collect())
        };
        let (whole, state) = train(&Share::whole(&shape), false);
        let (again, resumed) = train(&Share::whole(&shape), true);
        assert_same(&whole, &again);
        state.iter().zip(&resumed).for_each(|(a, b)| assert_same(a, b));
        for count in [2, 3, 7] {
            let cut = |part| Share::cut(&shape, 0, &[48], part).unwrap();
            // Rows of half the tensor are whole blocks only for bf16.
            let halves: Vec<Share> = Part::all(2).map(cut).collect();
            let runs: Vec<Share> = Part::all(count).map(|part| Share::whole(&shape).run(part)).collect();
            let both: Vec<Share> =
                halves.iter().flat_map(|half| Part::all(count).map(|part| half.clone().run(part))).collect();
            for shares in if keeping == Keeping::BFloat16 { vec![halves, runs, both] } else { vec![runs] } {
                for share in shares {
                    let (part, _) = train(&share, false);
                    assert_same(&part, &share.of(&whole).unwrap());
                }
            }
        }
        if keeping == Keeping::EightBit {
            let half = Share::cut(&shape, 0, &[48], Part { index: 0, count: 2 }).unwrap();
            let shares = BTreeMap::from([("w".to_owned(), half.clone())]);
            let optimizer = AdamW::new(vec![leaf("w", &half.of(&start).unwrap())], Settings::default()).unwrap();
            let error = optimizer.kept(kept, &shares).unwrap_err().to_string();
            assert!(error.starts_with("8-bit state of `w`: "), "{error}");
        }
    }
}

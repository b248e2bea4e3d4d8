//! Single layers, seeded normals, embeddings of time and position.

use nn::rotary;
use nn::timestep::Sinusoidal;
use nn::{BuildOptions, Builder, Conv2dOptions, Init, LayerNorm, Weights, attention};
use tch::{Kind, Tensor};

use crate::{CPU, assert_close, assert_same, assert_within, fixture, golden};

#[test]
fn seeded_normals_are_those_of_a_torch_generator() {
    let golden = golden();
    let names: Vec<_> = golden.names().filter(|name| name.starts_with("randn/")).collect();
    assert_eq!(names.len(), 27);
    for name in names {
        let parts: Vec<_> = name.split('/').collect();
        let shape: Vec<i64> = parts[2].split('x').map(|side| side.parse().unwrap()).collect();
        assert_same(
            &torch::ops::randn_seeded(parts[1].parse().unwrap(), &shape).unwrap(),
            &golden.tensor(name).unwrap(),
        );
    }
}

#[test]
fn layers_equal_those_of_torch_and_diffusers() {
    let golden = golden();
    for kind in [Kind::Float, Kind::BFloat16] {
        let suffix = if kind == Kind::Float { "float32" } else { "bfloat16" };
        let expected = |name: &str| golden.tensor(&format!("layers/{name}/{suffix}")).unwrap();
        let input = |name: &str| golden.tensor(&format!("layers/{name}")).unwrap();
        let (x, picture) = (input("x").to_kind(kind), input("picture").to_kind(kind));
        // f32 master weights and weights stored in the kind of the computation must give the same.
        for storage in [Kind::Float, kind] {
            let weights = Weights::file(&fixture("layers.safetensors")).unwrap();
            let b = Builder::from_weights(weights, BuildOptions::frozen(CPU, storage));
            let linear = b.pp("linear").linear(12, 7, true).unwrap();
            let embedding = b.pp("embedding").embedding(9, 6).unwrap();
            let layer_norm = b.pp("layer_norm").layer_norm(12, 1e-5, true).unwrap();
            let rms_norm = b.pp("rms_norm").rms_norm(12, 1e-6).unwrap();
            let torch_rms_norm = b.pp("torch_rms_norm").torch_rms_norm(12, 1e-6).unwrap();
            let group_norm = b.pp("group_norm").group_norm(4, 12, 1e-6).unwrap();
            let conv = b.pp("conv").conv2d(12, 5, 3, Conv2dOptions { stride: 2, padding: 1, bias: true }).unwrap();
            b.finish().unwrap();

            assert_close(&linear.forward(&x).unwrap(), &expected("linear"));
            assert_same(&embedding.forward(&input("indices")).unwrap().to_kind(kind), &expected("embedding"));
            assert_close(&layer_norm.forward(&x).unwrap(), &expected("layer_norm"));
            assert_close(&LayerNorm::plain(12, 1e-6).forward(&x).unwrap(), &expected("plain_norm"));
            assert_close(&rms_norm.forward(&x).unwrap(), &expected("rms_norm"));
            assert_close(&torch_rms_norm.forward(&x).unwrap(), &expected("torch_rms_norm"));
            assert_close(&group_norm.forward(&picture).unwrap(), &expected("group_norm"));
            assert_close(&conv.forward(&picture).unwrap(), &expected("conv"));
        }
    }
}

/// Both ways of taking the SiLU of a group norm, for sizes that fill no vector and values far from zero.
#[test]
fn a_group_norm_and_its_silu_are_one_operator_where_channels_lie_innermost() {
    torch::device::set_threads(1);
    for (groups, width, [h, w], shift) in
        [(4, 3, [5, 7], 0.0), (3, 2, [33, 17], 40.0), (32, 4, [24, 16], -3.0), (1, 1, [3, 2], 0.0)]
    {
        let channels = groups * width;
        let b = Builder::random(3, BuildOptions::frozen(CPU, Kind::Float));
        let norm = b.group_norm(groups, channels, 1e-6).unwrap();
        for (n, parameter) in b.finish().unwrap().weights.iter().enumerate() {
            parameter.tensor.shallow_clone().copy_(&torch::ops::randn_seeded(n as u64, &[channels]).unwrap());
        }
        let x = torch::ops::randn_seeded(9, &[2, h, w, channels]).unwrap() * 2.0 + shift;
        let x = x.permute([0, 3, 1, 2]);
        let expected = norm.forward(&x.to_kind(Kind::Double)).unwrap().silu();
        let far = |y: Tensor| {
            let apart = (y.to_kind(Kind::Double) - &expected).norm().double_value(&[]);
            apart / expected.norm().double_value(&[]).max(1e-12)
        };
        for (kind, allowed) in [(Kind::Float, 2e-5), (Kind::BFloat16, 0.02)] {
            let x = x.to_kind(kind);
            let (one, two) = (norm.silu(&x).unwrap(), norm.silu(&x.contiguous()).unwrap());
            assert_eq!((one.kind(), one.size(), one.stride()), (kind, x.size(), x.stride()));
            // Of a bf16 picture that lies far from zero only few digits say anything.
            let allowed = if kind == Kind::BFloat16 { allowed * (1.0 + f64::abs(shift)) } else { allowed };
            assert!(far(one.shallow_clone()) < allowed, "{groups} {kind:?} {}", far(one));
            assert!(far(two.shallow_clone()) < allowed, "{groups} {kind:?} {}", far(two));
        }
        let broken = x.copy();
        let _ = broken.get(1).fill_(f64::NAN);
        let y = norm.silu(&broken).unwrap();
        assert!(bool::try_from(y.get(1).isnan().all()).unwrap() && !bool::try_from(y.get(0).isnan().any()).unwrap());
    }
}

/// Where gradients are asked for, they are those of the two operators.
#[test]
fn a_group_norm_with_its_silu_can_be_trained() {
    let b = Builder::random(3, BuildOptions::trained(CPU));
    let norm = b.group_norm(2, 6, 1e-6).unwrap();
    let x = torch::ops::randn_seeded(9, &[2, 4, 4, 6]).unwrap().permute([0, 3, 1, 2]).contiguous();
    (norm.silu(&x).unwrap() * &x).sum(Kind::Float).backward();
    for parameter in b.finish().unwrap().weights {
        assert!(parameter.tensor.grad().defined(), "{}", parameter.name);
    }
}

#[test]
fn attention_equals_that_of_torch() {
    let golden = golden();
    let read = |name: &str| golden.tensor(&format!("attention/{name}")).unwrap();
    let (q, k, v, mask) = (read("q"), read("k"), read("v"), read("mask"));
    assert_close(&attention::scaled_dot_product(&q, &k, &v, None, None).unwrap(), &read("plain"));
    assert_close(&attention::scaled_dot_product(&q, &k, &v, Some(&mask), None).unwrap(), &read("masked"));
    assert_close(&attention::causal(&q, &k, &v, Some(1.0)).unwrap(), &read("causal"));
    assert_same(&attention::split_heads(&attention::merge_heads(&q).unwrap(), 3).unwrap(), &q);
}

#[test]
fn time_embedding_equals_that_of_diffusers() {
    let golden = golden();
    let read = |name: &str| golden.tensor(&format!("timestep/{name}")).unwrap();
    let t = read("t");
    assert_within(1e-4, &Sinusoidal::flow(256).embed(&t).unwrap(), &read("flow"));
    assert_within(1e-4, &Sinusoidal::flow(256).embed(&t.to_kind(Kind::BFloat16)).unwrap(), &read("bf16"));
    let odd = Sinusoidal { dim: 33, flip_sin_to_cos: false, downscale_freq_shift: 1.0, scale: 2.5, max_period: 1e4 };
    assert_within(1e-4, &odd.embed(&t).unwrap(), &read("odd"));
}

#[test]
fn rotary_embedding_equals_that_of_diffusers() {
    let golden = golden();
    let read = |name: &str| golden.tensor(&format!("rotary/{name}")).unwrap();
    let (cos, sin) = rotary::tables(&read("positions"), &[4, 6, 6], 10_000.0).unwrap();
    assert_close(&cos, &read("cos"));
    assert_close(&sin, &read("sin"));
    let x = read("x");
    assert_close(&rotary::rotate(&x, &cos, &sin).unwrap(), &read("rotated"));
    assert_close(&rotary::rotate(&x.to_kind(Kind::BFloat16), &cos, &sin).unwrap(), &read("rotated_bf16"));
}

#[test]
fn a_grid_is_numbered_row_by_row() {
    let expected =
        Tensor::from_slice(&[0f32, 0., 0., 0., 0., 1., 0., 1., 0., 0., 1., 1., 0., 2., 0., 0., 2., 1.]).view([6, 3]);
    assert_same(&rotary::grid_ids(3, 2, CPU).unwrap(), &expected);
}

#[test]
fn random_parameters_follow_seed_and_name_and_their_scheme() {
    let build = |seed: u64, path: &str| {
        let b = Builder::random(seed, BuildOptions::trained(CPU)).pp(path);
        let weight = b.linear(400, 300, true).unwrap().weight().shallow_clone();
        let normal = b.param("normal", &[500, 200], Init::Normal { std: 0.02 }).unwrap().handle();
        (weight.detach(), normal.detach())
    };
    let (weight, normal) = build(1, "a");
    assert_same(&build(1, "a").0, &weight);
    assert!(!build(2, "a").0.equal(&weight) && !build(1, "b").0.equal(&weight));
    // Uniform in ±1/sqrt(400), so of deviation 0.05/sqrt(3), within five standard errors.
    let bound = f64::try_from(weight.abs().max()).unwrap();
    assert!((0.0499..=0.05).contains(&bound), "{bound}");
    let deviation = f64::try_from(weight.std(true)).unwrap();
    assert!((deviation - 0.05 / 3f64.sqrt()).abs() < 2e-4, "{deviation}");
    let deviation = f64::try_from(normal.std(true)).unwrap();
    assert!((deviation - 0.02).abs() < 3e-4, "{deviation}");
}

#[test]
fn a_frame_after_zeros_needs_only_the_last_slice_of_a_causal_kernel() {
    let b = Builder::random(3, BuildOptions::frozen(CPU, Kind::Float));
    let conv = b.pp("conv").causal_conv3d([2, 3], [3, 3, 3], [1, 1, 1], 1).unwrap();
    let x = torch::ops::randn_seeded(1, &[1, 2, 1, 5, 4]).unwrap();
    let padded = x.constant_pad_nd([0, 0, 0, 0, conv.reach(), 0]);
    let (short, long) = (conv.forward_first(&x).unwrap(), conv.forward(&padded).unwrap());
    assert_eq!((conv.reach(), short.size()), (2, vec![1, 3, 1, 5, 4]));
    assert_close(&short, &long);
    // Two frames at once, and one after the other with what came before.
    let both = Tensor::cat(&[&x, &(&x * 0.5)], 2);
    let whole = conv.forward(&both.constant_pad_nd([0, 0, 0, 0, 2, 0])).unwrap();
    let second = conv.forward(&both.constant_pad_nd([0, 0, 0, 0, 1, 0])).unwrap();
    assert_close(&whole.narrow(2, 1, 1), &second);
}

#[test]
fn turning_pairs_as_complex_numbers_is_rotating_them() {
    let x = torch::ops::randn_seeded(2, &[2, 7, 3, 8]).unwrap();
    let (cos, sin) = rotary::table(&Tensor::arange(7, (Kind::Double, CPU)), 8, 10_000.0).unwrap();
    let pairs = |table: &Tensor| table.view([7, 4, 2]).select(2, 0);
    let table = Tensor::stack(&[pairs(&cos), pairs(&sin)], -1);
    let rotated = rotary::rotate(&x.transpose(1, 2), &cos, &sin).unwrap().transpose(1, 2);
    assert_close(&rotary::turn(&x, &table).unwrap(), &rotated);
    assert_eq!(rotary::turn(&x.to_kind(Kind::BFloat16), &table).unwrap().kind(), Kind::BFloat16);
}

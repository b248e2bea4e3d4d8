//! What the builder collects and what it refuses.

use nn::{BuildOptions, Builder, Error, Init, Weights, lora};
use tch::{Kind, Tensor};

use crate::{CPU, fixture};

fn names(parameters: &[nn::Named]) -> Vec<&str> {
    parameters.iter().map(|named| named.name.as_str()).collect()
}

fn base(adapter: Option<lora::Spec>, trainable: bool) -> (Builder, BuildOptions) {
    let options = BuildOptions { device: CPU, storage: Kind::Float, trainable, adapter };
    (Builder::from_weights(Weights::file(&fixture("lora_base.safetensors")).unwrap(), options.clone()), options)
}

/// The model of `tools/nn_fixtures.py`.
fn build(b: &Builder) -> nn::Result<()> {
    for i in 0..2 {
        let block = b.pp("blocks").pp(i);
        block.pp("to_q").linear(8, 6, true)?;
        block.pp("to_out.0").linear(6, 8, true)?;
    }
    Ok(())
}

#[test]
fn parameters_come_in_the_order_of_definition() {
    for b in [base(None, true).0, Builder::random(0, base(None, true).1), Builder::meta(base(None, true).1)] {
        build(&b).unwrap();
        let parameters = b.finish().unwrap();
        let first =
            ["blocks.0.to_q.weight", "blocks.0.to_q.bias", "blocks.0.to_out.0.weight", "blocks.0.to_out.0.bias"];
        assert_eq!(names(&parameters.weights)[..4], first);
        assert_eq!(names(&parameters.trainable()), names(&parameters.weights));
        assert_eq!(parameters.weights[2].tensor.size(), [8, 6]);
    }
}

#[test]
fn an_adapter_freezes_the_base() {
    let (b, _) = base(Some(lora::Spec::new(2, 2.0, ["to_q"])), true);
    build(&b).unwrap();
    let parameters = b.finish().unwrap();
    let adapter = [
        "blocks.0.to_q.lora_A.weight",
        "blocks.0.to_q.lora_B.weight",
        "blocks.1.to_q.lora_A.weight",
        "blocks.1.to_q.lora_B.weight",
    ];
    assert_eq!(names(&parameters.adapter), adapter);
    assert_eq!(names(&parameters.trainable()), adapter);

    let (b, _) = base(Some(lora::Spec::new(2, 2.0, ["to_q"])), false);
    build(&b).unwrap();
    assert!(b.finish().unwrap().trainable().is_empty());
}

#[test]
fn a_missing_key_names_the_file_and_the_nearest() {
    let (b, _) = base(None, false);
    let error = b.pp("blocks.0.to_k").linear(8, 6, true).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("lora_base.safetensors` has no tensor `blocks.0.to_k.weight` (expected shape [6, 8])"),
        "{error}"
    );
    let Error::Missing { help: Some(help), .. } = error else { panic!("no help: {error:?}") };
    assert!(help.starts_with("did you mean `blocks.0.to_q.weight`"), "{help}");
}

#[test]
fn a_shape_that_differs_is_refused_with_both() {
    let (b, _) = base(None, false);
    let error = b.pp("blocks.0.to_q").linear(8, 7, true).unwrap_err().to_string();
    assert!(
        error.starts_with("tensor `blocks.0.to_q.weight` of `") && error.ends_with("has shape [6, 8], expected [7, 8]"),
        "{error}"
    );
}

#[test]
fn keys_that_nothing_asked_for_are_refused_unless_ignored() {
    let (b, _) = base(None, false);
    b.pp("blocks.0.to_q").linear(8, 6, true).unwrap();
    let error = b.finish().unwrap_err().to_string();
    assert!(
        error.contains("6 tensor(s)") && error.contains("`blocks.1.to_q.bias`") && error.ends_with("and 1 more"),
        "{error}"
    );
    for i in 0..2 {
        for key in ["to_q.weight", "to_q.bias", "to_out.0.weight", "to_out.0.bias"] {
            b.pp("blocks").pp(i).ignore(key);
        }
    }
    b.finish().unwrap();
}

#[test]
fn a_parameter_defined_twice_is_refused() {
    let b = Builder::meta(BuildOptions::frozen(CPU, Kind::Float));
    b.param("x", &[1], Init::Ones).unwrap();
    assert_eq!(b.param("x", &[1], Init::Ones).unwrap_err().to_string(), "parameter `x` is defined twice");
}

#[test]
fn placeholders_take_no_memory() {
    let b = Builder::meta(BuildOptions::trained(CPU));
    let weight = b.param("huge", &[1 << 30, 1 << 20], Init::Ones).unwrap(); // 4 PiB
    assert_eq!(weight.size(), [1 << 30, 1 << 20]);
}

#[test]
fn storage_kind_applies_to_weights_but_not_to_adapters() {
    let options = BuildOptions {
        device: CPU,
        storage: Kind::BFloat16,
        trainable: true,
        adapter: Some(lora::Spec::new(2, 2.0, ["*"])),
    };
    let b = Builder::random(0, options);
    let linear = b.pp("a").linear(4, 4, true).unwrap();
    let parameters = b.finish().unwrap();
    assert!(parameters.weights.iter().all(|named| named.tensor.kind() == Kind::BFloat16));
    assert!(parameters.adapter.iter().all(|named| named.tensor.kind() == Kind::Float));
    let y = linear.forward(&Tensor::ones([1, 4], (Kind::BFloat16, CPU))).unwrap();
    assert_eq!(y.kind(), Kind::BFloat16);
}

#[test]
fn some_parts_stay_in_f32_under_half_precision() {
    let b = Builder::random(0, BuildOptions::frozen(CPU, Kind::BFloat16));
    let half = b.pp("half").linear(2, 2, false).unwrap();
    let wide = b.pp("wide").in_f32().pp("inner").linear(2, 2, false).unwrap();
    assert_eq!((half.weight().kind(), wide.weight().kind()), (Kind::BFloat16, Kind::Float));
    assert_eq!(names(&b.finish().unwrap().weights), ["half.weight", "wide.inner.weight"]);
}

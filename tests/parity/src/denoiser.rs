//! Prediction, loss and every gradient of the denoiser are those of diffusers.

use tch::{Kind, Tensor};

use crate::support::{Report, goldens, goldens_of, options};

#[test]
fn prediction_loss_and_gradients_are_equal() {
    for golden in goldens() {
        for component in golden.denoisers() {
            let of = |name: &str| format!("{component}/{name}");
            let mut report = Report::new(&golden);
            let (model, parameters) = golden.denoiser(component, options(true));
            let (inputs, target) = golden.sample_of(component, Kind::Float);
            let prediction = model.forward(&inputs, false.into()).unwrap();
            report.close("denoiser", "pred", &prediction, &golden.tensor(&of("pred/latents")));
            let loss = diffusion::flow::sample_losses(&prediction, &target).mean(Kind::Float);
            report.number("denoiser", "loss", loss.double_value(&[]), golden.number(&of("loss")));
            loss.backward();
            let norms = golden.numbers[of("grad_norms")].as_object().unwrap();
            assert_eq!(norms.len(), parameters.weights.len(), "one norm for each parameter");
            for parameter in &parameters.weights {
                let norm = norms[&parameter.name].as_f64().unwrap();
                let ours = parameter.tensor.grad().norm().double_value(&[]);
                report.number("gradient norms", &parameter.name, ours, norm);
            }
            for (name, gradient) in golden.under(&of("grad/")) {
                let parameter = parameters.weights.iter().find(|p| p.name == name).unwrap();
                report.close("gradients", &name, &parameter.tensor.grad(), &gradient);
            }
        }
    }
}

#[test]
fn recomputing_activations_changes_no_bit() {
    for golden in goldens() {
        let run = |recompute| -> Vec<Tensor> {
            let (model, parameters) = golden.transformer(options(true));
            let loss = golden.loss(&model, &golden.noise(), &golden.tensor("transformer/level"), recompute);
            loss.backward();
            std::iter::once(loss.detach()).chain(parameters.weights.iter().map(|p| p.tensor.grad())).collect()
        };
        for (plain, again) in run(false).iter().zip(&run(true)) {
            assert!(plain.equal(again));
        }
    }
}

#[test]
fn bf16_rounds_where_diffusers_rounds() {
    for golden in goldens() {
        let (model, _) = golden.transformer(options(false));
        let ours = tch::no_grad(|| model.forward(&golden.training_inputs(Kind::BFloat16), false.into())).unwrap();
        assert_eq!(ours.kind(), Kind::BFloat16);
        let (ours, theirs) =
            (ours.to_kind(Kind::Double).view(-1), golden.tensor("bf16/pred/latents").to_kind(Kind::Double).view(-1));
        let cosine = (ours.dot(&theirs) / (ours.norm() * theirs.norm())).double_value(&[]);
        println!("{}: bf16 cosine {cosine:.6}", golden.name);
        assert!(cosine >= 0.999, "{}: {cosine}", golden.name);
    }
}

#[test]
fn a_call_that_makes_no_sense_is_answered() {
    for (family, condition, shape) in [("flux", "`t5`", "even"), ("wan", "`umt5`", "patches of 1x2x2")] {
        for golden in goldens_of(family) {
            let (model, _) = golden.transformer(options(false));
            let mut inputs = golden.training_inputs(Kind::Float);
            inputs.conditions.clear();
            let error = model.forward(&inputs, false.into()).unwrap_err().to_string();
            assert!(error.contains(condition) || error.contains("`clip_pooled`"), "{error}");
            let mut inputs = golden.training_inputs(Kind::Float);
            inputs.latents = inputs.latents.narrow(-1, 0, 3);
            let error = model.forward(&inputs, false.into()).unwrap_err().to_string();
            assert!(error.contains(shape), "{error}");
            if golden.family.takes_guidance(&golden.folder).unwrap() {
                let mut inputs = golden.training_inputs(Kind::Float);
                inputs.guidance = None;
                let error = model.forward(&inputs, false.into()).unwrap_err().to_string();
                assert!(error.contains("guidance"), "{error}");
            }
        }
    }
}

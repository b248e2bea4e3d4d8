//! Noise schedules and whole pictures are those of diffusers.

use std::ops::ControlFlow;

use diffusion::sample::{Guidance, sample};
use diffusion::schedule::FlowMatchEuler;
use tch::{Device, Kind, Tensor, no_grad};

use crate::support::{Golden, Report, goldens, options};

fn schedule(golden: &Golden) -> FlowMatchEuler {
    FlowMatchEuler::from_config(&golden.folder.json("scheduler/scheduler_config.json", "test").unwrap()).unwrap()
}

#[test]
fn noise_levels_are_equal() {
    for golden in goldens() {
        let mut compared = 0;
        for (name, expected) in golden.under("sched/").into_iter().filter(|(name, _)| name.ends_with("/sigmas")) {
            let (steps, size) = name.trim_end_matches("/sigmas").split_once('_').unwrap();
            let (height, width) = size.split_once('x').unwrap();
            let tokens = height.parse::<usize>().unwrap() / 16 * (width.parse::<usize>().unwrap() / 16);
            let ours = schedule(&golden).schedule(steps.parse().unwrap(), tokens).unwrap();
            let expected = Vec::<f32>::try_from(expected).unwrap();
            assert_eq!(ours.sigmas.len(), expected.len());
            for (a, b) in ours.sigmas.iter().zip(&expected) {
                assert!((a - b).abs() <= 1e-6, "{} {name}: {a} {b}", golden.name);
            }
            compared += 1;
        }
        assert!(compared >= 3);
    }
}

/// [B, C, H, W] to diffusers' packed tokens, written independently of the model.
fn packed(latents: &Tensor) -> Tensor {
    let patches = latents.unfold(2, 2, 2).unfold(3, 2, 2); // [B, C, h, w, 2, 2]
    patches.permute([0, 2, 3, 1, 4, 5]).flatten(3, 5).flatten(1, 2)
}

#[test]
fn a_picture_is_the_pipelines_picture() {
    for golden in goldens() {
        let mut report = Report::new(&golden);
        let call = &golden.numbers["pipe/call"];
        let number = |name: &str| call[name].as_u64().unwrap() as usize;
        let (model, _) = golden.transformer(options(false));
        let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
        let encoders = golden.family.text_encoders(&golden.folder, options(false)).unwrap();
        let conditions = |prompt: &str| {
            let text = encoders.encode(&[prompt.to_owned()], number("max_sequence_length")).unwrap();
            golden.family.conditions(&[&text[0]], Device::Cpu, Kind::Float).unwrap()
        };
        let positive = conditions(call["prompt"].as_str().unwrap());
        let negative = call["negative_prompt"].as_str().map(conditions);
        let scale = call["true_cfg_scale"].as_f64().unwrap_or(1.0);
        let guidance = Guidance {
            positive: &positive,
            negative: negative.as_ref().map(|conditions| (conditions, scale)),
            distilled: call["guidance_scale"].as_f64().map(|g| g as f32),
        };

        let shape = vae.latent_shape(number("width") as u32, number("height") as u32);
        let batched: Vec<i64> = std::iter::once(1).chain(shape.iter().copied()).collect();
        let seed = golden.number("seed") as u64;
        let initial = torch::ops::randn_seeded(seed, &batched).unwrap();
        assert!(packed(&initial).equal(&golden.tensor("pipe/initial")), "the seed means the same noise");
        let schedule = schedule(&golden)
            .schedule(number("num_inference_steps"), golden.family.image_tokens(&shape[1..]) as usize)
            .unwrap();
        let latents = sample(model.as_ref(), &schedule, initial, &guidance, &mut |_, _| ControlFlow::Continue(()))
            .unwrap()
            .unwrap();
        report.close("pipeline", "final latents", &packed(&latents), &golden.tensor("pipe/final"));

        let pixels = no_grad(|| vae.decode(&latents)).unwrap();
        let ours = ((pixels / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round().permute([0, 2, 3, 1]);
        let difference = (ours - golden.tensor("pipe/frames_u8").to_kind(Kind::Float)).abs().max().double_value(&[]);
        println!("{}: pixels differ by at most {difference}/255", golden.name);
        assert!(difference <= 2.0);
    }
}

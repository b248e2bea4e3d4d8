//! Noise schedules and whole pictures are those of diffusers.

use std::ops::ControlFlow;

use diffusion::sample::{Denoiser, Guidance, sample};
use diffusion::schedule::{Scheduler, Spacing};
use tch::{Device, Kind, Tensor, no_grad};

use crate::support::{Golden, Report, goldens, options};

fn scheduler(golden: &Golden) -> Scheduler {
    Scheduler::from_config(&golden.folder.json("scheduler/scheduler_config.json", "test").unwrap()).unwrap()
}

fn spacing(golden: &Golden) -> Spacing {
    if golden.family.sampling().even_levels { Spacing::Even } else { Spacing::Trained }
}

#[test]
fn noise_levels_are_equal() {
    for golden in goldens() {
        let mut compared = 0;
        for (name, expected) in golden.under("sched/").into_iter().filter(|(name, _)| name.ends_with("/sigmas")) {
            // `STEPS`, or `STEPS_HEIGHTxWIDTH` where the size moves the levels.
            let what = name.trim_end_matches("/sigmas");
            let (steps, size) = what.split_once('_').unwrap_or((what, "16x16"));
            let (height, width) = size.split_once('x').unwrap();
            let tokens = height.parse::<usize>().unwrap() / 16 * (width.parse::<usize>().unwrap() / 16);
            let ours = scheduler(&golden).schedule(steps.parse().unwrap(), tokens, spacing(&golden)).unwrap();
            let close = |ours: &[f32], expected: Tensor, tolerance: f32| {
                let expected = Vec::<f32>::try_from(expected.to_kind(Kind::Float)).unwrap();
                assert_eq!(ours.len(), expected.len());
                for (a, b) in ours.iter().zip(&expected) {
                    assert!((a - b).abs() <= tolerance, "{} {name}: {a} {b}", golden.name);
                }
            };
            close(&ours.sigmas, expected, 1e-6);
            if let Some(times) = golden.find(&format!("sched/{what}/timesteps")) {
                close(&ours.timesteps, times, 1e-4);
            }
            compared += 1;
        }
        assert!(compared >= 3);
    }
}

/// Latents in the layout of the pipeline: FLUX packs [B, C, H, W] to tokens, here written independently of the model.
fn packed(golden: &Golden, latents: &Tensor) -> Tensor {
    if golden.family.name() != "flux" {
        return latents.shallow_clone();
    }
    let patches = latents.unfold(2, 2, 2).unfold(3, 2, 2); // [B, C, h, w, 2, 2]
    patches.permute([0, 2, 3, 1, 4, 5]).flatten(3, 5).flatten(1, 2)
}

#[test]
fn a_picture_is_the_pipelines_picture() {
    for golden in goldens() {
        let mut report = Report::new(&golden);
        let (call, rules) = (&golden.numbers["pipe/call"], golden.family.sampling());
        let number = |name: &str| call[name].as_u64().unwrap() as usize;
        let vae = golden.family.vae(&golden.folder, options(false)).unwrap();
        let encoders = golden.family.text_encoders(&golden.folder, options(false)).unwrap();
        let tokens = number("max_sequence_length");
        let conditions = |prompt: &str| {
            let text = encoders.encode(&[prompt.to_owned()], tokens).unwrap();
            golden.family.conditions(&[&text[0]], tokens, Device::Cpu, Kind::Float).unwrap()
        };
        let positive = conditions(call["prompt"].as_str().unwrap());
        let negative = call["negative_prompt"].as_str().map(conditions);
        let given = call["guidance_scale"].as_f64();
        let scale = if rules.classifier_free { given } else { call["true_cfg_scale"].as_f64() }.unwrap_or(1.0);
        let parts = golden.family.denoisers(&golden.folder).unwrap();
        let scales = [scale, call["guidance_scale_2"].as_f64().unwrap_or(scale)];
        let models: Vec<_> = parts.iter().map(|part| golden.denoiser(part.component, options(false)).0).collect();
        let denoisers: Vec<_> = models
            .iter()
            .zip(&parts)
            .zip(scales)
            .map(|((model, part), scale)| Denoiser::new(model.as_ref(), part.from, scale))
            .collect();
        let guidance = Guidance {
            positive: &positive,
            negative: negative.as_ref(),
            distilled: given.filter(|_| !rules.classifier_free).map(|g| g as f32),
        };

        let frames = call["num_frames"].as_u64().unwrap_or(1) as u32;
        let shape = vae.latent_shape(number("width") as u32, number("height") as u32, frames);
        let batched: Vec<i64> = std::iter::once(1).chain(shape.iter().copied()).collect();
        let seed = golden.number("seed") as u64;
        let initial = torch::ops::randn_seeded(seed, &batched).unwrap();
        assert!(packed(&golden, &initial).equal(&golden.tensor("pipe/initial")), "the seed means the same noise");
        let tokens = golden.family.image_tokens(&shape[1..]) as usize;
        let schedule = scheduler(&golden).schedule(number("num_inference_steps"), tokens, spacing(&golden)).unwrap();
        let mut on_step = |_, _| ControlFlow::Continue(());
        let latents = sample(&denoisers, &schedule, initial, &guidance, Kind::Float, &mut on_step).unwrap().unwrap();
        report.close("pipeline", "final latents", &packed(&golden, &latents), &golden.tensor("pipe/final"));

        let pixels = no_grad(|| vae.decode(&latents)).unwrap();
        let channels_last = if pixels.dim() == 5 { &[0, 2, 3, 4, 1][..] } else { &[0, 2, 3, 1] };
        let ours = ((pixels / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round().permute(channels_last);
        let theirs = golden.tensor("pipe/frames_u8").to_kind(Kind::Float);
        assert_eq!(ours.size(), theirs.size());
        let difference = (ours - theirs).abs().max().double_value(&[]);
        println!("{}: pixels differ by at most {difference}/255", golden.name);
        assert!(difference <= 2.0);
    }
}

//! Pictures are diffusers' for the same weights, prompt and seed.

use generate::Settings;
use serde_json::json;
use stage::{Event, Events, Exit};
use tables::ImageRow;

use crate::support::{Setup, copy, difference, fixture, golden};

/// diffusers' own pictures differ this much between machines.
const TOLERANCE: u8 = 2;

fn draws(name: &str) {
    let (setup, expected) = Setup::golden(name);
    let run = setup.run();
    let found = difference(&run.pictures()[0], &expected);
    assert!(found <= TOLERANCE, "{name}: differs by {found} of 255");
}

#[test]
fn a_prompt_and_a_seed_give_the_picture_of_diffusers() {
    draws("plain");
    draws("seed");
}

#[test]
fn a_prompt_longer_than_the_encoders_read_gives_the_picture_of_diffusers_and_a_warning() {
    let (setup, expected) = Setup::golden("long");
    let run = setup.run();
    assert!(difference(&run.pictures()[0], &expected) <= TOLERANCE);
    let warned = |encoder: &str| {
        run.events.iter().any(|event| matches!(event, Event::Warning { message } if message.contains(encoder)))
    };
    assert!(warned("`t5` reads 32") && warned("`clip` reads 77"), "{:?}", run.events);
}

#[test]
fn a_negative_prompt_gives_the_picture_of_diffusers() {
    draws("negative");
}

#[test]
fn a_lora_of_diffusers_at_full_and_at_half_strength_gives_the_pictures_of_diffusers() {
    draws("lora");
    draws("lora_half");
}

#[test]
fn a_lora_of_peft_gives_the_picture_of_peft() {
    draws("lora_peft");
}

#[test]
fn other_dimensions_without_guidance_embedding_give_the_picture_of_diffusers() {
    draws("odd");
}

#[test]
fn bfloat16_draws_its_own_noise_as_diffusers_does() {
    // Kernels round differently in bf16, so only the mean is held; noise drawn in f32 gives a mean difference above 50.
    let (setup, expected) = Setup::golden("bf16");
    let found = &setup.run().pictures()[0];
    let sum: u64 = found.rgb.iter().zip(&expected.rgb).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
    let mean = sum as f64 / expected.rgb.len() as f64;
    assert!(mean < 4.0, "{mean}");
}

#[test]
fn a_full_checkpoint_brings_its_own_weights_and_a_lora_checkpoint_goes_on_the_base() {
    let artifact = tempfile::tempdir().unwrap();
    // An older one that must not be taken.
    copy(&fixture("flux-odd"), &artifact.path().join("epoch_9_step_99"));
    copy(&fixture("flux-tiny"), &artifact.path().join("epoch_10_step_100"));
    let (mut setup, expected) = Setup::golden("plain");
    setup.model = fixture("flux-odd");
    setup.checkpoint = Some(artifact.path().into());
    let run = setup.run();
    assert!(difference(&run.pictures()[0], &expected) <= TOLERANCE);
    assert_eq!(run.outcome().info["checkpoint"], "epoch_10_step_100");

    let artifact = tempfile::tempdir().unwrap();
    copy(&fixture("flux-tiny/lora_diffusers"), &artifact.path().join("epoch_0_step_3"));
    let (mut setup, _) = Setup::golden("plain");
    setup.checkpoint = Some(artifact.path().into());
    setup.parameters["lora_scale"] = json!(0.5);
    assert!(difference(&setup.run().pictures()[0], &golden("lora_half").1) <= TOLERANCE);
}

#[test]
fn a_trained_lora_and_a_foreign_one_add_up() {
    let artifact = tempfile::tempdir().unwrap();
    copy(&fixture("flux-tiny/lora_diffusers"), &artifact.path().join("epoch_0_step_3"));
    let (mut setup, whole) = Setup::golden("lora");
    setup.checkpoint = Some(artifact.path().into());
    setup.parameters["lora"] = json!(fixture("flux-tiny/lora_diffusers"));
    setup.parameters["lora_scale"] = json!(0.5);
    let run = setup.run();
    assert!(difference(&run.pictures()[0], &whole) <= TOLERANCE, "two halves are one");
    let rows: Vec<ImageRow> = tables::read(&run.output().join("images.parquet")).unwrap();
    assert!(rows[0].lora.as_ref().unwrap().starts_with("epoch_0_step_3 + "), "{:?}", rows[0].lora);
}

#[test]
fn the_base_model_is_drawn_beside_the_checkpoint() {
    let artifact = tempfile::tempdir().unwrap();
    copy(&fixture("flux-tiny/lora_diffusers"), &artifact.path().join("epoch_0_step_3"));
    let (mut setup, plain) = Setup::golden("plain");
    setup.checkpoint = Some(artifact.path().into());
    setup.parameters["with_base"] = json!(true);
    let run = setup.run();
    let pictures = run.pictures();
    assert!(difference(&pictures[0], &golden("lora").1) <= TOLERANCE);
    assert!(difference(&pictures[1], &plain) <= TOLERANCE);
    let rows: Vec<ImageRow> = tables::read(&run.output().join("images.parquet")).unwrap();
    assert!(rows[1].file.ends_with("_base.png") && rows[1].lora.is_none() && rows[0].lora.is_some());
    assert_ne!(rows[0].checkpoint, rows[1].checkpoint);
}

#[test]
fn copies_take_the_next_seeds_and_batches_do_not_change_pictures() {
    let (mut setup, plain) = Setup::golden("plain");
    setup.parameters["images_per_prompt"] = json!(2);
    let prompt = setup.parameters["prompts"][0].clone();
    setup.parameters["prompts"] = json!([prompt, "another"]);
    let one = setup.run();
    let pictures = one.pictures();
    assert_eq!(pictures.len(), 4);
    assert!(difference(&pictures[0], &plain) <= TOLERANCE);
    assert!(difference(&pictures[1], &golden("seed").1) <= TOLERANCE);
    setup.settings = Settings { batch_size: 3 };
    for (a, b) in pictures.iter().zip(&setup.run().pictures()) {
        assert!(difference(a, b) <= 1);
    }
    let rows: Vec<ImageRow> = tables::read(&one.output().join("images.parquet")).unwrap();
    assert_eq!(rows.iter().map(|row| row.seed).collect::<Vec<_>>(), [2026, 2027, 2026, 2027]);
}

#[test]
fn a_png_says_how_it_was_drawn_and_a_sheet_shows_all() {
    let (mut setup, _) = Setup::golden("negative");
    setup.parameters["images_per_prompt"] = json!(2);
    let run = setup.run();
    let name = run.outcome().info["pictures"][0].as_str().unwrap().to_owned();
    assert_eq!(name, "000_a_trtcrd_of_a_lighthouse_keeper_holding_a_lantern.png");
    let bytes = fs_err::read(run.output().join(name)).unwrap();
    for (key, value) in [
        ("prompt", "a trtcrd of a lighthouse"),
        ("negative_prompt", "blurry, low quality"),
        ("true_cfg_scale", "3"),
        ("seed", "2026"),
        ("steps", "4"),
        ("guidance", "3.5"),
        ("width", "80"),
        ("height", "48"),
        ("dtype", "float32"),
    ] {
        let text = format!("{key}\0{value}");
        assert!(bytes.windows(text.len()).any(|window| window == text.as_bytes()), "{key} {value}");
    }
    let sheet = crate::support::read(&run.output().join("contact_sheet.png"));
    assert!(sheet.width > 160 && sheet.height > 48 && sheet.height < 96);
}

#[test]
fn a_rerun_gives_the_same_bytes() {
    let (setup, _) = Setup::golden("plain");
    let files = |run: &crate::support::Run| {
        let names = store::files_matching(&run.output(), &[]).unwrap();
        names.into_iter().map(|name| (fs_err::read(run.output().join(&name)).unwrap(), name)).collect::<Vec<_>>()
    };
    assert!(files(&setup.run()) == files(&setup.run()));
}

#[test]
fn an_interruption_ends_the_run_cleanly() {
    let (mut setup, _) = Setup::golden("plain");
    setup.before = Events::interrupt;
    assert_eq!(setup.run().result.unwrap_err().exit, Exit::Interrupted);
}

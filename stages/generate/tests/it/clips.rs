//! Clips are diffusers' frames for the same weights, prompt and seed, in an MP4 that says how it was made.

use bytes::Bytes;
use media::Picture;
use serde_json::{Value, json};
use tables::ImageRow;
use tch::{Kind, Tensor};

use crate::support::{Run, Setup, difference, fixture, read};

const FRAMES: usize = 5;

/// The golden call of `wan-tiny`, and the frames that diffusers draws.
fn golden() -> (Value, Vec<Picture>) {
    golden_of("wan-tiny", "pipe/frames_u8")
}

/// The golden call of a fixture, and the golden frames of this name.
fn golden_of(model: &str, name: &str) -> (Value, Vec<Picture>) {
    let numbers: Value = serde_json::from_slice(&fs_err::read(fixture(model).join("golden.json")).unwrap()).unwrap();
    let call = &numbers["pipe/call"];
    let parameters = json!({
        "prompts": [call["prompt"]], "negative_prompt": call["negative_prompt"], "guidance": call["guidance_scale"],
        "width": call["width"], "height": call["height"], "frames": call["num_frames"], "seed": numbers["seed"],
        "steps": call["num_inference_steps"], "max_sequence_length": call["max_sequence_length"], "frame_pngs": true,
        "guidance_2": call["guidance_scale_2"],
    });
    let tensors = Tensor::read_safetensors(fixture(model).join("golden.safetensors")).unwrap();
    let (_, frames) = tensors.into_iter().find(|(key, _)| key == name).unwrap();
    let size = frames.size();
    let frame = |n: i64| Picture {
        width: size[3] as u32,
        height: size[2] as u32,
        rgb: Vec::try_from(frames.get(0).get(n).contiguous().view(-1).to_kind(Kind::Uint8)).unwrap(),
    };
    (parameters, (0..size[1]).map(frame).collect())
}

fn frames(run: &Run) -> Vec<Picture> {
    frames_of(run, FRAMES)
}

fn frames_of(run: &Run, count: usize) -> Vec<Picture> {
    let name = run.outcome().info["pictures"][0].as_str().unwrap().to_owned();
    let folder = run.output().join(name).with_extension("");
    (0..count).map(|n| read(&folder.join(format!("frame_{n:04}.png")))).collect()
}

#[test]
fn a_prompt_and_a_seed_give_the_frames_of_diffusers() {
    let (parameters, expected) = golden();
    let run = Setup::new(fixture("wan-tiny"), parameters.clone()).run();
    let ours = frames(&run);
    assert_eq!(ours.len(), expected.len());
    for (ours, theirs) in ours.iter().zip(&expected) {
        assert!(difference(ours, theirs) <= 2);
    }
    let rows: Vec<ImageRow> = tables::read(&run.output().join("images.parquet")).unwrap();
    assert_eq!((rows[0].frames, rows[0].fps, rows[0].guidance, rows[0].true_cfg), (5, Some(16), 5.0, None));

    // The file holds those frames, nearly lossless, at the model's rate.
    let path = run.output().join(&rows[0].file);
    let bytes = Bytes::from(fs_err::read(&path).unwrap());
    let facts = video::probe(&bytes).unwrap();
    assert_eq!((facts.format, facts.frames, facts.width, facts.height), ("mp4", 5, 48, 32));
    assert!((facts.fps - 16.0).abs() < 1e-6);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    assert!(text.contains(r#""steps":"5""#) && text.contains(r#""negative_prompt""#), "settings are in the file");
    // Six cells at most, here one for each frame, in a row.
    let sheet = read(&run.output().join("contact_sheet.png"));
    assert!(sheet.width > 5 * 40 && sheet.height < 60, "{}x{}", sheet.width, sheet.height);

    let other = Setup::new(fixture("wan-tiny"), {
        let mut parameters = parameters;
        parameters["guidance"] = json!(1.0);
        parameters
    });
    assert!(difference(&frames(&other.run())[0], &expected[0]) > 2, "guidance has an effect");
}

/// An adapter that PEFT made, from its own files and from those that diffusers writes of it, changes the frames as it does there.
#[test]
fn an_adapter_gives_the_frames_of_diffusers() {
    for model in ["wan-tiny", "wan-odd"] {
        let (_, without) = golden_of(model, "pipe/frames_u8");
        let (parameters, expected) = golden_of(model, "pipe/lora_frames_u8");
        for files in ["lora_peft", "lora_diffusers"] {
            let mut parameters = parameters.clone();
            parameters["lora"] = json!(fixture(model).join(files));
            let run = Setup::new(fixture(model), parameters).run();
            let ours = frames_of(&run, expected.len());
            let most = |other: &[Picture]| ours.iter().zip(other).map(|(a, b)| difference(a, b)).max().unwrap();
            assert!(most(&expected) <= 2, "{model} {files}: {}", most(&expected));
            assert!(most(&without) > 20, "{model} {files}: the adapter is seen, {}", most(&without));
        }
    }
}

/// Two denoisers, each with its levels and its guidance, without and with an adapter for each; an adapter for one leaves the other
/// alone.
#[test]
fn two_denoisers_give_the_frames_of_diffusers() {
    const MODEL: &str = "wan22-tiny";
    let (parameters, plain) = golden_of(MODEL, "pipe/frames_u8");
    let (_, adapted) = golden_of(MODEL, "pipe/lora_frames_u8");
    let drawn = |more: Value| {
        let mut parameters = parameters.clone();
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let run = Setup::new(fixture(MODEL), parameters).run();
        let rows: Vec<ImageRow> = tables::read(&run.output().join("images.parquet")).unwrap();
        (frames_of(&run, plain.len()), rows[0].guidance_2)
    };
    let most = |a: &[Picture], b: &[Picture]| a.iter().zip(b).map(|(a, b)| difference(a, b)).max().unwrap();
    let (ours, guidance) = drawn(json!({}));
    assert!(most(&ours, &plain) <= 2 && guidance == Some(3.0), "{} {guidance:?}", most(&ours, &plain));
    let (other, guidance) = drawn(json!({"guidance_2": null}));
    assert!(most(&other, &plain) > 2 && guidance == Some(4.0), "the second guidance has an effect");

    let adapters = tempfile::tempdir().unwrap();
    let file = "pytorch_lora_weights.safetensors";
    let place = |folder: &str| {
        fs_err::create_dir_all(adapters.path().join(folder)).unwrap();
        fs_err::copy(fixture(MODEL).join("lora_diffusers").join(file), adapters.path().join(folder).join(file))
            .unwrap();
    };
    place("both");
    place("both/transformer_2");
    place("second/transformer_2");
    let [both, second, first] = ["both", "second", "both/pytorch_lora_weights.safetensors"]
        .map(|name| drawn(json!({"lora": adapters.path().join(name)})).0);
    assert!(most(&both, &adapted) <= 2, "{}", most(&both, &adapted));
    for (name, one) in [("second", &second), ("first", &first)] {
        assert!(most(one, &adapted) > 2 && most(one, &plain) > 2, "the {name} denoiser alone has an adapter");
    }
    assert!(most(&first, &second) > 2);
}

#[test]
fn one_frame_is_a_picture_and_a_wrong_number_is_refused() {
    let (mut parameters, _) = golden();
    parameters["frames"] = json!(1);
    let run = Setup::new(fixture("wan-tiny"), parameters.clone()).run();
    let picture = &run.pictures()[0];
    assert_eq!((picture.width, picture.height), (48, 32));
    parameters["frames"] = json!(6);
    let failure = Setup::new(fixture("wan-tiny"), parameters).run().result.unwrap_err();
    assert!(failure.problem.message.contains("`frames` is 6, expected 1 + 4 n"), "{}", failure.problem.message);
}

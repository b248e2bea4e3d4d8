//! Clips through a model of clips: latents of the frames they show, lengths by the recipe and the model's rule, text unpadded.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use encode::Settings;
use models::{ModelFolder, family_of};
use nn::BuildOptions;
use serde_json::{Value, json};
use tables::{CaptionInfo, LatentReader, Reject, Sample, TableReader};
use tch::{Device, Kind, Tensor};
use video::{Format, Rate, Writer, clock};

use crate::support::{Run, World, picture, raw, run_in_world, sample};

fn wan() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures/wan-tiny")
}

/// A row as `ingest` writes it, of a clock.
fn clip(fps: u32, frames: u32, caption: &str) -> Sample {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    let mut writer = Writer::create(&path, &Format::mp4(), (48, 32), fps, &[]).unwrap();
    (0..frames).for_each(|n| writer.push(&clock::frame(f64::from(n) / f64::from(fps), 48, 32, 1)).unwrap());
    writer.finish().unwrap();
    let row = raw(fs_err::read(path).unwrap(), 48, 32, caption);
    Sample { media: "mp4".into(), frames: frames as i32, fps: Some(fps as f32), ..row }
}

fn encoded(samples: Vec<Sample>, extra: Value) -> Run {
    let world = World { model: wan(), ..World::default() };
    let mut parameters = json!({"max_pixels": 1536});
    parameters.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    run_in_world(&world, samples, parameters, Settings::default(), 1, |_| {})
}

/// Buckets of the latents, by sample id.
fn buckets(run: &Run) -> Vec<(String, String)> {
    let reader = LatentReader::open(&run.output().join("latents")).unwrap();
    let mut rows: Vec<_> =
        reader.infos().map(|row| row.unwrap().1).map(|row| (row.sample_id.clone(), row.bucket().to_string())).collect();
    rows.sort();
    rows
}

#[test]
fn a_clip_gives_the_latent_of_the_frames_it_shows() {
    let row = clip(24, 40, "a clock");
    let run = encoded(vec![row.clone()], json!({"frames": 9}));
    assert_eq!(run.outcome().ledger.out, 1, "{:?}", run.events);
    let reader = LatentReader::open(&run.output().join("latents")).unwrap();
    assert_eq!((reader.meta().layout(), reader.meta().temporal_stride), ("CTHW", Some(4)));
    let (_, latent) = reader.rows().next().unwrap().unwrap();
    let shape: Vec<i64> = reader.meta().shape(latent.info().bucket()).iter().map(|n| *n as i64).collect();
    assert_eq!(shape, [16, 3, 4, 6]);

    // The same frames through the VAE, without the stage.
    let mut frames = Vec::new();
    video::frames::<video::Error>(&Bytes::from(row.bytes), Rate { fps: 16.0, count: 9 }, |frame| {
        let rgb = Tensor::from_slice(&frame.rgb).view([32, 48, 3]).permute([2, 0, 1]).to_kind(Kind::Float);
        frames.push(rgb / 127.5 - 1.0);
        Ok(())
    })
    .unwrap();
    let folder = ModelFolder::open(wan()).unwrap();
    let vae = family_of(&folder).unwrap().vae(&folder, BuildOptions::frozen(Device::Cpu, Kind::Float)).unwrap();
    let expected = vae.encode(&Tensor::stack(&frames, 1).unsqueeze(0), None).unwrap().squeeze_dim(0);
    let values: Vec<f32> = latent.latent.iter().map(|value| value.to_f32()).collect();
    let error = (Tensor::from_slice(&values).view(shape.as_slice()) - &expected).norm() / expected.norm();
    assert!(error.double_value(&[]) < 1e-3, "{error:?}");
}

#[test]
fn pictures_and_clips_of_all_lengths_find_their_buckets() {
    // Written once: an encoder need not give the same file twice.
    let samples = vec![clip(16, 17, "a"), clip(30, 33, "b"), clip(60, 25, "c"), sample(&picture(48, 32, 1), "d")];
    let ids: Vec<_> = samples.iter().map(|row| row.sample_id.clone()).collect();
    let found = |extra: Value| {
        let run = encoded(samples.clone(), extra);
        let found: Vec<_> = buckets(&run);
        let rejects: Vec<Reject> = tables::read(&run.output().join("rejects.parquet")).unwrap();
        let ledger = run.outcome().ledger;
        assert!(ledger.balances() && ledger.taken == 4, "{ledger:?}");
        let of = |id: &String| found.iter().find(|(other, _)| other == id).map(|(_, bucket)| bucket.clone());
        (ids.iter().map(of).collect::<Vec<_>>(), rejects)
    };
    let some = |names: [&str; 4]| names.map(|name| Some(name.to_owned())).to_vec();
    // 33 frames at 30 a second are 18 at 16, 25 at 60 are 7.
    let (trimmed, rejects) = found(json!({}));
    assert_eq!((trimmed, rejects.len()), (some(["48x32x17", "48x32x17", "48x32x5", "48x32"]), 0));
    assert_eq!(found(json!({"frame_rule": "pad"})).0, some(["48x32x17", "48x32x21", "48x32x9", "48x32"]));
    let (strict, rejects) = found(json!({"frame_rule": "reject"}));
    assert_eq!(strict.iter().flatten().collect::<Vec<_>>(), ["48x32x17", "48x32"]);
    assert!(rejects.iter().all(|row| row.reason == "frame_rule"), "{rejects:?}");
    let (asked, rejects) = found(json!({"frames": 9}));
    assert_eq!(asked.iter().flatten().collect::<Vec<_>>(), ["48x32x9", "48x32x9", "48x32"]);
    assert_eq!(rejects.iter().map(|row| row.reason.as_str()).collect::<Vec<_>>(), ["too_short"]);
    assert!(rejects[0].detail.contains("7 frames at 16 a second"), "{}", rejects[0].detail);
}

#[test]
fn text_is_stored_without_padding() {
    let run = encoded(vec![clip(16, 5, "a clock"), clip(16, 9, "&lt;a  clock&gt;")], json!({}));
    let table = TableReader::open(&run.output().join("captions")).unwrap();
    let rows: Vec<CaptionInfo> = table.rows().map(|row| row.unwrap().1).collect();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(row.encoder, "umt5");
        assert!((1..20).contains(&row.tokens), "{row:?}");
        assert_eq!(row.tokens == 1, row.text.is_empty(), "{row:?}");
    }
}

#[test]
fn lengths_the_model_cannot_take_are_refused_before_anything_runs() {
    let failure = encoded(vec![clip(16, 5, "a")], json!({"frames": 8})).result.unwrap_err();
    assert!(failure.problem.message.contains("`frames` is 8 frames, expected 1 + 4 n"), "{}", failure.problem.message);
    assert_eq!(failure.problem.field.as_deref(), Some("frames"));
}

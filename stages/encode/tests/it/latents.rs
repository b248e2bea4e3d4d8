//! Latents are diffusers', whatever the batch size, and every sample is accounted for.

use encode::Settings;
use half::f16;
use serde_json::json;
use stage::Exit;
use tables::{LatentReader, Reject};
use tch::{Kind, Tensor};

use crate::support::{golden, picture, raw, run, run_with, sample};

fn values(latent: &[f16]) -> Vec<f32> {
    latent.iter().map(|value| value.to_f32()).collect()
}

#[test]
fn a_picture_of_bucket_size_gives_the_latent_of_diffusers() {
    let bytes = fs_err::read(golden("picture.png")).unwrap();
    let run = run(vec![raw(bytes, 128, 64, "a")], json!({"buckets": ["128x64"]}));
    assert_eq!(run.outcome().ledger.out, 1);
    let reader = LatentReader::open(&run.output().join("latents")).unwrap();
    let (_, row) = reader.rows().next().unwrap().unwrap();
    assert_eq!((row.bucket_width, row.bucket_height, row.scale, row.crop_left, row.crop_top), (128, 64, 1.0, 0, 0));
    let expected = Tensor::read_safetensors(golden("expected.safetensors")).unwrap();
    let (_, expected) = expected.into_iter().find(|(name, _)| name == "latent").unwrap();
    assert_eq!(
        reader.meta().shape(row.info().bucket()),
        expected.size().iter().map(|n| *n as usize).collect::<Vec<_>>()
    );
    let ours = Tensor::from_slice(&values(&row.latent)).view_as(&expected);
    let difference = f64::try_from((&ours - &expected).abs().max()).unwrap();
    // Half a unit in the last place of f16, and the rounding of f32 before it.
    let bound = f64::try_from(expected.abs().max()).unwrap() * (0.5f64.powi(11) + 1e-5);
    assert!(difference <= bound, "{difference} > {bound}");
    let equal =
        ours.to_kind(Kind::Half).eq_tensor(&expected.to_kind(Kind::Half)).to_kind(Kind::Double).mean(Kind::Double);
    // The others lie where f32 rounding decides, which libtorch's group norm does with an error of 1e-5.
    assert!(f64::try_from(&equal).unwrap() > 0.98, "{equal} of the f16 values are equal");
}

// Batch sizes matter to a GPU only, where a batch may change the last bit of a latent.
#[test]
fn the_artifact_does_not_depend_on_batch_size_or_threads() {
    let samples =
        || (0..7).map(|i| sample(&picture(90 + 10 * i, 130 - 9 * i, i), &format!("card {}", i % 3))).collect();
    let parameters = || json!({"posterior": "sample", "seed": 7});
    let base = run(samples(), parameters());
    assert_eq!(base.outcome().ledger.out, 7);
    for (batch, threads) in [(1, 1), (1, 2), (3, 1), (8, 2)] {
        let settings = Settings { batch_size: Some(batch), text_batch_size: Some(batch) };
        let other = run_with(samples(), parameters(), settings, threads, |_| {});
        assert_eq!(other.outcome().info, base.outcome().info);
        for (name, bytes) in base.files() {
            assert!(other.files()[&name] == bytes, "{name} differs with batch size {batch} and {threads} threads");
        }
    }
}

#[test]
fn the_same_pictures_in_another_order_have_the_same_latents() {
    let samples: Vec<_> = (0..5).map(|i| sample(&picture(100, 70 + 20 * i, i), "x")).collect();
    let reversed = samples.iter().rev().cloned().collect();
    let table = |samples| {
        let run = run_with(
            samples,
            json!({"posterior": "sample", "seed": 3}),
            Settings { batch_size: Some(2), text_batch_size: None },
            1,
            |_| {},
        );
        let reader = LatentReader::open(&run.output().join("latents")).unwrap();
        let mut rows: Vec<_> = reader.rows().map(|row| row.unwrap().1).collect();
        rows.sort_by(|a, b| a.sample_id.cmp(&b.sample_id));
        rows
    };
    assert_eq!(table(samples), table(reversed));
}

#[test]
fn a_draw_differs_from_the_mean_and_by_seed_and_so_do_the_keys() {
    let row = |parameters| {
        let run = run(vec![sample(&picture(90, 90, 0), "x")], parameters);
        LatentReader::open(&run.output().join("latents")).unwrap().rows().next().unwrap().unwrap().1
    };
    let rows = [json!({}), json!({"posterior": "sample"}), json!({"posterior": "sample", "seed": 1})].map(row);
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        assert_ne!(rows[a].latent, rows[b].latent);
        assert_ne!(rows[a].item_key, rows[b].item_key);
    }
}

#[test]
fn a_bad_file_is_a_rejects_row_and_the_rest_goes_on() {
    let mut broken = sample(&picture(80, 80, 1), "broken");
    broken.bytes.truncate(60);
    let mut clip = sample(&picture(80, 80, 2), "clip");
    clip.frames = 17;
    let good = sample(&picture(80, 80, 3), "good");
    let run = run(vec![broken.clone(), good, clip.clone()], json!({}));
    let ledger = run.outcome().ledger;
    assert_eq!((ledger.taken, ledger.out, ledger.rejected, ledger.balances()), (3, 1, 2, true));
    let rejects: Vec<Reject> = tables::read(&run.output().join("rejects.parquet")).unwrap();
    let reason = |id: &str| &rejects.iter().find(|row| row.sample_id.as_deref() == Some(id)).unwrap().reason;
    assert_eq!(rejects.len(), 2);
    assert_eq!((reason(&broken.sample_id).as_str(), reason(&clip.sample_id).as_str()), ("decode", "unsupported"));
    assert!(rejects.iter().all(|row| row.stage == "encode"));
}

#[test]
fn enlarged_pictures_are_counted_and_told_or_refused() {
    let samples = || vec![sample(&picture(40, 40, 1), ""), sample(&picture(300, 300, 2), "")];
    let allowed = run(samples(), json!({"buckets": ["64x64"]}));
    assert_eq!(allowed.outcome().info["buckets"]["64x64"], json!({"samples": 2, "upscaled": 1}));
    assert!(
        allowed
            .warnings()
            .iter()
            .any(|text| text.starts_with("smaller than their bucket and enlarged: 1 of 2 samples")),
        "{:?}",
        allowed.warnings()
    );
    let refused = run(samples(), json!({"buckets": ["64x64"], "upscale": "reject"}));
    assert_eq!((refused.outcome().ledger.out, refused.outcome().ledger.rejected), (1, 1));
    let rejects: Vec<Reject> = tables::read(&refused.output().join("rejects.parquet")).unwrap();
    assert_eq!(rejects[0].reason, "too_small");
}

#[test]
fn nothing_encoded_is_a_failure_that_names_the_first_reason() {
    let mut broken = sample(&picture(80, 80, 1), "x");
    broken.bytes.truncate(60);
    let failure = run(vec![broken.clone()], json!({})).result.unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert!(failure.problem.message.contains(&broken.source), "{}", failure.problem.message);
}

#[test]
fn an_interruption_ends_the_run_cleanly() {
    let samples = vec![sample(&picture(80, 80, 1), "x")];
    let run = run_with(samples, json!({}), Settings::default(), 1, stage::Events::interrupt);
    assert_eq!(run.result.unwrap_err().exit, Exit::Interrupted);
}

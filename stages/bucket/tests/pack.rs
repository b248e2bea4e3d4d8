//! The stage from outside: real Parquet in, shards and ledger out.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bucket::{Bucketing, Parameters, Remainder, Settings};
use half::f16;
use proptest::prelude::*;
use stage::{CONTRACT, Events, Exit, Failure, Outcome, RunRequest, Stage, Work};
use tables::*;

fn meta() -> LatentMeta {
    LatentMeta {
        encoder: "vae".into(),
        channels: 4,
        spatial_stride: 8,
        temporal_stride: None,
        normalisation: Normalisation::ScaleShift { scaling: 0.3611, shift: 0.1159 },
    }
}

fn latent(id: usize, values: usize) -> Vec<f16> {
    (0..values).map(|k| f16::from_f32((id * 13 + k) as f32 / 3.0)).collect()
}

/// An `encoded` artifact: `ids` of each `(width, height)`, at most `per_file` in a file.
fn encoded(folder: &Path, buckets: &[(i32, i32, Vec<usize>)], per_file: usize) {
    for (width, height, ids) in buckets {
        for (part, ids) in ids.chunks(per_file).enumerate() {
            let path = folder.join(format!("latents/{width}x{height}/part-{part:05}.parquet"));
            let mut writer = LatentsWriter::create(&path, &meta()).unwrap();
            for &id in ids {
                let row = LatentInfo {
                    sample_id: format!("{id:016x}"),
                    bucket_width: *width,
                    bucket_height: *height,
                    bucket_frames: 1,
                    width: 100,
                    height: 200,
                    scale: 1.0,
                    crop_left: 0,
                    crop_top: 0,
                    caption_digest: format!("c{id}"),
                    item_key: format!("k{id}"),
                };
                writer.push(row.with(latent(id, (4 * width * height / 64) as usize))).unwrap();
            }
            writer.finish().unwrap();
        }
    }
}

fn run(input: &Path, output: &Path, parameters: Parameters) -> Result<Outcome, Failure> {
    run_with(input, None, output, parameters)
}

fn run_with(input: &Path, samples: Option<&Path>, output: &Path, parameters: Parameters) -> Result<Outcome, Failure> {
    let samples = samples.map(|samples| ("samples".to_owned(), samples.to_owned()));
    let request = RunRequest {
        contract: CONTRACT,
        parameters: serde_json::json!(parameters),
        base_dir: PathBuf::new(),
        sources: BTreeMap::new(),
        inputs: std::iter::once(("latents".to_owned(), input.to_owned())).chain(samples).collect(),
        output: output.to_owned(),
        scratch: output.join("scratch"),
        previous: Vec::new(),
        memo: None,
        device: "cpu".into(),
        threads: 1,
    };
    Bucketing::run(&Work {
        parameters,
        settings: Settings::default(),
        request,
        events: Events::to(Box::new(std::io::sink())),
    })
}

/// Rows of a bucket in shard order: `(sample id, repeated)`; checks shards against their index on the way.
fn rows_of(output: &Path, bucket: &str) -> Vec<(String, bool)> {
    let mut rows = Vec::new();
    for row in read::<ShardRow>(&output.join("shards.parquet")).unwrap() {
        let path = output.join(&row.shard);
        let bytes = fs_err::read(&path).unwrap();
        assert_eq!((row.bytes as usize, row.digest), (bytes.len(), store::Digest::of_bytes(&bytes).to_string()));
        let shard = ShardReader::open(&path).unwrap();
        assert_eq!(shard.meta(), &meta());
        assert_eq!((shard.bucket().width, shard.bucket().height), (row.bucket_width as u32, row.bucket_height as u32));
        assert_eq!(shard.rows() as i64, row.rows);
        assert_eq!((0..shard.rows()).filter(|&i| shard.repeated(i)).count() as i64, row.repeated);
        if shard.bucket().to_string() == bucket {
            for i in 0..shard.rows() {
                let id = usize::from_str_radix(shard.sample_id(i), 16).unwrap();
                assert_eq!(shard.latent(i), latent(id, shard.latent(i).len()));
                assert_eq!(shard.caption_digest(i), format!("c{id}"));
                rows.push((shard.sample_id(i).to_owned(), shard.repeated(i)));
            }
        }
    }
    rows
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn every_row_is_packed_once_or_held(
        first in prop::collection::hash_set(0usize..999, 0..30),
        second in prop::collection::hash_set(1000usize..1999, 0..30),
        batch_size in 1u64..9,
        remainder in prop_oneof![Just(Remainder::Pad), Just(Remainder::Short), Just(Remainder::Drop)],
        per_file in 1usize..20,
        shard_bytes in 1u64..4000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("in"), folder.path().join("out"));
        let buckets = [(16, 32, first), (32, 16, second)].map(|(w, h, ids)| (w, h, ids.into_iter().collect::<Vec<_>>()));
        encoded(&input, &buckets, per_file);
        let total: usize = buckets.iter().map(|b| b.2.len()).sum();
        let result = run(&input, &output, Parameters { batch_size, remainder, shard_bytes, condition: None });
        let whole = |n: usize| n - n % batch_size as usize;
        if total == 0 || remainder == Remainder::Drop && buckets.iter().all(|b| whole(b.2.len()) == 0) {
            prop_assert_eq!(result.unwrap_err().exit, Exit::Input);
            return Ok(());
        }
        let outcome = result.unwrap();
        prop_assert!(outcome.ledger.balances(), "{:?}", outcome.ledger);
        prop_assert_eq!(outcome.ledger.taken, total as u64);

        let held: Vec<Held> = read(&output.join("held.parquet")).unwrap();
        prop_assert_eq!(held.len() as u64, outcome.ledger.held);
        let mut out = 0;
        for (width, height, ids) in &buckets {
            let rows = rows_of(&output, &format!("{width}x{height}"));
            let mut expected: Vec<String> = ids.iter().map(|id| format!("{id:016x}")).collect();
            expected.sort();
            let kept: Vec<String> = rows.iter().filter(|row| !row.1).map(|row| row.0.clone()).collect();
            let held = held.iter().filter(|h| h.bucket == format!("{width}x{height}")).map(|h| h.sample_id.clone());
            prop_assert_eq!(kept.iter().cloned().chain(held).collect::<Vec<_>>(), expected, "in order, once");
            for (i, row) in rows.iter().enumerate().skip(kept.len()) {
                prop_assert!(row.1 && row.0 == kept[i % kept.len()], "repeats follow, from the first row on");
            }
            if remainder != Remainder::Short {
                prop_assert_eq!(rows.len() % batch_size as usize, 0);
            }
            out += kept.len();
        }
        prop_assert_eq!(out as u64, outcome.ledger.out);
    }
}

#[test]
fn files_and_their_order_do_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<usize> = (0..40).map(|i| i * 37 % 101).collect();
    let reversed: Vec<usize> = ids.iter().rev().copied().collect();
    let digests = [("a", ids, 40), ("b", reversed, 3)].map(|(name, ids, per_file)| {
        let (input, output) = (folder.path().join(name), folder.path().join(name).join("out"));
        encoded(&input, &[(16, 32, ids)], per_file);
        run(&input, &output, Parameters { batch_size: 7, ..Parameters::default() }).unwrap();
        ["shards.parquet", "held.parquet", "rejects.parquet", "shards/16x32/00000.arrow"]
            .map(|file| fs_err::read(output.join(file)).unwrap())
    });
    assert!(digests[0] == digests[1]);
}

#[test]
fn the_report_says_what_each_bucket_costs() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    encoded(&input, &[(16, 32, (0..10).collect()), (32, 16, vec![99])], 4);
    let outcome = run(&input, &output, Parameters { batch_size: 4, ..Parameters::default() }).unwrap();
    assert_eq!(outcome.summary, "11 rows and 5 repeats in 2 shards: 12 16x32 (3 batches), 4 32x16 (1 batch)");
    let bytes = |n: usize| {
        fs_err::metadata(output.join(["shards/16x32/00000.arrow", "shards/32x16/00000.arrow"][n])).unwrap().len()
    };
    let expected = serde_json::json!({ "batch_size": 4, "remainder": "pad", "buckets": [
        { "bucket": "16x32", "rows": 10, "repeated": 2, "held": 0, "batches": 3, "shards": 1, "bytes": bytes(0) },
        { "bucket": "32x16", "rows": 1, "repeated": 3, "held": 0, "batches": 1, "shards": 1, "bytes": bytes(1) },
    ]});
    assert_eq!(outcome.info, expected);

    let dropped = Parameters { batch_size: 4, remainder: Remainder::Drop, ..Parameters::default() };
    let outcome = run(&input, &folder.path().join("drop"), dropped).unwrap();
    assert_eq!(outcome.summary, "8 rows, 3 held back in 1 shard: 8 16x32 (2 batches), 0 32x16 (0 batches)");
    let held: Vec<Held> = read(&folder.path().join("drop/held.parquet")).unwrap();
    assert_eq!(
        held[0],
        Held { sample_id: format!("{:016x}", 8), bucket: "16x32".into(), reason: "fills no batch of 4".into() }
    );
}

#[test]
fn what_cannot_be_packed_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    let mut tries = 0;
    let mut failure = |parameters: Parameters| {
        tries += 1;
        let failure = run(&input, &folder.path().join(format!("out{tries}")), parameters).unwrap_err();
        (failure.exit, failure.problem.message)
    };
    let (exit, message) = failure(Parameters::default());
    assert_eq!((exit, message.as_str()), (Exit::Input, "there is no latent to pack"));
    fs_err::create_dir_all(input.join("latents")).unwrap();
    assert_eq!(failure(Parameters::default()).1, "there is no latent to pack");

    encoded(&input, &[(16, 32, vec![5]), (32, 16, vec![6])], 9);
    let (exit, message) = failure(Parameters { batch_size: 2, remainder: Remainder::Drop, ..Parameters::default() });
    assert_eq!(
        (exit, message.as_str()),
        (Exit::Input, "no bucket has a whole batch of 2 rows, so every row would be held back")
    );

    encoded(&input, &[(16, 32, vec![5, 5])], 1);
    let (exit, message) = failure(Parameters::default());
    assert_eq!(
        (exit, message.as_str()),
        (Exit::Input, "sample `0000000000000005` is twice in bucket 16x32 of the latents")
    );

    let path = input.join("latents/16x32/part-00000.parquet");
    let whole = fs_err::read(&path).unwrap();
    fs_err::write(&path, &whole[..whole.len() / 2]).unwrap();
    let (exit, message) = failure(Parameters::default());
    assert!(exit == Exit::Input && message.contains("16x32/part-00000.parquet` is truncated"), "{message}");
}

#[test]
fn parameters_are_checked() {
    let check = |parameters| {
        Bucketing::check(&parameters, &Settings {}, &stage::CheckRequest::new(serde_json::Value::Null, ""))
    };
    assert_eq!(check(Parameters::default()).problems, []);
    let checked = check(Parameters { batch_size: 0, shard_bytes: 0, ..Parameters::default() });
    let fields: Vec<_> = checked.problems.iter().map(|p| p.field.as_deref().unwrap()).collect();
    assert_eq!(fields, ["batch_size", "shard_bytes"]);
    assert_eq!(check(Parameters { remainder: Remainder::Drop, ..Parameters::default() }).notes.len(), 1);
}

/// Digest of each shard.
fn shards(output: &Path) -> Vec<String> {
    read::<ShardRow>(&output.join("shards.parquet")).unwrap().into_iter().map(|row| row.digest).collect()
}

fn held(output: &Path) -> Vec<(String, String)> {
    let rows: Vec<Held> = read(&output.join("held.parquet")).unwrap();
    rows.into_iter().map(|row| (row.sample_id, row.reason)).collect()
}

#[test]
fn a_condition_holds_rows_back_and_leaves_other_shards_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    encoded(&input, &[(16, 32, (0..600).collect())], 100);
    let parameters = |condition: Option<&str>| Parameters {
        shard_bytes: 64 * 40,
        condition: condition.map(str::to_owned),
        ..Parameters::default()
    };
    let out = |name: &str| folder.path().join(name);
    run(&input, &out("all"), parameters(None)).unwrap();
    let condition = format!("sample_id <> '{:016x}' and scale <= 1", 300);
    let outcome = run(&input, &out("but-one"), parameters(Some(&condition))).unwrap();
    assert_eq!((outcome.ledger.taken, outcome.ledger.out, outcome.ledger.held), (600, 599, 1));
    assert_eq!(held(&out("but-one")), [(format!("{:016x}", 300), format!("not where {condition}"))]);
    assert_eq!(rows_of(&out("but-one"), "16x32").len(), 599);
    let (all, but_one) = (shards(&out("all")), shards(&out("but-one")));
    let changed = but_one.iter().filter(|digest| !all.contains(digest)).count();
    assert!(all.len() > 30 && (1..=2).contains(&changed), "{changed} of {} shards changed", all.len());
    run(&input, &out("again"), parameters(Some(&condition))).unwrap();
    assert_eq!(shards(&out("again")), but_one);

    let none = run(&input, &out("none"), parameters(Some("width > 100"))).unwrap_err();
    assert_eq!((none.exit, none.problem.field.as_deref()), (Exit::Input, Some("where")));
    // What is unknown does not hold, and what fails is no answer.
    assert_eq!(run(&input, &out("null"), parameters(Some("null = 1"))).unwrap_err().exit, Exit::Input);
    assert_eq!(run(&input, &out("zero"), parameters(Some("1 / (width - 100) = 1"))).unwrap_err().exit, Exit::Recipe);
}

#[test]
fn a_condition_sees_samples_and_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let (input, samples) = (folder.path().join("in"), folder.path().join("samples"));
    encoded(&input, &[(16, 32, (0..4).collect())], 9);
    let mut writer = SamplesWriter::create(&samples.join("samples/part-00000.parquet")).unwrap();
    for id in 0..4 {
        let row = SampleInfo {
            sample_id: format!("{id:016x}"),
            source: format!("{id}.png"),
            media: "png".into(),
            width: 100,
            height: 200,
            frames: 1,
            fps: None,
            caption: format!("card {id}"),
            digest: String::new(),
        };
        writer.push(row.with(vec![id as u8; id])).unwrap();
    }
    writer.finish().unwrap();
    for (condition, kept) in [
        ("caption = 'card 2'", vec![2]),
        ("source >= '2.png' and media = 'png'", vec![2, 3]),
        ("tensor_max(latent) < 12 and width = 100", vec![0]),
    ] {
        let output = folder.path().join(format!("out-{}", kept.len() + kept[0]));
        let parameters = Parameters { condition: Some(condition.to_owned()), ..Parameters::default() };
        run_with(&input, Some(&samples), &output, parameters).unwrap();
        let ids: Vec<_> = rows_of(&output, "16x32").into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, kept.iter().map(|id| format!("{id:016x}")).collect::<Vec<_>>(), "{condition}");
    }
}

#[test]
fn a_condition_is_looked_over_before_anything_runs() {
    let check = |condition: &str, inputs: &[&str]| {
        let mut request = stage::CheckRequest::new(serde_json::Value::Null, "");
        request.inputs = inputs.iter().map(|input| (*input).to_owned()).collect();
        let parameters = Parameters { condition: Some(condition.to_owned()), ..Parameters::default() };
        Bucketing::check(&parameters, &Settings {}, &request).problems
    };
    let both = &["latents", "samples"];
    for good in
        ["caption not like '%blurry%' and scale <= 1", "tensor_std(latent) > 0.1", "true", "(width > 1) or (1=1)"]
    {
        assert_eq!(check(good, both), [], "{good}");
    }
    for (wrong, told) in [
        ("capton = 'x'", "no column `capton`"),
        ("width", "must be true or false"),
        ("", "where"),
        ("width > 1) or (1=1", "where"),
        ("true; select 1", "where"),
        ("random() > 0.5", "clock or chance"),
        ("now() > to_timestamp(0)", "clock or chance"),
        ("sum(width) > 3", "where"),
        ("sample_id in (select sample_id from samples)", "where"),
    ] {
        let problems = check(wrong, both);
        assert_eq!(problems.len(), 1, "{wrong}: {problems:?}");
        assert_eq!(problems[0].field.as_deref(), Some("where"));
        assert!(problems[0].message.contains(told), "{wrong}: {}", problems[0].message);
    }
    assert!(check("capton = 'x'", both)[0].help.as_deref().unwrap().contains("did you mean `caption`?"));
    assert_eq!(check("caption = 'x'", &["latents"]).len(), 1, "without samples there is no caption");

    // Without a condition, samples are neither read nor part of the key.
    let request = stage::CheckRequest::new(serde_json::Value::Null, "");
    let checked = Bucketing::check(&Parameters::default(), &Settings {}, &request);
    assert!(checked.unused.contains("samples") && checked.key.get("where").is_none());
}

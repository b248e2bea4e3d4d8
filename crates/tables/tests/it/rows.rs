//! Typed rows: round trips, determinism, memory bounds, damage.

use std::path::Path;

use proptest::prelude::*;
use tables::*;

fn text() -> impl Strategy<Value = String> {
    "\\PC{0,12}|日本語|a'b\"c\n,;|"
}

/// Bytes that no other `i` has.
fn noise(i: usize, bytes: usize) -> Vec<u8> {
    let mut state = i as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let block: Vec<u8> = (0..256).map(|_| next()).collect();
    let mut noise = block.repeat(bytes.div_ceil(256));
    noise.truncate(bytes);
    noise
}

fn sample(i: usize, bytes: usize) -> Sample {
    Sample {
        sample_id: format!("{i:016x}"),
        source: format!("cards/{i}.jpg"),
        media: "jpeg".into(),
        width: 300 + i as i32,
        height: 527,
        frames: 1,
        fps: (i % 2 == 1).then_some(24.0),
        caption: format!("a trtcrd of \"{i}\""),
        digest: format!("{i:064x}"),
        bytes: noise(i, bytes),
    }
}

fn samples(path: &Path, rows: usize, bytes: usize) -> Vec<Sample> {
    let rows: Vec<Sample> = (0..rows).map(|i| sample(i, bytes)).collect();
    write(path, rows.clone()).unwrap();
    rows
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    /// Rows with pages of their own and rows that share one, over three files.
    #[test]
    fn selected_rows_are_those_rows_and_their_places(
        wanted in prop::collection::vec(0..60usize, 0..20),
        bytes in prop::sample::select(vec![10, 40_000, 100_000]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        for part in 0..3 {
            write(&folder.path().join(format!("{part}.parquet")), (part * 20..part * 20 + 20).map(|i| sample(i, bytes))).unwrap();
        }
        let table = TableReader::open(folder.path()).unwrap();
        let all: Vec<(Location, SampleInfo)> = table.rows().map(Result::unwrap).collect();
        let selected: Vec<(Location, Sample)> = table.select(wanted.iter().map(|i| all[*i].0).collect()).map(Result::unwrap).collect();
        let expected: std::collections::BTreeSet<usize> = wanted.into_iter().collect();
        prop_assert_eq!(selected.len(), expected.len());
        for ((at, row), i) in selected.into_iter().zip(expected) {
            prop_assert_eq!(at, all[i].0);
            prop_assert_eq!(row, sample(i, bytes));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn rejects_come_back(rows in prop::collection::vec((prop::option::of(text()), text(), text()), 0..40)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rejects.parquet");
        let rows: Vec<Reject> = rows.into_iter().map(|(sample_id, source, detail)| {
            Reject { sample_id, source, stage: "ingest".into(), reason: "decode".into(), detail }
        }).collect();
        let written = write(&path, rows.clone()).unwrap();
        prop_assert_eq!(written.rows, rows.len() as u64);
        prop_assert_eq!(written.bytes, fs_err::metadata(&path).unwrap().len());
        prop_assert_eq!(read::<Reject>(&path).unwrap(), rows);
    }

    #[test]
    fn losses_come_back_bit_for_bit(rows in prop::collection::vec((any::<i64>(), any::<u32>(), any::<bool>()), 0..40)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("losses.parquet");
        let rows: Vec<Loss> = rows.into_iter().map(|(step, bits, dropped)| Loss {
            step, epoch: 0, sample_id: step.to_string(), sigma: 0.5, weight: 1.0, loss: f32::from_bits(bits), dropped,
        }).collect();
        write(&path, rows.clone()).unwrap();
        let back = read::<Loss>(&path).unwrap();
        prop_assert_eq!(back.len(), rows.len());
        for (a, b) in back.iter().zip(&rows) {
            prop_assert_eq!((a.step, a.loss.to_bits(), a.dropped), (b.step, b.loss.to_bits(), b.dropped));
        }
    }
}

#[test]
fn the_other_tables_come_back() {
    fn same<R: Row + Clone + PartialEq + std::fmt::Debug>(rows: &[R]) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        write(&path, rows.to_vec()).unwrap();
        assert_eq!(read::<R>(&path).unwrap(), rows);
        assert_eq!(schema::by_name(R::TABLE).unwrap(), schema::of::<R>());
    }
    same(&[Held { sample_id: "a".into(), bucket: "384x640".into(), reason: "remainder".into() }]);
    same(&[Step {
        step: 1,
        epoch: 0,
        loss: 0.1,
        lr: 1e-5,
        grad_norm: 2.0,
        samples: 32,
        seconds: 1.5,
        memory_bytes: 9,
    }]);
    same(&[Validation { step: 3, sigma: 0.1, loss: 0.25 }]);
    let (shard, digest) = ("shards/384x640/00000.arrow".into(), "d".into());
    same(&[ShardRow {
        shard,
        bucket_width: 384,
        bucket_height: 640,
        bucket_frames: 1,
        rows: 80,
        repeated: 2,
        bytes: 9,
        digest,
    }]);
    let image = |lora: Option<&str>| ImageRow {
        file: "0.png".into(),
        prompt: "p".into(),
        negative_prompt: lora.map(Into::into),
        seed: -1,
        width: 384,
        height: 640,
        frames: 1,
        fps: None,
        steps: 28,
        guidance: 3.5,
        guidance_2: lora.map(|_| 3.0),
        true_cfg: lora.map(|_| 4.0),
        lora: lora.map(Into::into),
        lora_scale: lora.map(|_| 0.5),
        checkpoint: "c".into(),
        style: lora.map(|_| 0.75),
    };
    same(&[image(None), image(Some("x"))]);
    same::<Step>(&[]);
}

#[test]
fn equal_rows_make_equal_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = |name: &str| {
        let path = folder.path().join(name);
        samples(&path, 40, 3000);
        fs_err::read(path).unwrap()
    };
    assert!(bytes("a.parquet") == bytes("b.parquet"));
}

#[test]
fn one_sample_is_read_without_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part-00000.parquet");
    let rows = samples(&path, 60, 200_000);
    // Damage all pictures but number 41: a reader that touches another page would give other bytes, or fail.
    let mut file = fs_err::read(&path).unwrap();
    let mut from = 0;
    for (i, row) in rows.iter().enumerate() {
        let found = file[from..].windows(64).position(|w| w == &row.bytes[100..164]);
        let at = from + found.unwrap_or_else(|| panic!("picture {i}"));
        from = at + 199_000;
        if i != 41 {
            file[at..from].fill(0);
        }
    }
    fs_err::write(&path, file).unwrap();
    let table = TableReader::open(folder.path()).unwrap();
    let infos: Vec<(Location, SampleInfo)> = table.rows().collect::<Result<_>>().unwrap();
    assert_eq!(infos.len(), 60);
    assert!(infos.iter().zip(&rows).all(|((_, info), row)| *info == row.info()));
    assert_eq!(table.get::<Sample>(infos[41].0).unwrap(), rows[41]);
    assert_ne!(table.get::<Sample>(infos[40].0).unwrap(), rows[40]);
}

#[test]
fn rows_are_found_across_row_groups_and_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = samples(&folder.path().join("b/part-00000.parquet"), 75, 1_000_000);
    rows.extend(samples(&folder.path().join("c/part-00000.parquet"), 3, 10));
    fs_err::write(folder.path().join("c/part-00001.parquet.part"), "unfinished").unwrap();
    let table = TableReader::open(folder.path()).unwrap();
    assert_eq!(table.len(), 78);
    let streamed: Vec<(Location, Sample)> = table.rows().collect::<Result<_>>().unwrap();
    assert!(streamed.iter().zip(&rows).all(|((_, a), b)| a == b));
    for i in [0, 1, 63, 66, 67, 68, 69, 74, 75, 77] {
        assert_eq!(table.get::<Sample>(streamed[i].0).unwrap(), rows[i], "row {i}");
    }
}

#[test]
fn an_unfinished_table_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("samples.parquet");
    let mut writer = SamplesWriter::create(&path).unwrap();
    writer.push(sample(0, 10)).unwrap();
    assert_eq!(writer.rows(), 1);
    assert!(!path.exists());
    drop(writer);
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_is_wrong_with_a_file_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steps.parquet");
    let shown = path.display().to_string();
    let error = |path: &Path| read::<Step>(path).unwrap_err().to_string();

    assert!(error(&path).starts_with(&format!("cannot read `{shown}`")), "{}", error(&path));
    write(&path, [Validation { step: 1, sigma: 0.5, loss: 1.0 }]).unwrap();
    assert_eq!(error(&path), format!("`{shown}` has no column `epoch`"));
    fs_err::write(&path, "step,loss\n1,2\n").unwrap();
    assert!(error(&path).starts_with(&format!("`{shown}` is truncated, damaged or not a table")), "{}", error(&path));

    let empty = folder.path().join("empty");
    fs_err::create_dir(&empty).unwrap();
    assert_eq!(error(&empty), format!("no `.parquet` file in `{}`", empty.display()));
}

#[test]
fn a_column_of_another_type_is_named() {
    use arrow::array::{ArrayRef, Int32Array, RecordBatch, StringArray};
    use std::sync::Arc;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("validation.parquet");
    let put = |step: ArrayRef| {
        let sigma = Arc::new(arrow::array::Float32Array::from(vec![0.5])) as ArrayRef;
        let loss = Arc::new(arrow::array::Float64Array::from(vec![0.5])) as ArrayRef;
        let batch = RecordBatch::try_from_iter([("step", step), ("sigma", sigma), ("loss", loss)]).unwrap();
        let mut writer = TableWriter::create(&path, batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
        read::<Validation>(&path).unwrap_err().to_string()
    };
    let shown = path.display();
    assert_eq!(put(Arc::new(Int32Array::from(vec![1]))), format!("column `step` of `{shown}` is `Int32`, not `Int64`"));
    assert_eq!(
        put(Arc::new(StringArray::from(vec!["1"]))),
        format!("column `step` of `{shown}` is `Utf8`, not `Int64`")
    );
    let null = put(Arc::new(arrow::array::Int64Array::from(vec![None])));
    assert_eq!(null, format!("column `step` of `{shown}` holds a null in row 0"));
}

#[test]
fn a_truncated_table_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rejects.parquet");
    let row = Reject { sample_id: None, source: "s".into(), stage: "t".into(), reason: "r".into(), detail: "d".into() };
    write(&path, vec![row; 5]).unwrap();
    let whole = fs_err::read(&path).unwrap();
    for length in (0..whole.len()).step_by(7) {
        fs_err::write(&path, &whole[..length]).unwrap();
        let error = read::<Reject>(&path).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }) && error.to_string().contains("rejects.parquet"), "{error}");
    }
}

#[test]
fn a_full_disk_is_told_apart() {
    if !Path::new("/dev/full").exists() {
        eprintln!("skipped: /dev/full absent");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rejects.parquet");
    fs_err::os::unix::fs::symlink("/dev/full", folder.path().join("rejects.parquet.part")).unwrap();
    let row = Reject { sample_id: None, source: "s".into(), stage: "t".into(), reason: "r".into(), detail: "d".into() };
    let error = write(&path, vec![row; 5]).unwrap_err();
    assert_eq!(error.io_kind(), Some(std::io::ErrorKind::StorageFull), "{error}");
}

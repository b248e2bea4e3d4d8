//! Shards: round trips, determinism, damage.

use proptest::prelude::*;

use super::*;
use crate::Normalisation;

fn meta() -> LatentMeta {
    let normalisation = Normalisation::ScaleShift { scaling: 0.3611, shift: 0.1159 };
    LatentMeta { encoder: "vae".into(), channels: 2, spatial_stride: 8, temporal_stride: None, normalisation }
}

fn latent(i: usize, values: usize) -> Vec<f16> {
    (0..values).map(|k| f16::from_f32((i * 31 + k) as f32 / 7.0)).collect()
}

fn write(path: &Path, bucket: Bucket, rows: usize) -> usize {
    let values = meta().shape(bucket).iter().product();
    let mut writer = ShardWriter::create(path, &meta(), bucket).unwrap();
    for i in 0..rows {
        writer.push(&format!("id{i}"), &format!("caption{}", i % 3), i % 4 == 3, &latent(i, values)).unwrap();
    }
    assert_eq!(writer.finish().unwrap().rows, rows as u64);
    values
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn rows_come_back_unchanged_and_unmoved(rows in 0usize..20, width in 1u32..40, height in 1u32..40) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/0.arrow");
        let bucket = Bucket { width: 8 * width, height: 8 * height, frames: 1 };
        let values = write(&path, bucket, rows);
        let shard = ShardReader::open(&path).unwrap();
        prop_assert_eq!(shard.rows(), rows);
        prop_assert_eq!(shard.bucket(), bucket);
        prop_assert_eq!(shard.meta(), &meta());
        prop_assert_eq!(shard.shape(), vec![2, height as usize, width as usize]);
        for i in 0..rows {
            prop_assert_eq!(shard.sample_id(i), format!("id{i}"));
            prop_assert_eq!(shard.caption_digest(i), format!("caption{}", i % 3));
            prop_assert_eq!(shard.repeated(i), i % 4 == 3);
            prop_assert_eq!(shard.latent(i), latent(i, values));
        }
    }
}

#[test]
fn many_batches_are_one_shard() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.arrow");
    let bucket = Bucket { width: 2048, height: 2048, frames: 1 };
    let values = write(&path, bucket, 17);
    let shard = ShardReader::open(&path).unwrap();
    assert!(shard.batches.len() > 1, "the test means to cross a batch");
    for i in (0..17).rev() {
        assert_eq!((shard.sample_id(i), shard.latent(i)), (format!("id{i}").as_str(), latent(i, values).as_slice()));
    }
}

#[test]
fn equal_rows_make_equal_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = |name: &str| {
        let path = folder.path().join(name);
        write(&path, Bucket { width: 64, height: 32, frames: 1 }, 7);
        fs_err::read(path).unwrap()
    };
    assert!(bytes("a") == bytes("b"));
}

#[test]
fn a_latent_of_another_shape_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.arrow");
    let mut writer = ShardWriter::create(&path, &meta(), Bucket { width: 16, height: 8, frames: 1 }).unwrap();
    let error = writer.push("abc", "c", false, &latent(0, 5)).unwrap_err().to_string();
    assert_eq!(error, "shards row `abc`: its latent has 5 values, but the shard's rows have 4");
    drop(writer);
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 0, "an unfinished shard is removed");
}

#[test]
fn a_truncated_shard_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.arrow");
    write(&path, Bucket { width: 64, height: 64, frames: 1 }, 3);
    let whole = fs_err::read(&path).unwrap();
    for length in (0..whole.len()).step_by(5) {
        fs_err::write(&path, &whole[..length]).unwrap();
        let error = ShardReader::open(&path).err().unwrap_or_else(|| panic!("{length} bytes were read")).to_string();
        assert!(error.contains("0.arrow"), "{error}");
        fs_err::remove_file(&path).unwrap();
    }
}

/// Structure, not values: a flipped bit of a latent is for the artifact's digest to find.
#[test]
fn a_damaged_shard_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0.arrow");
    write(&path, Bucket { width: 16, height: 8, frames: 1 }, 2);
    let whole = fs_err::read(&path).unwrap();
    for at in 0..whole.len() {
        for bit in [0x01, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[at] ^= bit;
            if let Ok(shard) = ShardReader::decode(&Buffer::from(damaged.as_slice()), &path) {
                for i in 0..shard.rows() {
                    assert_eq!(shard.latent(i).len(), shard.shape().iter().product::<usize>());
                    let _ = (shard.sample_id(i), shard.caption_digest(i), shard.repeated(i));
                }
            }
        }
    }
}

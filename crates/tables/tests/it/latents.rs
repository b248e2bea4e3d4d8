//! Latents: shaped by their bucket, described by their column.

use half::f16;
use proptest::prelude::*;
use tables::*;

fn meta() -> LatentMeta {
    LatentMeta {
        encoder: "0123".into(),
        channels: 16,
        spatial_stride: 8,
        temporal_stride: None,
        normalisation: Normalisation::ScaleShift { scaling: 0.3611, shift: 0.1159 },
    }
}

fn row(i: usize, width: i32, height: i32) -> Latent {
    let values = 16 * (width / 8) * (height / 8);
    Latent {
        sample_id: format!("{i:016x}"),
        bucket_width: width,
        bucket_height: height,
        bucket_frames: 1,
        width: 700,
        height: 1200,
        scale: 0.5486,
        crop_left: 0,
        crop_top: 9,
        caption_digest: caption_digest("x"),
        item_key: format!("key{i}"),
        latent: (0..values).map(|k| f16::from_bits((i as u16).wrapping_mul(977).wrapping_add(k as u16))).collect(),
    }
}

fn bits(latent: &[f16]) -> Vec<u16> {
    latent.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]
    #[test]
    fn latents_of_several_buckets_come_back_bit_for_bit(buckets in prop::collection::vec((1i32..6, 1i32..6), 1..12)) {
        let folder = tempfile::tempdir().unwrap();
        let rows: Vec<Latent> = buckets.iter().enumerate().map(|(i, (w, h))| row(i, 64 * w, 64 * h)).collect();
        for (i, part) in rows.chunks(3).enumerate() {
            let mut writer = LatentsWriter::create(&folder.path().join(format!("part-{i:05}.parquet")), &meta()).unwrap();
            for row in part {
                writer.push(row.clone()).unwrap();
            }
            writer.finish().unwrap();
        }
        let latents = LatentReader::open(folder.path()).unwrap();
        prop_assert_eq!(latents.meta(), &meta());
        prop_assert_eq!(latents.len(), rows.len());
        let infos: Vec<_> = latents.infos().collect::<Result<_>>().unwrap();
        for ((at, info), row) in infos.iter().zip(&rows).rev() {
            prop_assert_eq!(info, &row.info());
            let got = latents.get(*at).unwrap();
            prop_assert_eq!(got.info(), row.info());
            prop_assert_eq!(bits(&got.latent), bits(&row.latent));
        }
        for (streamed, row) in latents.rows().zip(&rows) {
            prop_assert_eq!(bits(&streamed.unwrap().1.latent), bits(&row.latent));
        }
    }
}

#[test]
fn a_latent_of_another_shape_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = LatentsWriter::create(&folder.path().join("l.parquet"), &meta()).unwrap();
    let mut bad = row(1, 384, 640);
    bad.latent.pop();
    assert_eq!(
        writer.push(bad).unwrap_err().to_string(),
        "latents row `0000000000000001`: its latent has 61439 values, but bucket 384x640 makes [16, 80, 48], 61440 values"
    );
}

#[test]
fn shapes_follow_layout_and_strides() {
    let shape = |meta: &LatentMeta, bucket: &str| meta.shape(bucket.parse().unwrap());
    assert_eq!((meta().layout(), shape(&meta(), "384x640")), ("CHW", vec![16, 80, 48]));
    let video = LatentMeta { temporal_stride: Some(4), ..meta() };
    assert_eq!((video.layout(), shape(&video, "64x32x17")), ("CTHW", vec![16, 5, 4, 8]));
    assert_eq!(shape(&video, "64x32"), [16, 1, 4, 8]);
}

#[test]
fn files_made_differently_are_not_one_table() {
    let folder = tempfile::tempdir().unwrap();
    let normalisation = Normalisation::MeanStd { mean: vec![0.1; 16], std: vec![1.0 / 3.0; 16] };
    for (i, meta) in [meta(), LatentMeta { normalisation, ..meta() }].iter().enumerate() {
        let path = folder.path().join(format!("{i}.parquet"));
        let mut writer = LatentsWriter::create(&path, meta).unwrap();
        writer.push(row(i, 64, 64)).unwrap();
        writer.finish().unwrap();
        assert_eq!(LatentReader::open(&path).unwrap().meta(), meta);
    }
    let error = LatentReader::open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("1.parquet") && error.contains("differs"), "{error}");
}

#[test]
fn a_column_that_does_not_say_how_it_was_made_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l.parquet");
    write(&path, [row(0, 64, 64)]).unwrap();
    let error = LatentReader::open(&path).err().unwrap().to_string();
    assert!(error.contains("column `latent`") && error.contains("does not say how it was made"), "{error}");
}

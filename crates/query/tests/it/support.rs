//! A run's tables in a temporary folder.

use std::path::Path;

use half::{bf16, f16};
use query::{Error, Format, TableSource, run};
use tables::*;

pub(crate) struct Run {
    pub(crate) folder: tempfile::TempDir,
}

/// f16 of `3 sin(k + shift) + 0.5`, which the reference values of `functions.rs` belong to.
pub(crate) fn wave(shift: usize) -> Vec<f16> {
    (0..12).map(|k| f16::from_f64(((k + shift) as f64).sin() * 3.0 + 0.5)).collect()
}

pub(crate) fn wave_bf16() -> Vec<u8> {
    (0..12).flat_map(|k| bf16::from_f64(f64::from(k).sin() * 3.0 + 0.5).to_le_bytes()).collect()
}

/// Bucket 32x24 makes `[1, 3, 4]`, bucket 16x24 `[1, 3, 2]`.
pub(crate) fn latents(folder: &Path) {
    let normalisation = Normalisation::ScaleShift { scaling: 0.5, shift: 0.0 };
    let meta = LatentMeta { encoder: "e".into(), channels: 1, spatial_stride: 8, temporal_stride: None, normalisation };
    let nan = vec![f16::NAN, f16::ONE, f16::ONE, f16::ONE, f16::ONE, f16::ONE];
    for (bucket, rows) in [("32x24", vec![("a", wave(0)), ("b", wave(5))]), ("16x24", vec![("c", nan)])] {
        let path = folder.join(format!("latents/{bucket}/part-00000.parquet"));
        let mut writer = LatentsWriter::create(&path, &meta).unwrap();
        for (id, latent) in rows {
            let row = LatentInfo {
                sample_id: id.into(),
                bucket_width: bucket[..2].parse().unwrap(),
                bucket_height: 24,
                bucket_frames: 1,
                width: 100,
                height: 200,
                scale: 0.5,
                crop_left: 0,
                crop_top: 0,
                caption_digest: caption_digest("x"),
                item_key: "k".into(),
            };
            writer.push(row.with(latent)).unwrap();
        }
        writer.finish().unwrap();
    }
}

pub(crate) fn captions(folder: &Path) {
    let meta = TextMeta { encoders: [("t5".to_owned(), "1".to_owned())].into(), max_tokens: 3 };
    let mut writer = CaptionsWriter::create(&folder.join("captions/part-00000.parquet"), &meta).unwrap();
    let info = CaptionInfo {
        caption_digest: caption_digest("x"),
        text: "x".into(),
        encoder: "t5".into(),
        tokens: 3,
        width: 4,
        text_tokens: 3,
        max_tokens: 3,
        item_key: "k".into(),
    };
    writer.push(info.with(Some(wave_bf16()), None)).unwrap();
    writer.finish().unwrap();
}

pub(crate) fn step(step: i64, loss: f64) -> Step {
    Step { step, epoch: step / 3, loss, lr: 1e-5, grad_norm: 1.0, samples: 32, seconds: 0.5, memory_bytes: 1 << 30 }
}

impl Run {
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("a [run] 100% ü*").tempdir().unwrap();
        latents(folder.path());
        captions(folder.path());
        write(&folder.path().join("steps.parquet"), (0..10).map(|i| step(i, 1.0 / (i + 1) as f64))).unwrap();
        Self { folder }
    }

    pub(crate) fn tables(&self) -> Vec<TableSource> {
        let globs = [
            ("latents", "latents/*/*.parquet"),
            ("captions", "captions/*.parquet"),
            ("steps", "steps.parquet"),
            ("rejects", "**/rejects.parquet"),
            ("unheard_of", "unheard_of.parquet"),
        ];
        globs.map(|(name, glob)| TableSource::glob(name, self.folder.path(), glob).unwrap()).into()
    }

    pub(crate) fn ask(&self, sql: &str, format: Format) -> String {
        let mut out = Vec::new();
        run(&self.tables(), sql, format, &mut out).unwrap_or_else(|error| panic!("{sql}: {error}"));
        String::from_utf8(out).unwrap()
    }

    /// The one number a query gives.
    pub(crate) fn number(&self, sql: &str) -> f64 {
        let csv = self.ask(sql, Format::Csv);
        csv.lines().nth(1).and_then(|line| line.parse().ok()).unwrap_or_else(|| panic!("{sql} gave {csv}"))
    }

    pub(crate) fn fail(&self, sql: &str) -> Error {
        let mut out = Vec::new();
        run(&self.tables(), sql, Format::Csv, &mut out).expect_err(sql)
    }
}

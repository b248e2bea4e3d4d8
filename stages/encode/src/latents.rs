//! The device half of the second pass: pictures of one bucket to latents, a batch at a time, into one file a bucket.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use half::f16;
use media::Cropped;
use models::Vae;
use nn::rng::Stream;
use serde_json::json;
use spec::Bucket;
use stage::{Events, Failure, Work};
use store::Digest;
use tables::{LatentInfo, LatentMeta, LatentsWriter, Normalisation, Reject, SampleInfo, TableReader, caption_digest};
use tch::{Device, Kind, Tensor, no_grad};

use crate::engine::Engine;
use crate::parameters::{Parameters, Posterior};
use crate::pictures::prepare;
use crate::plan::{Count, Plan, Refusal, upscales};
use crate::{Encode, KEPT, VERSION, unusable};

/// What came of the pictures.
pub(crate) struct Made {
    /// Latents written.
    pub(crate) encoded: u64,
    /// Samples refused.
    pub(crate) rejected: u64,
    /// Detail of the first of them.
    pub(crate) first_reject: Option<String>,
    /// Bucket → latents in it.
    pub(crate) buckets: BTreeMap<String, Count>,
}

/// Encodes every sample into `latents/<bucket>/part-00000.parquet`, or refuses it into `rejects.parquet`.
pub(crate) fn encode(
    work: &Work<Encode>,
    samples: &TableReader,
    plan: &Plan,
    vae: &(dyn Vae + Send + Sync),
    identity: &Digest,
    engine: &Engine,
) -> Result<Made, Failure> {
    let encoder = Encoder {
        vae,
        device: engine.device,
        parameters: &work.parameters,
        meta: meta(vae, identity),
        key: json!({ "step": VERSION, "vae": identity, "how": work.parameters.picture_key() }),
    };
    let batch_size = engine.batch_size(work.settings.batch_size, 8);
    let mut lanes: BTreeMap<Bucket, Lane> = BTreeMap::new();
    let mut refused = Refused::default();
    let settled = AtomicU64::new(0);
    let settle = |lanes: &mut BTreeMap<Bucket, Lane>, refused: &mut Refused, batches: Vec<Batch>| {
        let latents = engine.run(&batches, |batch| {
            work.events.check_interrupted(KEPT)?;
            let latents = encoder.encode(batch)?;
            let done = settled.fetch_add(latents.len() as u64, Ordering::Relaxed) + latents.len() as u64;
            work.events.progress("encoding pictures", done, Some(plan.rows), "pictures", None);
            Ok::<_, Failure>(latents)
        });
        for (batch, latents) in batches.into_iter().zip(latents) {
            if let Some(lane) = lanes.get_mut(&batch.bucket) {
                lane.write(&encoder, batch, latents?, refused, &work.events)?;
            }
        }
        Ok::<_, Failure>(())
    };
    thread::scope(|scope| {
        for chunk in prepare(scope, samples, plan, work.parameters.background.0, work.request.threads)? {
            let mut batches = Vec::new();
            for prepared in chunk? {
                match prepared.picture {
                    Err(refusal) => {
                        settled.fetch_add(1, Ordering::Relaxed);
                        refused.push(&work.events, &prepared.row, refusal);
                    }
                    Ok((bucket, cropped)) => {
                        let lane = match lanes.entry(bucket) {
                            Entry::Occupied(lane) => lane.into_mut(),
                            Entry::Vacant(place) => place.insert(Lane::create(&work.request.output, bucket, &encoder)?),
                        };
                        lane.pending.push((prepared.row, cropped));
                        if lane.pending.len() >= batch_size {
                            batches.push(lane.take());
                        }
                    }
                }
            }
            settle(&mut lanes, &mut refused, batches)?;
        }
        let left = lanes.values_mut().filter(|lane| !lane.pending.is_empty()).map(Lane::take).collect();
        settle(&mut lanes, &mut refused, left)
    })?;

    let mut buckets = BTreeMap::new();
    for (bucket, lane) in lanes {
        if lane.count.samples > 0 {
            buckets.insert(bucket.to_string(), lane.count);
            lane.writer.finish().map_err(unusable)?;
        }
    }
    let rejected = refused.rows.len() as u64;
    let first_reject = refused.rows.first().map(|row| format!("{}: {}", row.source, row.detail));
    // The order of refusals depends on how batches fill; their sources do not.
    refused.rows.sort_by(|a, b| (&a.source, &a.sample_id).cmp(&(&b.source, &b.sample_id)));
    tables::write(&work.request.output.join("rejects.parquet"), refused.rows).map_err(unusable)?;
    Ok(Made { encoded: buckets.values().map(|count| count.samples).sum(), rejected, first_reject, buckets })
}

fn meta(vae: &(dyn Vae + Send + Sync), identity: &Digest) -> LatentMeta {
    // A side that any stride divides.
    const SIDE: u32 = 1 << 10;
    let shape = vae.latent_shape(SIDE, SIDE, 1);
    let normalisation = match vae.normalisation() {
        models::Normalisation::ScaleShift { scale, shift } => Normalisation::ScaleShift { scaling: scale, shift },
        models::Normalisation::MeanStd { mean, std } => Normalisation::MeanStd { mean, std },
    };
    LatentMeta {
        encoder: identity.to_string(),
        channels: shape[0] as u32,
        spatial_stride: SIDE / shape[shape.len() - 1] as u32,
        temporal_stride: None,
        normalisation,
    }
}

/// The VAE and all that decides what it makes of a picture.
struct Encoder<'a> {
    vae: &'a (dyn Vae + Send + Sync),
    device: Device,
    parameters: &'a Parameters,
    meta: LatentMeta,
    key: serde_json::Value,
}

impl Encoder<'_> {
    /// Latents of a batch, flat, or what keeps one from being stored.
    fn encode(&self, batch: &Batch) -> Result<Vec<Result<Vec<f16>, Refusal>>, Failure> {
        let Batch { bucket, pictures } = batch;
        let mut rgb = Vec::with_capacity(pictures.len() * 3 * bucket.pixels() as usize);
        for (_, cropped) in pictures {
            rgb.extend_from_slice(&cropped.picture.rgb);
        }
        let size = [pictures.len() as i64, i64::from(bucket.height), i64::from(bucket.width), 3];
        let shape = self.vae.latent_shape(bucket.width, bucket.height, bucket.frames);
        let latents = no_grad(|| {
            let noise = self.noise(pictures, &shape);
            self.vae.encode(&pixels(&rgb, size, self.device), noise.as_ref())
        });
        let latents = latents.map_err(Failure::from_diagnostic)?.to_device(Device::Cpu);
        (0..pictures.len() as i64).map(|i| to_f16(&latents.get(i)).map_err(Failure::from_error)).collect()
    }

    /// Standard normal noise of each sample, or none for the mean.
    fn noise(&self, pictures: &[(SampleInfo, Cropped)], shape: &[i64]) -> Option<Tensor> {
        let count = shape.iter().product::<i64>() as usize;
        let one = |row: &SampleInfo| {
            let values =
                Stream::new(self.parameters.seed, &["posterior".into(), (&row.sample_id).into()]).normals(count);
            Tensor::from_slice(&values).view(shape)
        };
        (self.parameters.posterior == Posterior::Sample).then(|| {
            let rows: Vec<_> = pictures.iter().map(|(row, _)| one(row)).collect();
            Tensor::stack(&rows, 0).to_device(self.device)
        })
    }

    /// Key of the item: everything its values depend on.
    fn item_key(&self, row: &SampleInfo, bucket: Bucket) -> String {
        let draw = (self.parameters.posterior == Posterior::Sample).then_some(&row.sample_id);
        let background = self.parameters.background;
        let what = json!({ "sample": row.digest, "bucket": bucket, "draw": draw, "background": background });
        Digest::of_json(&json!({ "latent": what, "encoder": self.key })).to_string()
    }
}

/// RGB bytes [B, H, W, 3] to [B, 3, H, W] in [-1, 1], rounded as diffusers' `VaeImageProcessor` rounds.
fn pixels(rgb: &[u8], size: [i64; 4], device: Device) -> Tensor {
    let bytes = Tensor::from_slice(rgb).view(size).to_device(device);
    (bytes.permute([0, 3, 1, 2]).contiguous().to_kind(Kind::Float) / 255.0) * 2.0 - 1.0
}

/// Pictures of one bucket that are encoded at once.
struct Batch {
    bucket: Bucket,
    pictures: Vec<(SampleInfo, Cropped)>,
}

/// One bucket: pictures that wait for a batch to fill, and the file of those encoded.
struct Lane {
    bucket: Bucket,
    pending: Vec<(SampleInfo, Cropped)>,
    writer: LatentsWriter,
    count: Count,
}

impl Lane {
    fn create(output: &Path, bucket: Bucket, encoder: &Encoder<'_>) -> Result<Self, Failure> {
        let path = output.join(format!("latents/{bucket}/part-00000.parquet"));
        let writer = LatentsWriter::create(&path, &encoder.meta).map_err(unusable)?;
        Ok(Self { bucket, pending: Vec::new(), writer, count: Count::default() })
    }

    /// What waits, as a batch.
    fn take(&mut self) -> Batch {
        Batch { bucket: self.bucket, pictures: std::mem::take(&mut self.pending) }
    }

    /// Writes what was made of a batch.
    fn write(
        &mut self,
        encoder: &Encoder<'_>,
        batch: Batch,
        latents: Vec<Result<Vec<f16>, Refusal>>,
        refused: &mut Refused,
        events: &Events,
    ) -> Result<(), Failure> {
        for ((row, cropped), latent) in batch.pictures.into_iter().zip(latents) {
            match latent {
                Err(refusal) => refused.push(events, &row, refusal),
                Ok(latent) => {
                    self.count.samples += 1;
                    self.count.upscaled += u64::from(upscales(&row, self.bucket));
                    let info = LatentInfo {
                        bucket_width: self.bucket.width as i32,
                        bucket_height: self.bucket.height as i32,
                        bucket_frames: self.bucket.frames as i32,
                        width: row.width,
                        height: row.height,
                        scale: cropped.scale,
                        crop_left: cropped.left as i32,
                        crop_top: cropped.top as i32,
                        caption_digest: caption_digest(&row.caption),
                        item_key: encoder.item_key(&row, self.bucket),
                        sample_id: row.sample_id,
                    };
                    self.writer.push(info.with(latent)).map_err(unusable)?;
                }
            }
        }
        Ok(())
    }
}

/// Values as f16, or what keeps them from being stored.
fn to_f16(latent: &Tensor) -> Result<Result<Vec<f16>, Refusal>, tch::TchError> {
    let half = latent.f_to_kind(Kind::Half)?.contiguous().view(-1);
    let bad = half.isfinite().f_logical_not()?.nonzero();
    if bad.numel() > 0 {
        let at = i64::try_from(bad.get(0).get(0))?;
        let value = f64::try_from(latent.contiguous().view(-1).get(at))?;
        let detail = format!("value {at} of the latent is {value}, which 16 bits cannot hold");
        return Ok(Err(Refusal { reason: "non_finite", detail }));
    }
    Ok(Ok(Vec::try_from(half)?))
}

/// Refused samples so far.
#[derive(Default)]
struct Refused {
    rows: Vec<Reject>,
}

impl Refused {
    fn push(&mut self, events: &Events, row: &SampleInfo, refusal: Refusal) {
        events.rejected(&row.sample_id, refusal.reason, &refusal.detail);
        self.rows.push(Reject {
            sample_id: Some(row.sample_id.clone()),
            source: row.source.clone(),
            stage: "encode".to_owned(),
            reason: refusal.reason.to_owned(),
            detail: refusal.detail,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_are_channels_first_and_span_minus_one_to_one() {
        // Two pixels across, one down: red and a grey.
        let tensor = pixels(&[255, 0, 0, 51, 51, 51], [1, 1, 2, 3], Device::Cpu);
        assert_eq!(tensor.size(), [1, 3, 1, 2]);
        let values = Vec::<f32>::try_from(tensor.view(-1)).unwrap();
        let grey = 51.0f32 / 255.0 * 2.0 - 1.0;
        assert_eq!(values, [1.0, grey, -1.0, grey, -1.0, grey]);
    }

    #[test]
    fn what_sixteen_bits_cannot_hold_is_refused_by_value() {
        let convert = |values: &[f32]| to_f16(&Tensor::from_slice(values)).unwrap();
        // The last rounds to even.
        let values = convert(&[0.5, -65504.0, 1.0 + 1.0 / 2048.0]).unwrap();
        assert_eq!(values, [f16::from_f32(0.5), f16::MIN, f16::ONE]);
        for bad in [f32::NAN, f32::INFINITY, 1e5] {
            let refusal = convert(&[0.0, bad]).unwrap_err();
            assert!(refusal.reason == "non_finite" && refusal.detail.contains("value 1"), "{refusal:?}");
        }
    }
}

//! The device half of the second pass: pictures of one bucket to latents, a batch at a time. A picture whose latent is there
//! is neither decoded nor encoded.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use half::f16;
use models::{Clips, DynVae, Vae};
use nn::rng::Stream;
use serde_json::{Value, json};
use spec::{Bucket, Problem};
use stage::{Events, Failure, Work};
use store::Digest;
use tables::{Latent, LatentInfo, LatentMeta, Normalisation, Reject, SampleInfo, TableReader, caption_digest};
use tch::{Device, Kind, Tensor, no_grad};

use crate::engine::Engine;
use crate::parameters::{Parameters, Posterior};
use crate::pictures::{Taken, prepare};
use crate::plan::{Count, Item, Plan, Refusal};
use crate::shards;
use crate::stock::{File, Latents, Parts, Place, Stock};
use crate::{CLIP_VERSION, Encode, ITEM_VERSION, KEPT, unusable};

/// What came of the pictures.
pub(crate) struct Made {
    /// Latents in the artifact.
    pub(crate) encoded: u64,
    /// Those of them that were encoded now.
    pub(crate) new: u64,
    /// Samples refused.
    pub(crate) rejected: u64,
    /// Detail of the first of them.
    pub(crate) first_reject: Option<String>,
    /// Bucket → latents in it.
    pub(crate) buckets: BTreeMap<String, Count>,
}

/// What decides a latent, apart from its picture and its bucket.
pub(crate) struct Keys<'a> {
    parameters: &'a Parameters,
    encoder: Value,
}

impl<'a> Keys<'a> {
    /// With the VAE of that identity.
    pub(crate) fn new(parameters: &'a Parameters, vae: &Digest) -> Self {
        let encoder = json!({ "step": ITEM_VERSION, "vae": vae, "how": parameters.picture_key() });
        Self { parameters, encoder }
    }

    /// Key of an item: everything its values depend on.
    pub(crate) fn of(&self, item: &Item) -> Digest {
        let draw = (self.parameters.posterior == Posterior::Sample).then_some(&item.sample_id);
        let background = self.parameters.background;
        let mut what = json!({ "sample": item.digest, "bucket": item.bucket, "draw": draw, "background": background });
        if let Some(rate) = item.rate {
            what["rate"] = rate.into();
            what["clips"] = CLIP_VERSION.into();
        }
        Digest::of_json(&json!({ "latent": what, "encoder": self.encoder }))
    }
}

/// Items whose latent is not there, each once although several samples may be the same picture.
pub(crate) fn missing<'p>(plan: &'p Plan, keys: &[Digest], stock: &Stock<Latents>) -> Vec<(&'p Item, Digest)> {
    let mut seen = BTreeSet::new();
    let items = plan.items.iter().zip(keys.iter().copied());
    items.filter(|(_, key)| stock.find(key).is_none() && seen.insert(*key)).collect()
}

/// Writes the latent of every sample into `latents/<bucket>/`, or refuses it into `rejects.parquet`. The VAE is loaded only
/// if it has to be.
pub(crate) fn encode(
    work: &Work<Encode>,
    samples: &TableReader,
    plan: &Plan,
    identity: &Digest,
    load: impl FnOnce() -> Result<(DynVae, Engine), Failure>,
) -> Result<Made, Failure> {
    let by = Keys::new(&work.parameters, identity);
    let keys: Vec<Digest> = plan.items.iter().map(|item| by.of(item)).collect();
    let wanted: BTreeSet<Digest> = keys.iter().copied().collect();
    let mut stock = Stock::<Latents>::gather(&work.request.previous, Some(&work.request.scratch), &wanted)?;
    let todo = missing(plan, &keys, &stock);
    let mut failed = BTreeMap::new();
    let mut meta = stock.meta()?;
    if !todo.is_empty() {
        let (vae, engine) = load()?;
        let clips = plan.clips();
        let encoder = Encoder { vae: vae.as_ref(), device: engine.device, parameters: &work.parameters, clips };
        let known = meta.insert(self::meta(vae.as_ref(), identity, clips)).clone();
        let mut parts = Parts::new(&work.request, known, &wanted);
        failed = make(work, samples, &todo, &encoder, &engine, &mut stock, &mut parts)?;
        parts.close(&mut stock)?;
    }

    let mut refused = Refused::default();
    for (row, refusal) in &plan.refused {
        refused.push(&work.events, row, refusal.clone());
    }
    let mut buckets = BTreeMap::<Bucket, Vec<(&Item, Place)>>::new();
    for (item, key) in plan.items.iter().zip(&keys) {
        match (stock.find(key), failed.get(key)) {
            (Some(place), _) => buckets.entry(item.bucket).or_default().push((item, place)),
            (None, Some(refusal)) => {
                let row: SampleInfo = samples.get(item.at).map_err(unusable)?;
                refused.push(&work.events, &row, Refusal::clone(refusal));
            }
            (None, None) => {
                return Err(Problem::new(format!("the latent of sample `{}` was lost", item.sample_id)).into());
            }
        }
    }
    let mut counts = BTreeMap::new();
    for (bucket, mut rows) in buckets {
        rows.sort_by(|(a, _), (b, _)| a.sample_id.cmp(&b.sample_id));
        if let Some(meta) = &meta {
            write(work, bucket, meta, &stock, &rows)?;
        }
        let upscaled = rows.iter().filter(|(item, _)| item.upscaled).count() as u64;
        counts.insert(bucket.to_string(), Count { samples: rows.len() as u64, upscaled });
    }
    let rejected = refused.rows.len() as u64;
    // In the order of their sources, however they were found.
    refused.rows.sort_by(|a, b| (&a.source, &a.sample_id).cmp(&(&b.source, &b.sample_id)));
    let first_reject = refused.rows.first().map(|row| format!("{}: {}", row.source, row.detail));
    tables::write(&work.request.output.join("rejects.parquet"), refused.rows).map_err(unusable)?;
    let new = (todo.len() - failed.len()) as u64;
    Ok(Made { encoded: counts.values().map(|count| count.samples).sum(), new, rejected, first_reject, buckets: counts })
}

/// Writes the latents of a bucket, which are in the order of their sample ids.
fn write(
    work: &Work<Encode>,
    bucket: Bucket,
    meta: &LatentMeta,
    stock: &Stock<Latents>,
    rows: &[(&Item, Place)],
) -> Result<(), Failure> {
    let folder = work.request.output.join(format!("latents/{bucket}"));
    let places: Vec<Place> = rows.iter().map(|(_, place)| *place).collect();
    let row_bytes = 2 * meta.shape(bucket).iter().product::<usize>();
    let ends = shards::ends(rows.iter().map(|(item, _)| item.sample_id.as_str()), row_bytes);
    let same = |first: usize, file: &File| {
        let mut rows = rows[first..].iter().map(|(item, _)| *item);
        let is = |row: &LatentInfo, item: &Item| row.sample_id == item.sample_id && row.caption_digest == item.caption;
        file.table
            .rows::<LatentInfo>()
            .all(|row| row.is_ok_and(|(_, row)| rows.next().is_some_and(|item| is(&row, item))))
    };
    let adapt = |number: usize, row: &mut Latent| {
        let (item, _) = rows[number];
        row.sample_id.clone_from(&item.sample_id);
        row.caption_digest.clone_from(&item.caption);
    };
    shards::write(&folder, meta, stock, &places, &ends, same, adapt, &work.events)
}

/// Encodes pictures, a chunk at a time; what was refused instead.
fn make(
    work: &Work<Encode>,
    samples: &TableReader,
    todo: &[(&Item, Digest)],
    encoder: &Encoder<'_>,
    engine: &Engine,
    stock: &mut Stock<Latents>,
    parts: &mut Parts<'_, Latents>,
) -> Result<BTreeMap<Digest, Refusal>, Failure> {
    let items: Vec<&Item> = todo.iter().map(|(item, _)| *item).collect();
    let batch_size = engine.batch_size(work.settings.batch_size, 8);
    let settled = AtomicU64::new(0);
    let settle = |count: usize| {
        let done = settled.fetch_add(count as u64, Ordering::Relaxed) + count as u64;
        work.events.progress("encoding pictures", done, Some(todo.len() as u64), "pictures", None);
    };
    let mut failed = BTreeMap::new();
    let mut run = |batches: Vec<Batch>, failed: &mut BTreeMap<Digest, Refusal>| {
        let latents = engine.run(&batches, |batch| {
            work.events.check_interrupted(KEPT)?;
            let latents = encoder.encode(batch)?;
            settle(latents.len());
            Ok::<_, Failure>(latents)
        });
        let mut rows = Vec::new();
        for (batch, latents) in batches.into_iter().zip(latents) {
            for (picture, latent) in batch.pictures.into_iter().zip(latents?) {
                match latent {
                    Ok(latent) => rows.push(row(picture, batch.bucket, latent)),
                    Err(refusal) => drop(failed.insert(picture.key, refusal)),
                }
            }
        }
        parts.push(stock, rows)
    };
    thread::scope(|scope| {
        let mut keys = todo.iter().map(|(_, key)| *key);
        let mut waiting: BTreeMap<Bucket, Vec<Picture>> = BTreeMap::new();
        for chunk in prepare(scope, samples, &items, work.parameters.background.0, work.request.threads)? {
            let mut batches = Vec::new();
            for (prepared, key) in chunk?.into_iter().zip(&mut keys) {
                match prepared.picture {
                    Err(refusal) => {
                        settle(1);
                        failed.insert(key, refusal);
                    }
                    Ok(taken) => {
                        let lane = waiting.entry(prepared.bucket).or_default();
                        lane.push(Picture { row: prepared.row, taken, key });
                        if lane.len() >= batch_size.div_ceil(prepared.bucket.frames as usize) {
                            batches.push(Batch { bucket: prepared.bucket, pictures: std::mem::take(lane) });
                        }
                    }
                }
            }
            run(batches, &mut failed)?;
        }
        let left = waiting.into_iter().filter(|(_, pictures)| !pictures.is_empty());
        run(left.map(|(bucket, pictures)| Batch { bucket, pictures }).collect(), &mut failed)
    })?;
    Ok(failed)
}

fn row(picture: Picture, bucket: Bucket, latent: Vec<f16>) -> Latent {
    let Picture { row, taken, key } = picture;
    let info = LatentInfo {
        bucket_width: bucket.width as i32,
        bucket_height: bucket.height as i32,
        bucket_frames: bucket.frames as i32,
        width: row.width,
        height: row.height,
        scale: taken.scale,
        crop_left: taken.left as i32,
        crop_top: taken.top as i32,
        caption_digest: caption_digest(&row.caption),
        item_key: key.to_string(),
        sample_id: row.sample_id,
    };
    info.with(latent)
}

fn meta(vae: &(dyn Vae + Send + Sync), identity: &Digest, clips: Option<Clips>) -> LatentMeta {
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
        temporal_stride: clips.map(|clips| clips.stride),
        normalisation,
    }
}

/// The VAE and how it is used.
struct Encoder<'a> {
    vae: &'a (dyn Vae + Send + Sync),
    device: Device,
    parameters: &'a Parameters,
    clips: Option<Clips>,
}

impl Encoder<'_> {
    /// Latents of a batch, flat, or what keeps one from being stored.
    fn encode(&self, batch: &Batch) -> Result<Vec<Result<Vec<f16>, Refusal>>, Failure> {
        let Batch { bucket, pictures } = batch;
        let frames = pictures.iter().flat_map(|picture| &picture.taken.frames);
        let rgb: Vec<u8> = frames.flat_map(|frame| &frame.rgb).copied().collect();
        let mut size = vec![pictures.len() as i64, i64::from(bucket.height), i64::from(bucket.width), 3];
        if self.clips.is_some() {
            size.insert(1, i64::from(bucket.frames));
        }
        let shape = self.vae.latent_shape(bucket.width, bucket.height, bucket.frames);
        let latents = no_grad(|| {
            let noise = self.noise(pictures, &shape);
            self.vae.encode(&pixels(&rgb, &size, self.device), noise.as_ref())
        });
        let latents = latents.map_err(Failure::from_diagnostic)?.to_device(Device::Cpu);
        (0..pictures.len() as i64).map(|i| to_f16(&latents.get(i)).map_err(Failure::from_error)).collect()
    }

    /// Standard normal noise of each sample, or none for the mean.
    fn noise(&self, pictures: &[Picture], shape: &[i64]) -> Option<Tensor> {
        let count = shape.iter().product::<i64>() as usize;
        let one = |row: &SampleInfo| {
            let values =
                Stream::new(self.parameters.seed, &["posterior".into(), (&row.sample_id).into()]).normals(count);
            Tensor::from_slice(&values).view(shape)
        };
        (self.parameters.posterior == Posterior::Sample).then(|| {
            let rows: Vec<_> = pictures.iter().map(|picture| one(&picture.row)).collect();
            Tensor::stack(&rows, 0).to_device(self.device)
        })
    }
}

/// RGB bytes [B, H, W, 3] to [B, 3, H, W], of clips [B, F, H, W, 3] to [B, 3, F, H, W], in [-1, 1], rounded as diffusers'
/// `VaeImageProcessor` rounds.
fn pixels(rgb: &[u8], size: &[i64], device: Device) -> Tensor {
    let bytes = Tensor::from_slice(rgb).view(size).to_device(device);
    (bytes.movedim_int(-1, 1).contiguous().to_kind(Kind::Float) / 255.0) * 2.0 - 1.0
}

/// A picture on its way through the VAE.
struct Picture {
    row: SampleInfo,
    taken: Taken,
    key: Digest,
}

/// Pictures of one bucket that are encoded at once.
struct Batch {
    bucket: Bucket,
    pictures: Vec<Picture>,
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
        let tensor = pixels(&[255, 0, 0, 51, 51, 51], &[1, 1, 2, 3], Device::Cpu);
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

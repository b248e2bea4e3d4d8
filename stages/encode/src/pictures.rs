//! The CPU half of the second pass: media bytes of the samples to encode to pictures and clips of bucket size, in source order, ahead
//! of the device. Other samples' media are not read.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;

use bytes::Bytes;
use media::{Cropped, Picture};
use rayon::ThreadPool;
use rayon::prelude::*;
use spec::{Bucket, Problem};
use stage::{Exit, Failure};
use tables::{Sample, SampleInfo, TableReader};

use crate::plan::{Item, Refusal, size};
use crate::unusable;

/// Chunks that wait for the device at most; with the one being decoded and the one being encoded they bound the memory.
const CHUNKS_AHEAD: usize = 2;
/// Media bytes after which a chunk is closed.
const CHUNK_BYTES: usize = 32 << 20;
/// Bytes of decoded frames after which a chunk is closed.
const DECODED_BYTES: u64 = 512 << 20;

/// A sample on its way to the VAE.
pub(crate) struct Prepared {
    /// Its row.
    pub(crate) row: SampleInfo,
    /// Its bucket.
    pub(crate) bucket: Bucket,
    /// Its frames, or why there are none.
    pub(crate) picture: Result<Taken, Refusal>,
}

/// Frames of a sample at its bucket's size, one of a picture, and how they came about.
pub(crate) struct Taken {
    /// All alike.
    pub(crate) frames: Vec<Picture>,
    /// As [`Cropped::scale`].
    pub(crate) scale: f32,
    /// As [`Cropped::left`].
    pub(crate) left: u32,
    /// As [`Cropped::top`].
    pub(crate) top: u32,
}

impl From<Cropped> for Taken {
    fn from(Cropped { picture, scale, left, top }: Cropped) -> Self {
        Self { frames: vec![picture], scale, left, top }
    }
}

/// Starts decoding; the receiver gets the samples of `items`, which are in source order, a chunk at a time.
pub(crate) fn prepare<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    samples: &'env TableReader,
    items: &'env [&'env Item],
    background: [u8; 3],
    threads: usize,
) -> Result<Receiver<Result<Vec<Prepared>, Failure>>, Failure> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(|i| format!("decode {i}"))
        .build()
        .map_err(|error| Failure::from(Problem::new(format!("cannot start threads for decoding: {error}"))))?;
    let (sender, receiver) = sync_channel(CHUNKS_AHEAD);
    scope.spawn(move || {
        if let Err(failure) = produce(samples, items, background, &pool, &sender) {
            // Nobody listens any more if the receiver has failed itself.
            let _ = sender.send(Err(failure));
        }
    });
    Ok(receiver)
}

fn produce(
    samples: &TableReader,
    items: &[&Item],
    background: [u8; 3],
    pool: &ThreadPool,
    sender: &SyncSender<Result<Vec<Prepared>, Failure>>,
) -> Result<(), Failure> {
    let rows_at_once = 8 * pool.current_num_threads();
    let mut chunk = Vec::new();
    let (mut bytes, mut decoded) = (0, 0);
    let mut rows = samples.select::<Sample>(items.iter().map(|item| item.at).collect()).zip(items);
    loop {
        let next = rows.next();
        let last = next.is_none();
        if let Some((row, item)) = next {
            let (at, row) = row.map_err(unusable)?;
            if at != item.at {
                let problem = Problem::new("pictures are not asked for in the order of their table");
                return Err(Failure::new(Exit::Bug, problem));
            }
            bytes += row.bytes.len();
            decoded += 3 * item.bucket.pixels() * u64::from(item.bucket.frames);
            chunk.push((row, *item));
        }
        let full = chunk.len() >= rows_at_once || bytes >= CHUNK_BYTES || decoded >= DECODED_BYTES;
        if full || last {
            let full = std::mem::take(&mut chunk);
            (bytes, decoded) = (0, 0);
            let prepared =
                pool.install(|| full.into_par_iter().map(|(row, item)| one(item, background, row)).collect());
            if sender.send(Ok(prepared)).is_err() || last {
                return Ok(());
            }
        }
    }
}

fn one(item: &Item, background: [u8; 3], sample: Sample) -> Prepared {
    let (row, bucket) = (sample.info(), item.bucket);
    if let Some(fps) = item.rate {
        let picture = clip(bucket, fps, &sample.bytes.into(), &row);
        return Prepared { row, bucket, picture };
    }
    let decode = || {
        let picture = media::decode(&sample.bytes, background)
            .map_err(|error| Refusal { reason: error.reason(), detail: error.to_string() })?;
        if size(&row) != Some((picture.width, picture.height)) {
            let detail = format!(
                "the picture has {}x{} pixels, `samples` says {}x{}",
                picture.width, picture.height, row.width, row.height
            );
            return Err(Refusal { reason: "decode", detail });
        }
        Ok(media::cover_crop(&picture, bucket.width, bucket.height))
    };
    let picture = decode().map(Taken::from);
    Prepared { row, bucket, picture }
}

fn clip(bucket: Bucket, fps: u32, bytes: &Bytes, row: &SampleInfo) -> Result<Taken, Refusal> {
    let mut taken: Option<Taken> = None;
    let rate = video::Rate { fps: f64::from(fps), count: bucket.frames };
    video::frames::<Refusal>(bytes, rate, |frame| {
        if size(row) != Some((frame.width, frame.height)) {
            let detail = format!(
                "the clip has {}x{} pixels, `samples` says {}x{}",
                frame.width, frame.height, row.width, row.height
            );
            return Err(Refusal { reason: "decode", detail });
        }
        let cropped = media::cover_crop(frame, bucket.width, bucket.height);
        match &mut taken {
            Some(taken) => taken.frames.push(cropped.picture),
            none => *none = Some(cropped.into()),
        }
        Ok(())
    })?;
    taken.ok_or_else(|| Refusal { reason: "decode", detail: "the clip has no frame".to_owned() })
}

impl From<video::Error> for Refusal {
    fn from(error: video::Error) -> Self {
        Self { reason: error.reason(), detail: error.to_string() }
    }
}

//! Where encoding happens. A GPU takes batches, one after the other. A CPU takes single items side by side, each on one
//! thread: kernels sum in another order with another number of threads or batch, and here no result may depend on either.

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use spec::{Bucket, Problem};
use stage::Failure;
use tch::Device;

/// Share of the free memory that items side by side may fill.
const MEMORY_SHARE: u64 = 2;
/// Bytes that the VAE of a large model holds for each pixel: some copies of 128 channels in f32.
const BYTES_PER_PIXEL: u64 = 2048;

/// Frames of a clip that a VAE works on together, at most.
const FRAMES_AT_ONCE: u32 = 5;

/// A device and the threads that feed it.
pub(crate) struct Engine {
    /// The device.
    pub(crate) device: Device,
    pool: ThreadPool,
}

impl Engine {
    /// For items that need about `item_bytes` of memory each.
    pub(crate) fn new(device: Device, threads: usize, item_bytes: u64) -> Result<Self, Failure> {
        let fitting = free_memory().map_or(u64::MAX, |free| free / MEMORY_SHARE / item_bytes.max(1)).max(1);
        let workers =
            if device.is_cuda() { 1 } else { threads.max(1).min(usize::try_from(fitting).unwrap_or(usize::MAX)) };
        let inner = if device.is_cuda() { threads } else { 1 };
        let pool = ThreadPoolBuilder::new()
            .num_threads(workers)
            .thread_name(|i| format!("encode {i}"))
            .start_handler(move |_| torch::device::set_threads(inner))
            .build()
            .map_err(|error| Failure::from(Problem::new(format!("cannot start threads for encoding: {error}"))))?;
        Ok(Self { device, pool })
    }

    /// Memory that a picture or clip of this bucket needs on its way through the VAE, which takes a few frames at once.
    pub(crate) fn picture_bytes(bucket: Bucket) -> u64 {
        bucket.pixels() * BYTES_PER_PIXEL * u64::from(bucket.frames.min(FRAMES_AT_ONCE))
    }

    /// Items in a batch.
    pub(crate) fn batch_size(&self, asked: Option<usize>, default: usize) -> usize {
        if self.device.is_cuda() { asked.unwrap_or(default).max(1) } else { 1 }
    }

    /// Batches worth handing over at once.
    pub(crate) fn width(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// The results for `batches`, in their order.
    pub(crate) fn run<T: Sync, R: Send>(&self, batches: &[T], encode: impl Fn(&T) -> R + Send + Sync) -> Vec<R> {
        self.pool.install(|| batches.par_iter().map(encode).collect())
    }
}

/// Bytes that can be had without swapping, as Linux tells.
fn free_memory() -> Option<u64> {
    let text = fs_err::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

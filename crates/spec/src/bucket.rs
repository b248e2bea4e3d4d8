//! Buckets: the sizes a batch may have, and which one a picture goes to.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Size shared by all samples of a batch, in pixels and frames (1 for a picture). Written `384x640`, `384x640x17`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Bucket {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Frames.
    pub frames: u32,
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.frames {
            1 => write!(f, "{}x{}", self.width, self.height),
            n => write!(f, "{}x{}x{n}", self.width, self.height),
        }
    }
}

/// Text that is not a bucket.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` is not a bucket: expected WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, each at least 1, such as `384x640`")]
pub struct NotABucket(String);

impl FromStr for Bucket {
    type Err = NotABucket;

    fn from_str(text: &str) -> Result<Self, NotABucket> {
        let number = |part: &str| {
            let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            part.parse().ok().filter(|&n: &u32| digits && n > 0)
        };
        let numbers: Option<Vec<u32>> = text.split('x').map(number).collect();
        match numbers.as_deref() {
            Some(&[width, height]) => Ok(Self { width, height, frames: 1 }),
            Some(&[width, height, frames]) => Ok(Self { width, height, frames }),
            _ => Err(NotABucket(text.into())),
        }
    }
}

impl Bucket {
    /// Pixels of one frame.
    pub fn pixels(self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Distance in shape to a picture: |log(w/h) - log(W/H)|. The same for both turned by 90°.
    pub fn distance(self, width: u32, height: u32) -> f64 {
        let (longer, shorter) = self.skew(width, height);
        (longer as f64 / shorter as f64).ln()
    }

    /// The exponential of [`Bucket::distance`], exactly, as a fraction of at least 1.
    fn skew(self, width: u32, height: u32) -> (u128, u128) {
        let ours = u128::from(self.width) * u128::from(height);
        let theirs = u128::from(self.height) * u128::from(width);
        (ours.max(theirs), ours.min(theirs))
    }

    /// Whether filling the bucket enlarges the picture.
    pub fn upscales(self, width: u32, height: u32) -> bool {
        self.width > width || self.height > height
    }
}

/// Width to height of the planned buckets, from NeMo Automodel's `multi_tier_bucketing.py`.
const RATIOS: [(u32, u32); 14] = [
    (1, 2),
    (9, 16),
    (2, 3),
    (3, 4),
    (4, 5),
    (1, 1),
    (5, 4),
    (4, 3),
    (3, 2),
    (16, 10),
    (5, 3),
    (16, 9),
    (2, 1),
    (21, 9),
];

/// The buckets of a pixel budget, distinct, by ascending width over height.
///
/// Sides are multiples of `quantum` and a frame has at most `max_pixels`: the peer's formula, so that a data set falls
/// into the peer's buckets. Empty if not even one quantum squared fits.
pub fn plan(max_pixels: u64, quantum: u32, frames: u32) -> Vec<Bucket> {
    let step = u64::from(quantum.max(1));
    let snap = |side: u64| (side as f64 / step as f64).round_ties_even() as u64 * step;
    let mut buckets = Vec::new();
    for (across, down) in RATIOS {
        let ratio = f64::from(across) / f64::from(down);
        let mut height = snap((max_pixels as f64 / ratio).sqrt() as u64);
        let mut width = snap((height as f64 * ratio) as u64);
        while width * height > max_pixels {
            if width >= height { width -= step } else { height -= step }
        }
        let side = |side: u64| u32::try_from(side).ok().filter(|&side| side >= quantum.max(1));
        buckets.extend(side(width).zip(side(height)).map(|(width, height)| Bucket { width, height, frames }));
    }
    buckets.sort_by(|a, b| {
        let (left, right) = (u64::from(a.width) * u64::from(b.height), u64::from(b.width) * u64::from(a.height));
        left.cmp(&right).then(a.cmp(b))
    });
    buckets.dedup();
    buckets
}

/// The bucket nearest in shape to a picture of this size: least [`Bucket::distance`], then most pixels, then least width.
///
/// Frame counts are not compared. `None` if there are no buckets or the picture has no area.
pub fn choose(buckets: &[Bucket], width: u32, height: u32) -> Option<Bucket> {
    if width == 0 || height == 0 {
        return None;
    }
    let order = |a: &&Bucket, b: &&Bucket| {
        let ((a_long, a_short), (b_long, b_short)) = (a.skew(width, height), b.skew(width, height));
        (a_long * b_short)
            .cmp(&(b_long * a_short))
            .then(b.pixels().cmp(&a.pixels()))
            .then(a.width.cmp(&b.width))
            .then(a.frames.cmp(&b.frames))
    };
    buckets.iter().min_by(order).copied()
}

#[cfg(test)]
mod tests;

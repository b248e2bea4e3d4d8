//! Buckets: the sizes a batch may have, and which one a picture goes to.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Size shared by all samples of a batch, in pixels and frames (1 for a picture).
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

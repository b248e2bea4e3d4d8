//! Clips: any common video file to RGB frames at a steady rate, and frames to MP4. The one crate that uses FFmpeg; knows no
//! tensors, tables or recipes.
//!
//! Timestamps decide which frame is shown when; the nominal frame rate of a file is not believed. Rotation for display and
//! pixels that are not square are applied. Sound is ignored.

pub mod clock;
mod colour;
mod error;
mod orientation;
mod pixels;
mod reader;
mod timeline;
mod writer;

pub use error::Error;
pub use reader::{Facts, Rate, frames, is_clip, probe};
pub use timeline::available;
pub use writer::{Format, Writer};

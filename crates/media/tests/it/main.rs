//! Decoding, resizing and writing against references: Pillow's reading of the same files (`fixtures/make.py`), and
//! arithmetic done here.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod broken;
mod exact;
mod pillow;
mod text;

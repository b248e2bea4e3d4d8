//! Decoding, resizing and writing against references: Pillow's reading of the same files (`fixtures/make.py`), and
//! arithmetic done here.

mod broken;
mod exact;
mod pillow;
mod text;

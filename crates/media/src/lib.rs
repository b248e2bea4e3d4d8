//! Pictures: decode any common file to RGB8, resize and crop, write PNG. Knows no tensors, no tables, no recipes.

mod crop;
mod decode;
mod error;
mod jpeg;
mod picture;
mod png;
mod sheet;
mod style;
mod text;
mod tiff;

pub use crop::{Cropped, cover_crop};
pub use decode::{Format, MAX_PIXELS, MAX_SIDE, decode, probe};
pub use error::Error;
pub use picture::Picture;
pub use png::{encode_png, write_png};
pub use sheet::{contact_sheet, labelled_sheet};
pub use style::{Style, StyleScore};

//! The folder that a data set is written to: pictures and `metadata.jsonl`.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use image::RgbImage;

/// One picture of a data set.
pub struct Item {
    /// File name of the picture.
    pub file: String,
    /// The picture.
    pub picture: RgbImage,
    /// What it shows.
    pub caption: String,
}

/// Writes pictures as PNG and their captions as `metadata.jsonl`.
pub fn write(out: &Path, items: impl Iterator<Item = Item>) -> io::Result<()> {
    fs_err::create_dir_all(out)?;
    let mut lines = String::new();
    for Item { file, picture, caption } in items {
        let path = out.join(&file);
        picture.save(&path).map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
        let line = serde_json::json!({ "file_name": file, "caption": caption });
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "{line}");
    }
    fs_err::write(out.join("metadata.jsonl"), lines)
}

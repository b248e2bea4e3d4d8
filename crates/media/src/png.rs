//! PNG files with text: equal input, equal bytes.

use std::path::Path;

use crate::{Error, Picture};

/// The bytes of a PNG. ASCII texts become `tEXt` chunks, others `iTXt` (UTF-8), in the given order.
pub fn encode_png(picture: &Picture, text: &[(String, String)]) -> Result<Vec<u8>, Error> {
    let mut out = Vec::new();
    let mut encoder = ::png::Encoder::new(&mut out, picture.width, picture.height);
    encoder.set_color(::png::ColorType::Rgb);
    encoder.set_depth(::png::BitDepth::Eight);
    for (keyword, value) in text {
        let error = |reason: String| Error::Text { keyword: keyword.clone(), reason };
        if keyword.is_empty() || keyword.len() > 79 || !keyword.is_ascii() {
            return Err(error("a keyword is 1 to 79 ASCII characters".to_owned()));
        }
        if value.contains('\0') {
            return Err(error("the text holds a NUL character".to_owned()));
        }
        let added = if value.is_ascii() {
            encoder.add_text_chunk(keyword.clone(), value.clone())
        } else {
            encoder.add_itxt_chunk(keyword.clone(), value.clone())
        };
        added.map_err(|e| error(e.to_string()))?;
    }
    let write =
        |e: ::png::EncodingError| Error::Unsupported(format!("PNG of {}x{}: {e}", picture.width, picture.height));
    let mut writer = encoder.write_header().map_err(write)?;
    writer.write_image_data(&picture.rgb).map_err(write)?;
    writer.finish().map_err(write)?;
    Ok(out)
}

/// Writes a PNG file, as [`encode_png`].
pub fn write_png(path: &Path, picture: &Picture, text: &[(String, String)]) -> Result<(), Error> {
    let bytes = encode_png(picture, text)?;
    fs_err::write(path, bytes).map_err(|source| Error::Write { path: path.to_owned(), source })
}

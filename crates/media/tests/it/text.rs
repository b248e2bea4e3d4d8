//! Text in PNG files, read back by the `png` crate.

use std::io::Cursor;

use media::{Error, Picture, encode_png, write_png};

#[test]
fn texts_are_kept_in_order_as_latin_or_unicode_and_bytes_repeat() {
    let picture = Picture::filled(4, 4, [9, 8, 7]);
    let text = [("prompt", "an astronaut"), ("negative", "naïve 漢字"), ("seed", "2026")];
    let text: Vec<_> = text.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let bytes = encode_png(&picture, &text).unwrap();
    assert_eq!(bytes, encode_png(&picture, &text).unwrap());
    let reader = png::Decoder::new(Cursor::new(&bytes)).read_info().unwrap();
    let info = reader.info();
    let latin: Vec<_> = info.uncompressed_latin1_text.iter().map(|t| (t.keyword.as_str(), t.text.as_str())).collect();
    assert_eq!(latin, [("prompt", "an astronaut"), ("seed", "2026")]);
    assert_eq!(info.utf8_text[0].keyword, "negative");
    assert_eq!(info.utf8_text[0].get_text().unwrap(), "naïve 漢字");
}

#[test]
fn what_a_png_cannot_hold_is_an_error() {
    let picture = Picture::filled(1, 1, [0; 3]);
    for (keyword, value) in [("", "x"), ("ключ", "x"), ("k", "a\0b")] {
        let text = [(keyword.to_owned(), value.to_owned())];
        assert!(matches!(encode_png(&picture, &text), Err(Error::Text { .. })), "{keyword:?}");
    }
    let nowhere = std::path::Path::new("/nonexistent/x.png");
    assert!(write_png(nowhere, &picture, &[]).unwrap_err().to_string().contains("/nonexistent/x.png"));
}

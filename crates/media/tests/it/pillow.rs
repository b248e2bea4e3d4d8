//! Files of kinds that only Pillow could write for us, and what Pillow reads in them.

use std::path::PathBuf;

use media::{Picture, cover_crop, decode, probe};

const BACKGROUND: [u8; 3] = [250, 200, 30];

fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    fs_err::read(path).unwrap()
}

/// Largest and mean absolute difference.
fn difference(a: &Picture, b: &Picture) -> (u8, f64) {
    assert_eq!((a.width, a.height), (b.width, b.height));
    let each = a.rgb.iter().zip(&b.rgb).map(|(x, y)| x.abs_diff(*y));
    let sum: u64 = each.clone().map(u64::from).sum();
    (each.max().unwrap(), sum as f64 / a.rgb.len() as f64)
}

#[test]
fn every_kind_of_file_reads_as_pillow_reads_it() {
    // Largest difference allowed: 0 for what is lossless, 1 where alpha is rounded, more where an inverse DCT, a colour
    // conversion or an up-sampling filter is implementation-defined.
    let files = [
        ("baseline.jpg", 8),
        ("progressive.jpg", 8),
        ("restart.jpg", 8),
        ("subsampled.jpg", 8),
        ("grey.jpg", 2),
        ("rgb.jpg", 2),
        ("cmyk.jpg", 4),
        ("turned.jpg", 8),
        ("lossy.webp", 4),
        ("lossy_alpha.webp", 4),
        ("turned.webp", 0),
        ("turned.png", 0),
        ("palette.gif", 0),
        ("palette.png", 0),
        ("palette.bmp", 0),
        ("palette.tif", 0),
        ("palette_lzw.tif", 0),
        ("grey_alpha.tif", 1),
        ("rgba.tif", 1),
        ("cmyk.tif", 1),
        ("ycbcr.tif", 4),
        ("one_bit.tif", 0),
        ("turned.tif", 0),
    ];
    let mut wrong = Vec::new();
    for (name, allowed) in files {
        let bytes = fixture(name);
        let expected = decode(&fixture(&format!("{name}.expected.png")), [0; 3]).unwrap();
        match decode(&bytes, BACKGROUND) {
            Ok(found) => {
                let (worst, mean) = difference(&found, &expected);
                if worst > allowed || mean > 0.75 {
                    wrong.push(format!("{name}: off by {worst} at most, {mean:.3} on average"));
                }
                let (width, height, _) = probe(&bytes).unwrap();
                assert_eq!((width, height), (expected.width, expected.height), "{name}");
            }
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn resizing_agrees_with_pillows_lanczos() {
    let source = decode(&fixture("resize_source.png"), [0; 3]).unwrap();
    for name in ["down", "up"] {
        let expected = decode(&fixture(&format!("resize_{name}.png")), [0; 3]).unwrap();
        let found = cover_crop(&source, expected.width, expected.height);
        let (worst, mean) = difference(&found.picture, &expected);
        assert!(worst <= 2 && mean < 0.01, "{name}: off by {worst} at most, {mean:.3} on average");
    }
}

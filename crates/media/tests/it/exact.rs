//! Colour types whose result can be computed: depth, grey, alpha, palette, orientation.

use std::io::Cursor;

use image::{ExtendedColorType, ImageFormat};
use media::{Error, Picture, decode, encode_png, probe};
use png::{BitDepth, ColorType};
use proptest::prelude::*;

/// A PNG of any kind from its raw rows.
fn png(
    width: u32,
    height: u32,
    color: ColorType,
    depth: BitDepth,
    rows: &[u8],
    palette: &[u8],
    trns: &[u8],
) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, width, height);
    encoder.set_color(color);
    encoder.set_depth(depth);
    if !palette.is_empty() {
        encoder.set_palette(palette);
    }
    if !trns.is_empty() {
        encoder.set_trns(trns);
    }
    encoder.write_header().unwrap().write_image_data(rows).unwrap();
    out
}

fn pixels(bytes: &[u8], background: [u8; 3]) -> Vec<[u8; 3]> {
    let picture = decode(bytes, background).unwrap();
    picture.rgb.chunks_exact(3).map(|p| [p[0], p[1], p[2]]).collect()
}

proptest! {
    #[test]
    fn sixteen_bits_are_rounded_to_the_nearest(v: u16) {
        let bytes = png(1, 1, ColorType::Grayscale, BitDepth::Sixteen, &v.to_be_bytes(), &[], &[]);
        let nearest = (f64::from(v) / 65_535.0 * 255.0).round() as u8;
        prop_assert_eq!(pixels(&bytes, [0; 3]), [[nearest; 3]]);
    }

    #[test]
    fn alpha_is_straight_and_rounded_once(c: u8, a: u8, ground: u8) {
        let over = (f64::from(c) * f64::from(a) + f64::from(ground) * f64::from(255 - a)) / 255.0;
        let bytes = png(1, 1, ColorType::GrayscaleAlpha, BitDepth::Eight, &[c, a], &[], &[]);
        prop_assert_eq!(pixels(&bytes, [ground; 3]), [[over.round() as u8; 3]]);
        let bytes = png(1, 1, ColorType::Rgba, BitDepth::Eight, &[c, c, c, a], &[], &[]);
        prop_assert_eq!(pixels(&bytes, [ground; 3]), [[over.round() as u8; 3]]);
    }

    #[test]
    fn sixteen_bit_alpha_is_rounded_once(c: u16, a: u16, ground: u8) {
        let over = (f64::from(c) * f64::from(a) + f64::from(ground) * 257.0 * f64::from(65_535 - a)) / 65_535.0 / 257.0;
        let [c0, c1] = c.to_be_bytes();
        let [a0, a1] = a.to_be_bytes();
        let bytes = png(1, 1, ColorType::Rgba, BitDepth::Sixteen, &[c0, c1, c0, c1, c0, c1, a0, a1], &[], &[]);
        let [[found, ..]] = pixels(&bytes, [ground; 3])[..] else { panic!("one pixel") };
        // f64 and exact integers may differ only on the edge between two values.
        prop_assert!(f64::from(found) == over.round() || (over.fract() - 0.5).abs() < 1e-9);
    }

    #[test]
    fn small_depths_fill_the_whole_range(bits in prop::sample::select(vec![1u8, 2, 4]), value: u8) {
        let depth = match bits { 1 => BitDepth::One, 2 => BitDepth::Two, _ => BitDepth::Four };
        let most = (1 << bits) - 1;
        let value = value & most;
        let bytes = png(1, 1, ColorType::Grayscale, depth, &[value << (8 - bits)], &[], &[]);
        let expected = (u32::from(value) * 255 / u32::from(most)) as u8;
        prop_assert_eq!(pixels(&bytes, [0; 3]), [[expected; 3]]);
    }

    #[test]
    fn a_written_png_reads_back_equal(w in 1u32..20, h in 1u32..20, seed: u8) {
        let rgb = (0..3 * w * h).map(|i| (i as u8).wrapping_mul(91).wrapping_add(seed)).collect();
        let picture = Picture { width: w, height: h, rgb };
        let bytes = encode_png(&picture, &[]).unwrap();
        prop_assert_eq!(decode(&bytes, [0; 3]).unwrap(), picture);
    }
}

#[test]
fn transparent_palette_and_grey_entries_show_the_background() {
    let palette = [255, 0, 0, 0, 255, 0, 0, 0, 255];
    let bytes = png(3, 1, ColorType::Indexed, BitDepth::Eight, &[0, 1, 2], &palette, &[255, 0, 128]);
    assert_eq!(pixels(&bytes, [10, 20, 30]), [[255, 0, 0], [10, 20, 30], [5, 10, 143]]);
    let bytes = png(2, 1, ColorType::Grayscale, BitDepth::Eight, &[7, 8], &[], &[0, 7]);
    assert_eq!(pixels(&bytes, [1, 2, 3]), [[1, 2, 3], [8, 8, 8]]);
    let bytes = png(2, 1, ColorType::Rgb, BitDepth::Eight, &[1, 1, 1, 2, 2, 2], &[], &[0, 1, 0, 1, 0, 1]);
    assert_eq!(pixels(&bytes, [9, 9, 9]), [[9, 9, 9], [2, 2, 2]]);
}

/// `eXIf` or `APP1` payload with nothing but an orientation.
fn exif(orientation: u8, big: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let (w16, w32): (fn(u16) -> [u8; 2], fn(u32) -> [u8; 4]) =
        if big { (u16::to_be_bytes, u32::to_be_bytes) } else { (u16::to_le_bytes, u32::to_le_bytes) };
    out.extend(if big { b"MM" } else { b"II" });
    out.extend(w16(42));
    out.extend(w32(8));
    out.extend(w16(1));
    out.extend(w16(0x0112));
    out.extend(w16(3));
    out.extend(w32(1));
    out.extend(w16(u16::from(orientation)));
    out.extend([0; 6]);
    out
}

/// The eight turns, as the Exif standard words them: where row 0 and column 0 of the stored picture are seen.
fn turn(picture: &Picture, orientation: u8) -> Picture {
    let (w, h) = (picture.width, picture.height);
    let (tw, th) = if orientation >= 5 { (h, w) } else { (w, h) };
    let mut out = Picture::filled(tw, th, [0; 3]);
    for y in 0..h {
        for x in 0..w {
            let (tx, ty) = match orientation {
                1 => (x, y),
                2 => (w - 1 - x, y),
                3 => (w - 1 - x, h - 1 - y),
                4 => (x, h - 1 - y),
                5 => (y, x),
                6 => (h - 1 - y, x),
                7 => (h - 1 - y, w - 1 - x),
                _ => (y, w - 1 - x),
            };
            out.paste(&picture.cropped(x, y, 1, 1), tx, ty);
        }
    }
    out
}

#[test]
fn all_eight_orientations_are_applied_in_png_and_jpeg() {
    let rgb: Vec<u8> = (0..3 * 16 * 8).map(|i| (i * 5 % 251) as u8).collect();
    let stored = Picture { width: 16, height: 8, rgb };
    for orientation in 1..=8 {
        for big in [false, true] {
            let mut out = Vec::new();
            let mut info = png::Info::with_size(16, 8);
            info.color_type = ColorType::Rgb;
            info.bit_depth = BitDepth::Eight;
            info.exif_metadata = Some(exif(orientation, big).into());
            let encoder = png::Encoder::with_info(&mut out, info).unwrap();
            encoder.write_header().unwrap().write_image_data(&stored.rgb).unwrap();
            let expected = turn(&stored, orientation);
            assert_eq!(decode(&out, [0; 3]).unwrap(), expected, "PNG, {orientation}");

            let mut plain = Vec::new();
            let mut encoder = image::codecs::jpeg::JpegEncoder::new_with_quality(&mut plain, 100);
            encoder.encode(&stored.rgb, 16, 8, ExtendedColorType::Rgb8).unwrap();
            let app1 = [b"Exif\0\0".as_slice(), &exif(orientation, big)].concat();
            let mut tagged = vec![0xff, 0xd8, 0xff, 0xe1];
            tagged.extend((app1.len() as u16 + 2).to_be_bytes());
            tagged.extend(app1);
            tagged.extend(&plain[2..]);
            let expected = turn(&decode(&plain, [0; 3]).unwrap(), orientation);
            assert_eq!(decode(&tagged, [0; 3]).unwrap(), expected, "JPEG, {orientation}");
            let (width, height, _) = probe(&tagged).unwrap();
            assert_eq!((width, height), (expected.width, expected.height));
        }
    }
}

#[test]
fn lossless_formats_give_back_what_was_written() {
    let rgb: Vec<u8> = (0..3 * 13 * 7).map(|i| (i * 37 % 256) as u8).collect();
    for format in [ImageFormat::Png, ImageFormat::Bmp, ImageFormat::Tiff, ImageFormat::WebP] {
        let mut out = Cursor::new(Vec::new());
        image::write_buffer_with_format(&mut out, &rgb, 13, 7, ExtendedColorType::Rgb8, format).unwrap();
        assert_eq!(decode(out.get_ref(), [0; 3]).unwrap().rgb, rgb, "{format:?}");
    }
    let rgba: Vec<u8> = rgb.chunks_exact(3).flat_map(|p| [p[0], p[1], p[2], 255]).collect();
    for format in [ImageFormat::Bmp, ImageFormat::Tiff, ImageFormat::WebP] {
        let mut out = Cursor::new(Vec::new());
        image::write_buffer_with_format(&mut out, &rgba, 13, 7, ExtendedColorType::Rgba8, format).unwrap();
        assert_eq!(decode(out.get_ref(), [9; 3]).unwrap().rgb, rgb, "{format:?} with alpha");
    }
}

/// A one-strip TIFF of 16-bit entries, little-endian.
fn tiff(width: u16, height: u16, tags: &[(u16, u16, u32)], data: &[u8]) -> Vec<u8> {
    let mut all =
        vec![(256, 3, u32::from(width)), (257, 3, u32::from(height)), (259, 3, 1), (278, 3, u32::from(height))];
    all.extend(tags);
    all.push((273, 4, 8));
    all.push((279, 4, data.len() as u32));
    all.sort_unstable();
    let mut out = b"II*\0".to_vec();
    out.extend((8 + data.len() as u32).to_le_bytes());
    out.extend(data);
    out.extend((all.len() as u16).to_le_bytes());
    for (tag, kind, value) in all {
        out.extend(tag.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend(1u32.to_le_bytes());
        out.extend(value.to_le_bytes());
    }
    out.extend([0; 4]);
    out
}

#[test]
fn tiff_samples_of_any_depth_and_both_senses_of_grey() {
    let grey = |bits: u32, sense: u32, data: &[u8]| {
        let bytes = tiff(2, 1, &[(258, 3, bits), (262, 3, sense), (277, 3, 1)], data);
        decode(&bytes, [0; 3]).unwrap_or_else(|e| panic!("{bits} bits: {e}")).rgb
    };
    assert_eq!(grey(4, 1, &[0x3f]), [51, 51, 51, 255, 255, 255]);
    assert_eq!(grey(2, 1, &[0b0110_0000]), [85, 85, 85, 170, 170, 170]);
    assert_eq!(grey(8, 1, &[7, 200]), [7, 7, 7, 200, 200, 200]);
    assert_eq!(grey(8, 0, &[7, 200]), [248, 248, 248, 55, 55, 55], "white is zero");
    assert_eq!(grey(16, 1, &[0xff, 0xff, 0x80, 0x80]), [255, 255, 255, 128, 128, 128]);
    let floats: Vec<u8> = [0.5f32, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let bytes = tiff(2, 1, &[(258, 3, 32), (262, 3, 1), (277, 3, 1), (339, 3, 3)], &floats);
    assert_eq!(decode(&bytes, [0; 3]).unwrap().rgb, [128, 128, 128, 255, 255, 255]);
}

#[test]
fn premultiplied_alpha_is_not_multiplied_again() {
    // Half-transparent white, stored as (128, 128): over black it is 128, over white 255.
    let bytes = |extra: u32| {
        let tags = [(258, 3, 8), (262, 3, 1), (277, 3, 2), (338, 3, extra)];
        tiff(1, 1, &tags, &[128, 128])
    };
    let shown = |extra, ground: u8| decode(&bytes(extra), [ground; 3]).unwrap().rgb[0];
    assert_eq!((shown(1, 0), shown(1, 255)), (128, 255), "premultiplied");
    assert_eq!((shown(2, 0), shown(2, 255)), (64, 191), "straight");
    assert_eq!((shown(0, 0), shown(0, 255)), (128, 128), "of no stated meaning");
}

#[test]
fn the_format_is_found_by_content() {
    assert!(matches!(decode(b"", [0; 3]), Err(Error::Empty)));
    assert!(matches!(decode(b"GARBAGE, not a picture", [0; 3]), Err(Error::Unsupported(_))));
    assert!(matches!(decode(b"%PDF-1.7 ...", [0; 3]), Err(Error::Unsupported(_))));
}

//! Files that are not whole, and files that would fill the memory.

use std::io::Cursor;

use image::{ExtendedColorType, ImageFormat};
use media::{Error, decode, encode_png, probe};
use proptest::prelude::*;

/// 64x64, noisy, so that the data is most of the file.
fn noisy(format: ImageFormat) -> Vec<u8> {
    let mut state = 1u32;
    let rgb: Vec<u8> = (0..3 * 64 * 64)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    let mut out = Cursor::new(Vec::new());
    if format == ImageFormat::Gif {
        let rgba: Vec<u8> = rgb.chunks_exact(3).flat_map(|p| [p[0], p[1], p[2], 255]).collect();
        image::write_buffer_with_format(&mut out, &rgba, 64, 64, ExtendedColorType::Rgba8, format).unwrap();
    } else {
        image::write_buffer_with_format(&mut out, &rgb, 64, 64, ExtendedColorType::Rgb8, format).unwrap();
    }
    out.into_inner()
}

#[test]
fn a_truncated_file_is_refused_whatever_its_format() {
    use ImageFormat::{Bmp, Gif, Jpeg, Png, Tiff, WebP};
    for format in [Jpeg, Png, WebP, Gif, Bmp, Tiff] {
        let whole = noisy(format);
        decode(&whole, [0; 3]).unwrap();
        for part in [1, 10, 50, 90, 99] {
            let cut = &whole[..whole.len() * part / 100];
            match decode(cut, [0; 3]) {
                Ok(_) => panic!("{format:?} cut to {part} % passed"),
                Err(error) => {
                    assert!(
                        matches!(error.reason(), "decode" | "unsupported" | "empty"),
                        "{format:?}, {part} %: {error}"
                    );
                }
            }
        }
    }
    let jpeg = noisy(Jpeg);
    let zeroed = [&jpeg[..jpeg.len() / 2], &vec![0; jpeg.len() - jpeg.len() / 2]].concat();
    assert!(decode(&zeroed, [0; 3]).is_err(), "the second half was never written");
    assert!(decode(&jpeg[..jpeg.len() - 2], [0; 3]).unwrap_err().to_string().contains("truncated"));
}

#[test]
fn a_thumbnail_inside_a_jpeg_does_not_pass_for_its_end() {
    let jpeg = noisy(ImageFormat::Jpeg);
    let thumbnail = [b"Exif\0\0".as_slice(), &jpeg[..2000], &[0xff, 0xd9]].concat();
    let mut out = vec![0xff, 0xd8, 0xff, 0xe1];
    out.extend((thumbnail.len() as u16 + 2).to_be_bytes());
    out.extend(&thumbnail);
    out.extend(&jpeg[2..]);
    decode(&out, [0; 3]).unwrap();
    assert!(decode(&out[..out.len() - 500], [0; 3]).is_err());
}

#[test]
fn giant_dimensions_are_refused_before_anything_is_allocated() {
    // Each claims 60000 x 60000 pixels, in a few hundred bytes.
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, 60_000, 60_000);
    encoder.set_color(png::ColorType::Rgba);
    encoder.set_depth(png::BitDepth::Sixteen);
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::IDAT, &[0x78, 0x9c, 0, 0]).unwrap();
    drop(writer);
    let mut jpeg = noisy(ImageFormat::Jpeg);
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 9].copy_from_slice(&[0xea, 0x60, 0xea, 0x60]);
    let mut bmp = noisy(ImageFormat::Bmp);
    bmp[18..22].copy_from_slice(&60_000u32.to_le_bytes());
    bmp[22..26].copy_from_slice(&60_000u32.to_le_bytes());
    let mut gif = noisy(ImageFormat::Gif);
    gif[6..10].copy_from_slice(&[0x60, 0xea, 0x60, 0xea]);
    for (name, bytes) in [("PNG", png), ("JPEG", jpeg), ("BMP", bmp), ("GIF", gif)] {
        let error = decode(&bytes, [0; 3]).unwrap_err();
        assert!(matches!(error, Error::TooLarge(_)), "{name}: {error:?}");
        assert_eq!(probe(&bytes).unwrap_err().reason(), "too_large", "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn flipped_bytes_never_panic(
        format in prop::sample::select(vec![
            ImageFormat::Jpeg, ImageFormat::Png, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Bmp, ImageFormat::Tiff,
        ]),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = noisy(format);
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = decode(&bytes, [0; 3]);
    }

    #[test]
    fn random_bytes_behind_a_signature_never_panic(tail in prop::collection::vec(any::<u8>(), 0..300), which in 0usize..7) {
        let signatures: [&[u8]; 7] = [
            b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x20\0\0\0WEBPVP8 ", b"GIF89a", b"BM", b"II*\0", b"MM\0+",
        ];
        let bytes = [signatures[which], &tail].concat();
        let _ = decode(&bytes, [0; 3]);
        let _ = probe(&bytes);
    }
}

#[test]
fn a_png_with_a_wrong_checksum_is_refused() {
    let mut bytes = encode_png(&media::Picture::filled(32, 32, [1, 2, 3]), &[]).unwrap();
    let data = bytes.windows(4).position(|four| four == b"IDAT").unwrap();
    bytes[data + 6] ^= 0x10;
    assert_eq!(decode(&bytes, [0; 3]).unwrap_err().reason(), "decode");
}

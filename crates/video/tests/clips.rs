//! Clips that FFmpeg writes and reads back: counts, tempo, orientation, colours, metadata, damage.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use bytes::Bytes;
use ffmpeg_next as ff;
use ffmpeg_next::format::Pixel;
use ffmpeg_next::util::color::{Range, Space};
use media::Picture;
use video::{Error, Format, Rate, Writer, clock, frames, is_clip, probe};

const SIZE: (u32, u32) = (96, 64);

fn write(path: &Path, format: &Format, fps: u32, count: u32) -> Bytes {
    let text = [("comment".to_owned(), "a clock".to_owned())];
    let mut writer = Writer::create(path, format, SIZE, fps, &text).unwrap();
    for n in 0..count {
        writer.push(&clock::frame(f64::from(n) / f64::from(fps), SIZE.0, SIZE.1, 100)).unwrap();
    }
    writer.finish().unwrap();
    fs_err::read(path).unwrap().into()
}

fn mp4(fps: u32, count: u32) -> Bytes {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("clip.mp4"), &Format::mp4(), fps, count)
}

fn taken(bytes: &Bytes, rate: Rate) -> Vec<Picture> {
    let mut taken = Vec::new();
    frames::<Error>(bytes, rate, |picture| {
        taken.push(picture.clone());
        Ok(())
    })
    .unwrap();
    taken
}

/// Difference of two moments on the dial.
fn apart(a: f64, b: f64) -> f64 {
    let off = (a - b).rem_euclid(clock::TURN);
    off.min(clock::TURN - off)
}

#[test]
fn counts_are_exact_in_every_container_with_and_without_b_frames() {
    let folder = tempfile::tempdir().unwrap();
    let mut formats = Vec::new();
    for b_frames in [Some(0), Some(2)] {
        for container in ["mp4", "matroska"] {
            formats.push(Format { container, encoder: "libx264", b_frames });
        }
    }
    formats.push(Format { container: "mp4", encoder: "mpeg4", b_frames: Some(0) });
    formats.push(Format { container: "webm", encoder: "libvpx-vp9", b_frames: None });
    for (number, format) in formats.iter().enumerate() {
        for count in [1, 17, 33, 65] {
            let bytes = write(&folder.path().join(format!("{number}-{count}")), format, 16, count);
            assert!(is_clip(&bytes), "{format:?}");
            let facts = probe(&bytes).unwrap();
            assert_eq!((facts.frames, facts.width, facts.height), (count, SIZE.0, SIZE.1), "{format:?}");
            assert_eq!(facts.format, format.container);
            assert_eq!(video::available(facts.frames, facts.fps, 16.0), count, "{format:?} {facts:?}");
            let pictures = taken(&bytes, Rate { fps: 16.0, count });
            assert_eq!(pictures.len(), count as usize);
            for (n, picture) in pictures.iter().enumerate() {
                let off = apart(clock::read(picture), n as f64 / 16.0);
                assert!(off < 0.02, "{format:?}: frame {n} of {count} is off by {off} s");
            }
        }
    }
}

#[test]
fn the_same_moment_comes_from_every_frame_rate() {
    for fps in [12, 24, 30, 60] {
        let bytes = mp4(fps, 3 * fps);
        let facts = probe(&bytes).unwrap();
        assert!((facts.fps - f64::from(fps)).abs() < 1e-6);
        let count = video::available(facts.frames, facts.fps, 16.0);
        assert!((47..=48).contains(&count), "{count}");
        for (n, picture) in taken(&bytes, Rate { fps: 16.0, count }).iter().enumerate() {
            let off = apart(clock::read(picture), n as f64 / 16.0);
            assert!(off <= 0.5 / f64::from(fps) + 0.02, "{fps} frames a second: moment {n} is off by {off} s");
        }
    }
}

#[test]
fn a_clip_that_ends_too_early_holds_its_last_frame() {
    let pictures = taken(&mp4(16, 5), Rate { fps: 16.0, count: 8 });
    assert_eq!(pictures.len(), 8);
    assert!(pictures[5..].iter().all(|picture| *picture == pictures[4]));
    assert_ne!(pictures[3], pictures[4]);
}

#[test]
fn colours_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flat.mp4");
    for colour in [[255, 255, 255], [0, 0, 0], [220, 40, 60], [20, 180, 90], [30, 60, 200]] {
        let mut writer = Writer::create(&path, &Format::mp4(), SIZE, 16, &[]).unwrap();
        (0..5).for_each(|_| writer.push(&Picture::filled(SIZE.0, SIZE.1, colour)).unwrap());
        writer.finish().unwrap();
        let picture = taken(&fs_err::read(&path).unwrap().into(), Rate { fps: 16.0, count: 1 }).remove(0);
        for (a, b) in picture.pixel(40, 30).into_iter().zip(colour) {
            assert!(a.abs_diff(b) <= 3, "{colour:?} {:?}", picture.pixel(40, 30));
        }
    }
}

/// A clip of one frame whose planes hold one number each.
fn flat(path: &Path, format: &Format, pixel: Pixel, range: Range, codes: [u8; 3]) -> Bytes {
    ff::init().unwrap();
    ff::log::set_level(ff::log::Level::Quiet);
    let codec = ff::encoder::find_by_name(format.encoder).unwrap();
    let mut output = ff::format::output_as(path, format.container).unwrap();
    let mut encoder = ff::codec::context::Context::new_with_codec(codec).encoder().video().unwrap();
    let time_base = ff::Rational(1, 16);
    encoder.set_width(SIZE.0);
    encoder.set_height(SIZE.1);
    encoder.set_format(pixel);
    encoder.set_time_base(time_base);
    encoder.set_colorspace(Space::SMPTE170M);
    encoder.set_color_range(range);
    encoder.set_flags(ff::codec::Flags::GLOBAL_HEADER);
    let mut options = ff::Dictionary::new();
    for (key, value) in [("threads", "1"), ("crf", "4"), ("b", "4000000"), ("strict", "unofficial")] {
        options.set(key, value);
    }
    let mut encoder = encoder.open_with(options).unwrap();
    let mut stream = output.add_stream(codec).unwrap();
    stream.set_parameters(&encoder);
    stream.set_time_base(time_base);
    output.write_header().unwrap();
    let mut frame = ff::frame::Video::new(pixel, SIZE.0, SIZE.1);
    frame.set_color_range(range);
    frame.set_pts(Some(0));
    (0..frame.planes()).for_each(|plane| frame.data_mut(plane).fill(codes[plane]));
    encoder.send_frame(&frame).unwrap();
    encoder.send_eof().unwrap();
    let mut packet = ff::Packet::empty();
    while encoder.receive_packet(&mut packet).is_ok() {
        packet.set_stream(0);
        packet.set_duration(1);
        packet.rescale_ts(time_base, output.stream(0).unwrap().time_base());
        packet.write_interleaved(&mut output).unwrap();
    }
    output.write_trailer().unwrap();
    fs_err::read(path).unwrap().into()
}

/// Clips of a telephone, of Motion JPEG, of a screen: whatever the numbers span, black is black and white is white.
#[test]
fn colours_come_back_from_either_range() {
    let folder = tempfile::tempdir().unwrap();
    // A colour, its BT.601 codes from 0 to 255, and from 16 to 235.
    let colours = [
        ([0, 0, 0], [0, 128, 128], [16, 128, 128]),
        ([255, 255, 255], [255, 128, 128], [235, 128, 128]),
        ([128, 128, 128], [128, 128, 128], [126, 128, 128]),
        ([220, 40, 60], [96, 108, 216], [99, 110, 206]),
    ];
    for (encoder, container, pixel, range) in [
        ("mjpeg", "matroska", Pixel::YUVJ420P, Range::JPEG),
        ("mjpeg", "avi", Pixel::YUVJ422P, Range::JPEG),
        ("mjpeg", "matroska", Pixel::YUVJ444P, Range::JPEG),
        ("mjpeg", "matroska", Pixel::YUV420P, Range::MPEG),
        ("libx264", "mp4", Pixel::YUVJ420P, Range::JPEG),
        ("libx264", "mp4", Pixel::YUV420P, Range::JPEG),
        ("libx264", "mp4", Pixel::YUV420P, Range::MPEG),
        ("libx264", "mp4", Pixel::YUV444P, Range::JPEG),
        ("libvpx-vp9", "webm", Pixel::YUV420P, Range::JPEG),
        ("libvpx-vp9", "webm", Pixel::YUV420P, Range::MPEG),
        ("ffv1", "matroska", Pixel::YUV420P, Range::JPEG),
        ("ffv1", "matroska", Pixel::GRAY8, Range::JPEG),
        ("ffv1", "matroska", Pixel::GRAY8, Range::MPEG),
    ] {
        let format = Format { container, encoder, b_frames: None };
        for (colour, full, limited) in colours {
            if pixel == Pixel::GRAY8 && colour[0] != colour[1] {
                continue;
            }
            let codes = if range == Range::JPEG { full } else { limited };
            println!("{encoder} {container} {pixel:?} {range:?} {colour:?}");
            let bytes = flat(&folder.path().join("flat"), &format, pixel, range, codes);
            let picture = taken(&bytes, Rate { fps: 16.0, count: 1 }).remove(0);
            let off = picture.pixel(40, 30).into_iter().zip(colour).map(|(a, b)| a.abs_diff(b)).max().unwrap();
            assert!(off <= 4, "it is {:?}", picture.pixel(40, 30));
        }
    }
}

#[test]
fn the_same_frames_give_the_same_bytes() {
    assert_eq!(mp4(16, 9), mp4(16, 9));
}

#[test]
fn damage_is_an_error_and_not_a_panic() {
    let whole = mp4(16, 33);
    assert!(probe(&whole.slice(..200)).is_err());
    assert!(probe(&Bytes::from_static(b"\0\0\0\x20ftypisom, and then nothing of use")).is_err());
    let mut torn = whole.to_vec();
    let middle = torn.len() / 2;
    torn[middle..middle + 400].fill(0xff);
    // Whether FFmpeg notices depends on where the damage is; it must come to an end either way.
    let _ = probe(&torn.into());
    assert!(!is_clip(b"\x89PNG\r\n\x1a\n"));
    assert!(!is_clip(b"\0\0\0\x1cftypavif"));
}

#[test]
fn sides_that_cannot_be_written_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = Writer::create(&folder.path().join("x.mp4"), &Format::mp4(), (33, 32), 16, &[]).err().unwrap();
    assert!(error.to_string().contains("33x32"), "{error}");
    assert_eq!(error.reason(), "write");
}

#[test]
fn rotation_for_display_is_applied() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = write(&folder.path().join("clip.mp4"), &Format::mp4(), 16, 5).to_vec();
    // The matrix of the track header: a quarter turn clockwise, as a telephone held upright writes it.
    let header = bytes.windows(4).position(|name| name == b"tkhd").unwrap() + 44;
    let matrix = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30];
    for (place, number) in matrix.iter().enumerate() {
        bytes[header + 4 * place..header + 4 * place + 4].copy_from_slice(&i32::to_be_bytes(*number));
    }
    let bytes = Bytes::from(bytes);
    let facts = probe(&bytes).unwrap();
    assert_eq!((facts.width, facts.height), (SIZE.1, SIZE.0));
    for (n, picture) in taken(&bytes, Rate { fps: 16.0, count: 5 }).iter().enumerate() {
        assert_eq!((picture.width, picture.height), (SIZE.1, SIZE.0));
        // A quarter turn is a quarter of the dial.
        let off = apart(clock::read(picture), n as f64 / 16.0 + clock::TURN / 4.0);
        assert!(off < 0.02, "frame {n} is off by {off} s");
    }
}

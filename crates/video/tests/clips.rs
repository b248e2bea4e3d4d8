//! Clips that FFmpeg writes and reads back: counts, tempo, orientation, colours, metadata, damage.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use bytes::Bytes;
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

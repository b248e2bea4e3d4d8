//! Clips: what a sample says about them, captions beside them, and damage.

use serde_json::json;
use video::{Format, Writer, clock};

use crate::support::{World, png};

fn clip(world: &World, fps: u32, frames: u32) -> Vec<u8> {
    let path = world.path("made.mp4");
    let mut writer = Writer::create(&path, &Format::mp4(), (48, 32), fps, &[]).unwrap();
    (0..frames).for_each(|n| writer.push(&clock::frame(f64::from(n) / f64::from(fps), 48, 32, 1)).unwrap());
    writer.finish().unwrap();
    fs_err::read(path).unwrap()
}

#[test]
fn clips_and_pictures_of_one_folder_become_samples() {
    let world = World::new();
    let bytes = clip(&world, 24, 30);
    world
        .write("set/a.mp4", &bytes)
        .write("set/a.txt", "a clock")
        .write("set/b.png", png(1))
        .write("set/b.txt", "a still")
        .write("set/c.mkv", &bytes[..300])
        .write("set/c.txt", "torn")
        .write("set/d.MP4", b"\0\0\0\x20ftypisom and no more")
        .write("set/d.txt", "empty")
        .write("set/e.webm", &bytes);
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.captions(), [("a.mp4", "a clock"), ("b.png", "a still")]);
    assert_eq!(ran.reasons(), [("c.mkv", "decode"), ("d.MP4", "decode"), ("e.webm", "no_caption")]);
    let [first, second] = &ran.samples[..] else { panic!("two samples") };
    assert_eq!((first.media.as_str(), first.width, first.height, first.frames), ("mp4", 48, 32, 30));
    assert_eq!(first.fps, Some(24.0));
    assert_eq!(first.bytes, bytes, "the original bytes are kept");
    assert_eq!((second.frames, second.fps), (1, None));
}

#[test]
fn metadata_names_clips_and_the_dump_shows_their_first_frame() {
    let world = World::new();
    let bytes = clip(&world, 16, 5);
    world.write("set/x/a.mp4", bytes).write("set/metadata.csv", "file_name,text\nx/a.mp4,a clock\n");
    let ran = world.run_with(json!({"dataset": "set"}), json!({"dump": "seen"})).unwrap();
    assert_eq!(ran.captions(), [("x/a.mp4", "a clock")]);
    let seen = world.path("seen").join(format!("{}.png", ran.ids()[0]));
    let seen = media::decode(&fs_err::read(seen).unwrap(), [0; 3]).unwrap();
    assert!(clock::read(&seen) < 0.02 || clock::read(&seen) > 3.98);
}

//! Folders: metadata tables, side-car captions, nesting, order, limits, the dump.

use image::ImageFormat;
use serde_json::json;

use crate::support::{Ran, World, picture, png};

#[test]
fn metadata_rows_become_samples_in_their_order() {
    let world = World::new();
    world
        .write("set/b.png", png(1))
        .write("set/a.jpg", picture(2, ImageFormat::Jpeg))
        .write("set/deep/c.webp", picture(3, ImageFormat::WebP))
        .write("set/.hidden.png", png(9))
        .write("set/README.md", "# about")
        .write(
            "set/metadata.jsonl",
            "{\"file_name\": \"b.png\", \"caption\": \"second letter\"}\n\n{\"file_name\": \"a.jpg\", \"caption\": \" first \"}\n",
        )
        .write("set/deep/metadata.csv", "file_name,caption\nc.webp,\"nested, with a comma\"\n");
    let ran = world.run(json!({"dataset": "set", "image_column": "image", "caption_column": "caption"})).unwrap();
    assert_eq!(
        ran.captions(),
        [("deep/c.webp", "nested, with a comma"), ("b.png", "second letter"), ("a.jpg", "first")]
    );
    assert_eq!(ran.reasons(), []);
    let webp = &ran.samples[0];
    assert_eq!((webp.media.as_str(), webp.width, webp.height, webp.frames, webp.fps), ("webp", 24, 16, 1, None));
    assert_eq!(webp.bytes, picture(3, ImageFormat::WebP), "the original bytes are kept");
    let digest = blake3::hash(&webp.bytes).to_hex();
    assert_eq!((webp.digest.as_str(), webp.sample_id.as_str()), (digest.as_str(), &digest[..16]));
}

#[test]
fn side_car_captions_of_both_kinds() {
    let world = World::new();
    world
        .write("set/x/b.png", png(1))
        .write("set/x/b.txt", "\u{feff}of b\n")
        .write("set/a.png", png(2))
        .write("set/a.caption", "of a")
        .write("set/c.png", png(3))
        .write("set/lonely.txt", "of nothing")
        .write("set/odd.png", png(4))
        .write("set/odd.txt", b"\xff\xfe\x00");
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.captions(), [("a.png", "of a"), ("x/b.png", "of b")]);
    assert_eq!(ran.reasons(), [("c.png", "no_caption"), ("odd.png", "caption_encoding"), ("lonely.txt", "no_media")]);
    let ran = world.run(json!({"dataset": "set", "missing_caption": "empty"})).unwrap();
    assert_eq!(ran.captions(), [("a.png", "of a"), ("c.png", ""), ("x/b.png", "of b")]);
    let ran = world.run(json!({"dataset": "set", "missing_caption": "filename"})).unwrap();
    assert_eq!(ran.captions()[1], ("c.png", "c"));
}

#[test]
fn hidden_files_are_no_part_of_a_data_set_whatever_names_them() {
    let world = World::new();
    world
        .write("set/a.png", png(1))
        .write("set/.store/b.png", png(2))
        .write("set/x/.c.png", png(3))
        .write("set/runs/demo/d.png", png(4));
    fs_err::os::unix::fs::symlink(".store/b.png", world.path("set/b.png")).unwrap();
    let names = ["a.png", "b.png", ".store/b.png", "x/.c.png", "./x/.c.png"];
    let rows = names.map(|name| json!({"file_name": name, "text": name}).to_string());
    world.write("set/metadata.jsonl", rows.join("\n"));
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.captions(), [("a.png", "a.png"), ("b.png", "b.png")]);
    let refused = |line| (format!("metadata.jsonl:{line}"), "outside".to_owned());
    let mut expected =
        vec![refused(3), refused(4), refused(5), ("runs/demo/d.png".to_owned(), "no_metadata".to_owned())];
    let told = |ran: &Ran| ran.rejects.iter().map(|r| (r.source.clone(), r.reason.clone())).collect::<Vec<_>>();
    assert_eq!(told(&ran), expected);
    assert!(ran.rejects[0].detail.contains("hidden"), "{}", ran.rejects[0].detail);

    // What the runner does not count is not read, either.
    let counted =
        [world.check(json!({"dataset": "set"})).sources[0].parts.clone(), vec!["!runs/*".to_owned()]].concat();
    let ran = world.run_counting(json!({"dataset": "set"}), counted).unwrap();
    expected.pop();
    assert_eq!(told(&ran), expected);
}

#[test]
fn equal_pictures_are_numbered_in_source_order_and_limit_counts_source_rows() {
    let world = World::new();
    for name in ["a", "b", "c", "d"] {
        world.write(&format!("set/{name}.png"), if name == "b" { b"no picture".to_vec() } else { png(5) });
        world.write(&format!("set/{name}.txt"), name);
    }
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    let id = &blake3::hash(&png(5)).to_hex()[..16];
    assert_eq!(ran.ids(), [id.to_owned(), format!("{id}-2"), format!("{id}-3")]);
    let ran = world.run(json!({"dataset": "set", "limit": 2})).unwrap();
    assert_eq!((ran.captions(), ran.reasons()), (vec![("a.png", "a")], vec![("b.png", "unsupported")]));
}

#[test]
fn where_the_folder_lies_and_when_it_was_touched_change_nothing() {
    let (one, two) = (World::new(), World::new());
    for (world, folder) in [(&one, "set"), (&two, "elsewhere/other")] {
        world.write(&format!("{folder}/a.png"), png(1)).write(&format!("{folder}/a.txt"), "a");
    }
    let bytes = |world: &World, set: &str| {
        world.run(json!({"dataset": set})).unwrap();
        fs_err::read(world.path("artifact/samples/part-00000.parquet")).unwrap()
    };
    assert_eq!(bytes(&one, "set"), bytes(&two, "elsewhere/other"));
}

#[test]
fn the_dump_shows_what_was_decoded() {
    let world = World::new();
    let rgba = [[255u8, 0, 0, 255], [0, 0, 0, 0]].concat();
    let mut out = std::io::Cursor::new(Vec::new());
    let kind = image::ExtendedColorType::Rgba8;
    image::write_buffer_with_format(&mut out, &rgba, 2, 1, kind, ImageFormat::Png).unwrap();
    world.write("set/a.png", out.into_inner()).write("set/a.txt", "a");
    let settings = json!({"dump": "seen", "background": "#0a141e"});
    let ran = world.run_with(json!({"dataset": "set"}), settings).unwrap();
    let bytes = fs_err::read(world.path(&format!("seen/{}.png", ran.ids()[0]))).unwrap();
    assert_eq!(image::load_from_memory(&bytes).unwrap().into_rgb8().into_raw(), [255, 0, 0, 10, 20, 30]);
}

#[test]
fn orientation_swaps_the_stated_size() {
    let world = World::new();
    let jpeg = picture(1, ImageFormat::Jpeg);
    let mut turned = vec![0xff, 0xd8, 0xff, 0xe1, 0, 34];
    turned.extend(b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0");
    turned.extend(&jpeg[2..]);
    world.write("set/a.jpg", turned).write("set/a.txt", "a");
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!((ran.samples[0].width, ran.samples[0].height), (16, 24));
}

//! Parquet files with pictures inside.

use std::sync::Arc;

use ::parquet::arrow::ArrowWriter;
use arrow::array::{ArrayRef, BinaryViewArray, DictionaryArray, LargeBinaryArray, RecordBatch, StringArray};
use arrow::datatypes::Int32Type;
use serde_json::json;

use crate::support::{World, png, write_parquet};

#[test]
fn rows_of_all_files_in_path_order_and_null_parts_are_rejects() {
    let world = World::new();
    let row = |seed: u8, caption| (Some(png(seed)), Some("x.png"), caption);
    write_parquet(&world.path("set/data/b.parquet"), "image", "text", &[row(4, Some("four"))]);
    let rows = [row(1, Some("one")), row(2, None), (None, None, Some("three")), row(3, Some("  "))];
    write_parquet(&world.path("set/data/a.parquet"), "image", "text", &rows);
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.captions(), [("data/a.parquet#0", "one"), ("data/b.parquet#0", "four")]);
    assert_eq!(
        ran.reasons(),
        [("data/a.parquet#1", "no_caption"), ("data/a.parquet#2", "no_media"), ("data/a.parquet#3", "no_caption")]
    );
    assert_eq!(ran.outcome.info["caption_column"], "text");
    let ran = world.run(json!({"dataset": "set/data/a.parquet", "limit": 1})).unwrap();
    assert_eq!(ran.captions(), [("a.parquet#0", "one")]);
}

#[test]
fn a_folder_and_parquet_of_the_same_pictures_give_the_same_samples() {
    let world = World::new();
    let mut rows = Vec::new();
    for seed in [1, 2, 1] {
        world.write(&format!("folder/{}.png", rows.len()), png(seed)).write(&format!("folder/{}.txt", rows.len()), "x");
        rows.push((Some(png(seed)), None, Some("x")));
    }
    write_parquet(&world.path("set.parquet"), "picture_of_it", "caption", &rows);
    let folder = world.run(json!({"dataset": "folder"})).unwrap();
    let parquet = world.run(json!({"dataset": "set.parquet"})).unwrap();
    assert_eq!(folder.ids(), parquet.ids());
    assert_eq!(parquet.outcome.info["image_column"], "picture_of_it", "guessed by its type");
}

#[test]
fn splits_are_chosen_by_file_name() {
    let world = World::new();
    for split in ["train", "test"] {
        let path = world.path(&format!("set/{split}-00000-of-00001.parquet"));
        write_parquet(&path, "image", "caption", &[(Some(png(1)), None, Some(split))]);
    }
    let captions = |split: serde_json::Value| {
        let ran = world.run(json!({"dataset": "set", "split": split})).unwrap();
        ran.samples.into_iter().map(|s| s.caption).collect::<Vec<_>>()
    };
    assert_eq!(captions(json!(null)), ["train"]);
    assert_eq!(captions(json!("test")), ["test"]);
    assert_eq!(captions(json!("all")), ["test", "train"]);
    let problems = world.check(json!({"dataset": "set", "split": "validation"})).problems;
    assert_eq!(problems[0].field.as_deref(), Some("split"));
    assert!(problems[0].help.as_deref().unwrap().contains("`test`, `train`"));
}

#[test]
fn plain_binary_of_any_width_views_and_dictionaries_are_read() {
    let world = World::new();
    let write = |name: &str, image: ArrayRef, text: ArrayRef| {
        let batch = RecordBatch::try_from_iter([("image", image), ("caption", text)]).unwrap();
        let file = fs_err::File::create(world.path(name)).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    };
    let bytes = png(7);
    let text = || Arc::new(StringArray::from(vec!["x"])) as ArrayRef;
    write("large.parquet", Arc::new(LargeBinaryArray::from(vec![bytes.as_slice()])), text());
    write("view.parquet", Arc::new(BinaryViewArray::from(vec![bytes.as_slice()])), text());
    let dictionary: DictionaryArray<Int32Type> = ["x"].into_iter().collect();
    write("dictionary.parquet", Arc::new(LargeBinaryArray::from(vec![bytes.as_slice()])), Arc::new(dictionary));
    world.write("files/p.png", &bytes);
    write("paths.parquet", Arc::new(StringArray::from(vec!["files/p.png"])), text());
    for name in ["large", "view", "dictionary"] {
        let ran = world.run(json!({"dataset": format!("{name}.parquet")})).unwrap();
        assert_eq!((ran.samples[0].caption.as_str(), &ran.samples[0].bytes), ("x", &bytes), "{name}");
    }
    fs_err::create_dir_all(world.path("with_paths")).unwrap();
    fs_err::rename(world.path("paths.parquet"), world.path("with_paths/paths.parquet")).unwrap();
    fs_err::rename(world.path("files"), world.path("with_paths/files")).unwrap();
    let ran = world.run(json!({"dataset": "with_paths"})).unwrap();
    assert_eq!(ran.samples[0].bytes, bytes);
}

#[test]
fn columns_that_cannot_serve_are_named_with_their_kind() {
    let world = World::new();
    write_parquet(&world.path("set.parquet"), "image", "caption", &[(Some(png(1)), None, Some("x"))]);
    let problem = |parameters: serde_json::Value| world.check(parameters).problems.remove(0);
    let wrong = problem(json!({"dataset": "set.parquet", "caption_column": "image"}));
    assert!(wrong.message.starts_with("the column `image` holds Struct"), "{}", wrong.message);
    let missing = problem(json!({"dataset": "set.parquet", "image_column": "pic"}));
    assert_eq!(missing.help.as_deref(), Some("its columns are `image`, `caption`"));
    write_parquet(&world.path("odd.parquet"), "image", "remarks", &[(Some(png(1)), None, Some("x"))]);
    let none = problem(json!({"dataset": "odd.parquet"}));
    assert!(none.message.contains("captions") && none.help.unwrap().contains("`remarks`"), "{}", none.message);
    let ran = world.run(json!({"dataset": "odd.parquet", "missing_caption": "empty"})).unwrap();
    assert_eq!(ran.samples[0].caption, "");
}

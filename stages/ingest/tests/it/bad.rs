//! Bad files and bad recipes: every row ends somewhere, and every message says what to do.

use image::ImageFormat;
use serde_json::json;
use stage::Exit;

use crate::support::{World, picture, png};

#[test]
fn every_kind_of_bad_row_is_a_reject_with_its_reason() {
    let world = World::new();
    let jpeg = picture(1, ImageFormat::Jpeg);
    world
        .write("set/good.png", png(1))
        .write("set/truncated.jpg", &jpeg[..jpeg.len() - 30])
        .write("set/empty.png", "")
        .write("set/text.png", "this is text")
        .write("set/orphan.png", png(2))
        .write("set/uncaptioned.png", png(3))
        .write("outside.png", png(4))
        .write(
            "set/metadata.jsonl",
            [
                r#"{"file_name": "good.png", "caption": "good"}"#,
                r#"{"file_name": "truncated.jpg", "caption": "x"}"#,
                r#"{"file_name": "empty.png", "caption": "x"}"#,
                r#"{"file_name": "text.png", "caption": "x"}"#,
                r#"{"file_name": "gone.png", "caption": "x"}"#,
                r#"{"file_name": "../outside.png", "caption": "x"}"#,
                r#"{"file_name": "/etc/passwd", "caption": "x"}"#,
                r#"{"file_name": "link.png", "caption": "x"}"#,
                r#"{"file_name": "uncaptioned.png", "caption": null}"#,
                r#"{"file_name": "good.png", "caption": 7}"#,
                r#"{"caption": "no file"}"#,
                r"not json",
            ]
            .join("\n"),
        );
    fs_err::os::unix::fs::symlink("../outside.png", world.path("set/link.png")).unwrap();
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.captions(), [("good.png", "good")]);
    assert_eq!(
        ran.reasons(),
        [
            ("truncated.jpg", "decode"),
            ("empty.png", "empty"),
            ("text.png", "unsupported"),
            ("metadata.jsonl:5", "missing_file"),
            ("metadata.jsonl:6", "outside"),
            ("metadata.jsonl:7", "outside"),
            ("metadata.jsonl:8", "outside"),
            ("uncaptioned.png", "no_caption"),
            ("good.png", "metadata"),
            ("metadata.jsonl:11", "metadata"),
            ("metadata.jsonl:12", "metadata"),
            ("orphan.png", "no_metadata"),
            ("link.png", "outside"),
        ]
    );
    assert!(ran.rejects[0].detail.contains("truncated"), "{}", ran.rejects[0].detail);
    assert!(ran.outcome.summary.starts_with("1 sample, 13 rejected ("), "{}", ran.outcome.summary);
}

#[test]
fn links_out_of_a_folder_are_refused_and_loops_end() {
    let world = World::new();
    world.write("set/a.png", png(1)).write("set/a.txt", "a").write("secret/s.png", png(2));
    let link = |to: &str, at: &str| fs_err::os::unix::fs::symlink(to, world.path(at)).unwrap();
    link("../secret", "set/folder");
    link("../secret/s.png", "set/s.png");
    link(".", "set/loop");
    link("gone", "set/dangling.png");
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.captions(), [("a.png", "a")]);
    assert_eq!(ran.reasons(), [("dangling.png", "missing_file"), ("folder", "outside"), ("s.png", "outside")]);
}

#[test]
fn csv_rows_that_do_not_fit_are_rejects() {
    let world = World::new();
    world.write("set/a.png", png(1)).write("set/metadata.csv", b"file_name,caption\na.png,ok\na.png\na.png,\xff\n");
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.reasons(), [("metadata.csv:3", "metadata"), ("metadata.csv:4", "metadata")]);
}

#[test]
fn a_data_set_without_a_usable_row_fails_and_says_why() {
    let world = World::new();
    world.write("set/a.png", "no").write("set/a.txt", "a");
    let failure = world.run(json!({"dataset": "set"})).unwrap_err();
    assert_eq!(
        (failure.exit, failure.problem.message.as_str()),
        (Exit::Input, "nothing of `set` is usable: 1 row (1 unsupported)")
    );
    assert!(failure.problem.help.unwrap().contains("`a.png`"));
}

#[test]
fn recipes_that_cannot_work_are_found_by_check() {
    let world = World::new();
    fs_err::create_dir_all(world.path("nothing")).unwrap();
    world
        .write("set/a.png", png(1))
        .write("set/metadata.jsonl", r#"{"file_name": "a.png", "caption": "x", "mood": "y"}"#);
    world.write("plain/a.png", png(1)).write("plain/metadata.jsonl", r#"{"name": "a.png"}"#);
    world.write("notes.txt", "x").write("broken.parquet", "PAR1 nonsense");
    let problem = |parameters: serde_json::Value| {
        let mut problems = world.check(parameters).problems;
        assert_eq!(problems.len(), 1, "{problems:?}");
        let problem = problems.remove(0);
        (problem.field.unwrap(), problem.message, problem.help.unwrap_or_default())
    };
    let (field, message, help) = problem(json!({"dataset": "gone"}));
    assert!(field == "dataset" && message.contains("gone` does not exist") && help.contains("recipe's folder"));
    let (field, message, _) = problem(json!({"dataset": "nothing"}));
    assert!(field == "dataset" && message.contains("is empty"), "{message}");
    let (field, message, help) = problem(json!({"dataset": "set", "caption_column": "moood"}));
    assert_eq!((field.as_str(), message.as_str()), ("caption_column", "the data set has no column `moood`"));
    assert_eq!(help, "did you mean `mood`? its columns are `caption`, `file_name`, `mood`");
    let (_, message, help) = problem(json!({"dataset": "plain"}));
    assert!(message.contains("no column `file_name`") && help.contains("`name`"), "{message} {help}");
    let (_, message, _) = problem(json!({"dataset": "notes.txt"}));
    assert!(message.contains("is not a Parquet file"), "{message}");
    let (_, message, _) = problem(json!({"dataset": "broken.parquet"}));
    assert!(message.contains("cannot be read as Parquet"), "{message}");
    assert_eq!(problem(json!({"dataset": "set", "limit": 0})).0, "limit");
    assert_eq!(problem(json!({"dataset": "hf://datasets/a/b/c"})).0, "dataset");
    assert_eq!(problem(json!({"dataset": "set", "revision": "v1"})).0, "revision");
}

#[test]
fn the_key_holds_no_place() {
    let world = World::new();
    world.write("set/a.png", png(1)).write("set/a.txt", "a");
    let checked = world.check(json!({"dataset": "set"}));
    assert!(!checked.key.to_string().contains("set"), "{}", checked.key);
    assert_eq!(checked.sources[0].location, world.path("set").to_string_lossy());
    let remote = world.check(json!({"dataset": "hf://datasets/o/n@v2"}));
    assert_eq!((remote.sources[0].location.as_str(), remote.sources[0].revision.as_deref()), ("o/n", Some("v2")));
    let counts = |path| spec::glob::matches_any(&remote.sources[0].parts, path);
    assert!(["a.parquet", "images/0001", "x/Photo.Png", "x/README.md.png"].into_iter().all(counts));
    assert!(![".gitattributes", "x/.cache/a.png", "README.md"].into_iter().any(counts));
    assert_eq!(remote.key, checked.key);
}

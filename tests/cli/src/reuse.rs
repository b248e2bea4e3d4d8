//! Law L1 with the real programs, item by item: what changed is made again, and nothing else.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use image::{Rgb, RgbImage};
use serde_json::Value;
use store::Digest;
use tables::{LatentInfo, TableReader};

use crate::project::{recipe, small, tiny_flux};
use crate::support::{Sandbox, copy_folder, kill_tree, signal_tree};

const ENCODE: &[&str] = &["run", "small.toml", "--until", "encode"];

fn manifest(sandbox: &Sandbox, stage: &str) -> Value {
    let text = fs_err::read_to_string(sandbox.path(format!("runs/small/{stage}/manifest.json"))).expect("a manifest");
    serde_json::from_str(&text).expect("JSON")
}

/// Latents and captions that the last `encode` made.
fn new(sandbox: &Sandbox) -> (u64, u64) {
    let info = &manifest(sandbox, "encode")["info"]["new"];
    (info["latents"].as_u64().expect("a number"), info["captions"].as_u64().expect("a number"))
}

/// Changes one byte of a file in place; name, size and time stay.
fn edit(path: &Path, at_end: usize) {
    let time = fs_err::metadata(path).expect("a file").modified().expect("a time");
    let mut bytes = fs_err::read(path).expect("a file");
    let at = bytes.len() - at_end;
    bytes[at] ^= 1;
    fs_err::write(path, bytes).expect("a written file");
    let file = fs_err::File::options().write(true).open(path).expect("a file");
    file.file().set_modified(time).expect("a time");
}

/// The weights of a component of a model folder.
fn weights(model: &Path, component: &str) -> std::path::PathBuf {
    let mut files =
        fs_err::read_dir(model.join(component)).expect("a folder").map(|entry| entry.expect("an entry").path());
    files.find(|path| path.extension().is_some_and(|end| end == "safetensors")).expect("weights")
}

/// The small project with its own copy of the model, and pictures whose size does not depend on their pixels.
fn world() -> Sandbox {
    let sandbox = small();
    copy_folder(&tiny_flux(), &sandbox.path("model"));
    for n in 0..12 {
        let png = sandbox.path(format!("pictures/{n:02}.png"));
        image::open(&png).expect("a picture").save(png.with_extension("bmp")).expect("a BMP");
        fs_err::remove_file(png).expect("a file");
    }
    let metadata = fs_err::read_to_string(sandbox.path("pictures/metadata.jsonl")).expect("metadata");
    sandbox.write("pictures/metadata.jsonl", &metadata.replace(".png", ".bmp"));
    sandbox.write("small.toml", &recipe("pictures", "model"));
    sandbox.pipeline(ENCODE).expect(0);
    assert_eq!(new(&sandbox), (12, 13));
    sandbox
}

#[test]
fn one_edited_picture_is_one_latent_though_name_size_and_time_are_the_same() {
    let sandbox = world();
    edit(&sandbox.path("pictures/07.bmp"), 300);
    sandbox.pipeline(&["plan", "small.toml", "--until", "encode"]).expect(0).says(&[
        "source `dataset` changed: 07.bmp",
        "1 of 12 latents (pixels of `07.bmp` changed",
        "0 of 13 captions",
    ]);
    sandbox.pipeline(ENCODE).expect(0).says(&["(1 new, 11 reused)", "(0 new, 13 reused)"]);
    assert_eq!(new(&sandbox), (1, 0));
    // One caption.
    let metadata = fs_err::read_to_string(sandbox.path("pictures/metadata.jsonl")).expect("metadata");
    sandbox.write("pictures/metadata.jsonl", &metadata.replace("disc number 3\"", "disc number three\""));
    sandbox.pipeline(ENCODE).expect(0);
    assert_eq!(new(&sandbox), (0, 1));
}

#[test]
fn swapped_weights_at_the_same_path_make_stale_what_they_made_and_no_more() {
    let sandbox = world();
    edit(&weights(&sandbox.path("model"), "vae"), 2);
    sandbox.pipeline(&["plan", "small.toml", "--until", "encode"]).expect(0).says(&[
        "source `model` changed: vae/",
        "12 of 12 latents",
        "0 of 13 captions",
    ]);
    sandbox.pipeline(ENCODE).expect(0);
    assert_eq!(new(&sandbox), (12, 0));
    edit(&weights(&sandbox.path("model"), "text_encoder_2"), 2);
    sandbox.pipeline(ENCODE).expect(0);
    assert_eq!(new(&sandbox), (0, 13));
}

#[test]
fn renamed_moved_and_touched_everything_is_as_it_was() {
    let sandbox = world();
    for (from, to) in [("pictures", "elsewhere"), ("model", "weights"), (".pipeline", "cache")] {
        fs_err::rename(sandbox.path(from), sandbox.path(to)).expect("a renamed folder");
    }
    for file in ["elsewhere/03.bmp", "elsewhere/metadata.jsonl", "weights/model_index.json"] {
        let file = fs_err::File::options().append(true).open(sandbox.path(file)).expect("a file");
        let later = file.metadata().expect("metadata").modified().expect("a time") + std::time::Duration::from_secs(99);
        file.file().set_modified(later).expect("a time");
    }
    sandbox.write("other/small.toml", &recipe("../elsewhere", "../weights"));
    for _ in 0..3 {
        let args = ["run", "other/small.toml", "--until", "encode", "--cache", "cache", "--threads", "1"];
        sandbox.pipeline(&args).expect(0).says(&["nothing to do"]);
    }
}

/// Writes picture `n`, of which no two are alike; its sample id.
fn draw(sandbox: &Sandbox, n: u32, shade: u8) -> String {
    let path = sandbox.path(format!("pictures/{n:04}.bmp"));
    RgbImage::from_fn(64, 64, |x, y| Rgb([(x * n) as u8, (y + n / 256) as u8, shade])).save(&path).expect("a picture");
    Digest::of_bytes(&fs_err::read(path).expect("a file")).to_string()[..16].to_owned()
}

/// Samples whose latents a killed `encode` left whole.
fn saved(sandbox: &Sandbox) -> BTreeSet<String> {
    let keys = fs_err::read_dir(sandbox.path(".pipeline/work/encode")).into_iter().flatten().flatten();
    let files = keys.filter_map(|key| fs_err::read_dir(key.path().join("scratch/latents")).ok()).flatten().flatten();
    let whole = files.map(|file| file.path()).filter(|path| {
        path.file_stem().and_then(|stem| stem.to_str()).is_some_and(|stem| stem.parse::<Digest>().is_ok())
    });
    whole
        .flat_map(|path| {
            let table = TableReader::open(&path).expect("a whole file");
            table.rows::<LatentInfo>().map(|row| row.expect("a row").1.sample_id).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn of_a_thousand_items_a_kill_one_more_one_less_and_one_changed_leave_the_rest() {
    let sandbox = Sandbox::new();
    fs_err::create_dir_all(sandbox.path("pictures")).expect("a folder");
    let mut ids: Vec<String> = (0..1000).map(|n| draw(&sandbox, n, 7)).collect();
    let metadata = |numbers: &mut dyn Iterator<Item = usize>| {
        let line = |n: usize| format!("{{\"file_name\": \"{n:04}.bmp\", \"text\": \"a disc\"}}\n");
        sandbox.write("pictures/metadata.jsonl", &numbers.map(line).collect::<String>());
    };
    metadata(&mut (0..1000));
    sandbox.write("small.toml", &recipe("pictures", &tiny_flux().to_string_lossy()));
    sandbox.pipeline(&["run", "small.toml", "--until", "ingest"]).expect(0);

    let mut runner = sandbox.command(&[ENCODE, &["--threads", "1"]].concat());
    let mut runner = runner.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a started runner");
    let deadline = Instant::now() + Duration::from_mins(5);
    while saved(&sandbox).len() < 700 {
        assert!(
            Instant::now() < deadline && runner.try_wait().expect("a child").is_none(),
            "it ended before it was killed"
        );
        // Rows are saved once a second: with pauses, so few at a time that the mark lies well before the end.
        for (signal, pause) in [("STOP", 400), ("CONT", 100)] {
            signal_tree(runner.id(), signal);
            std::thread::sleep(Duration::from_millis(pause));
        }
    }
    kill_tree(runner.id());
    runner.wait().expect("an ended runner");
    let saved = saved(&sandbox);
    assert!((700..1000).contains(&saved.len()), "{}", saved.len());

    // One less and one changed among those that were saved, and one more.
    let mut among = (0..1000).filter(|n| saved.contains(&ids[*n]));
    let (gone, changed) = (among.next().expect("a saved one"), among.next().expect("another"));
    fs_err::remove_file(sandbox.path(format!("pictures/{gone:04}.bmp"))).expect("a file");
    ids[changed] = draw(&sandbox, changed as u32, 8);
    draw(&sandbox, 1000, 7);
    metadata(&mut (0..=1000).filter(|n| *n != gone));
    sandbox.pipeline(ENCODE).expect(0);
    assert_eq!(new(&sandbox).0, 1000 - saved.len() as u64 + 2);
    for _ in 0..2 {
        sandbox.pipeline(ENCODE).expect(0).says(&["nothing to do"]);
    }
    let digest = |sandbox: &Sandbox| manifest(sandbox, "encode")["digest"].clone();
    let continued = digest(&sandbox);
    sandbox.pipeline(&[ENCODE, &["--cache", "fresh"]].concat()).expect(0);
    assert_eq!(continued, digest(&sandbox), "as if nothing had happened");
}

/// The model and the data are gone, the cache is elsewhere: every stage is still cached, and says so.
#[test]
fn a_moved_cache_answers_without_pictures_and_model() {
    let sandbox = world();
    sandbox.pipeline(&["run", "small.toml"]).expect(0);
    for name in ["pictures", "model"] {
        fs_err::remove_dir_all(sandbox.path(name)).expect("a folder");
    }
    fs_err::rename(sandbox.path(".pipeline"), sandbox.path("cache")).expect("a renamed folder");
    let there = ["small.toml", "--cache", "cache"];
    sandbox.pipeline(&[&["run"], &there[..]].concat()).expect(0).says(&[
        "nothing to do: all 5 stages are cached",
        "/pictures` is not there",
        "/model` is not there",
    ]);
    let more = ["--set", "bucket.where=width > 1"];
    sandbox.pipeline(&[&["run"], &there[..], &more, &["--until", "bucket"]].concat()).expect(0).says(&["1 made"]);
    // Drawing needs the model, and says so.
    let needs = ["--force", "generate"];
    sandbox.pipeline(&[&["run"], &there[..], &needs].concat()).expect(4).says(&["`generate` must run", "/model`"]);
}

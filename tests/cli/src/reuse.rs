//! Law L1 with the real programs, item by item: what changed is made again, and nothing else.

use std::path::Path;

use serde_json::Value;

use crate::project::{recipe, small, tiny_flux};
use crate::support::Sandbox;

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

fn copy_folder(from: &Path, to: &Path) {
    fs_err::create_dir_all(to).expect("a folder");
    for entry in fs_err::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let target = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            fs_err::copy(&path, target).expect("a copy");
        }
    }
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

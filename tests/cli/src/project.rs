//! A small whole project in a sandbox: a dozen pictures we draw, the tiny FLUX of the fixtures, a recipe.

use std::path::{Path, PathBuf};

use image::{Rgb, RgbImage};

use crate::support::{Sandbox, workspace};

/// The tiny FLUX folder that the parity tests use, too.
pub(crate) fn tiny_flux() -> PathBuf {
    workspace().join("tests/parity/fixtures/flux-tiny")
}

/// `count` pictures of 96×192 pixels, each another gradient with a disc, and `metadata.jsonl`.
pub(crate) fn draw_pictures(folder: &Path, count: u32) {
    fs_err::create_dir_all(folder).expect("a folder");
    let mut metadata = String::new();
    for n in 0..count {
        let picture = RgbImage::from_fn(96, 192, |x, y| {
            let inside = (x as i32 - 48).pow(2) + (y as i32 - 96).pow(2) < (15 + n as i32).pow(2);
            if inside { Rgb([250, (n * 19) as u8, 40]) } else { Rgb([(x * 2) as u8, y as u8, (n * 20) as u8]) }
        });
        picture.save(folder.join(format!("{n:02}.png"))).expect("a PNG");
        metadata += &format!("{{\"file_name\": \"{n:02}.png\", \"text\": \"a trtcrd of disc number {n}\"}}\n");
    }
    fs_err::write(folder.join("metadata.jsonl"), metadata).expect("metadata");
}

/// The recipe: 12 pictures, 4 steps of global batch 8, two pictures out.
pub(crate) fn recipe(dataset: &str, model: &str) -> String {
    format!(
        r#"name = "small"

[ingest]
dataset = "{dataset}"
caption_column = "text"

[encode]
model = "{model}"
max_pixels = 8192
max_sequence_length = 16

[bucket]

[train]
seed = 7

[train.step_scheduler]
max_steps = 4
global_batch_size = 8
local_batch_size = 4
ckpt_every_steps = 2

[train.optimizer]
lr = 1e-3

[generate]
prompts = ["a trtcrd of a disc", "a disc"]
width = 64
height = 128
steps = 2
seed = 3
max_sequence_length = 16
"#
    )
}

/// A sandbox with `pictures/` and `small.toml`.
pub(crate) fn small() -> Sandbox {
    let sandbox = Sandbox::new();
    draw_pictures(&sandbox.path("pictures"), 12);
    sandbox.write("small.toml", &recipe("pictures", &tiny_flux().to_string_lossy()));
    sandbox
}

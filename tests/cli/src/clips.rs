//! The whole path on clips, with the real programs: a tiny Wan learns clocks, its tables answer, its clip can be played.

use bytes::Bytes;
use video::{Format, Writer, clock};

use crate::support::{Sandbox, workspace};

fn draw(sandbox: &Sandbox) {
    let folder = sandbox.path("clips");
    fs_err::create_dir_all(&folder).expect("a folder");
    for (name, fps, frames) in [("a", 24, 30), ("b", 16, 20), ("short", 30, 12)] {
        let path = folder.join(format!("{name}.mp4"));
        let mut writer = Writer::create(&path, &Format::mp4(), (48, 32), fps, &[]).expect("a file");
        for n in 0..frames {
            writer.push(&clock::frame(f64::from(n) / f64::from(fps), 48, 32, 9)).expect("a frame");
        }
        writer.finish().expect("a clip");
        fs_err::write(folder.join(format!("{name}.txt")), format!("clock {name}")).expect("a caption");
    }
    media::write_png(&folder.join("still.png"), &clock::frame(1.0, 48, 32, 9), &[]).expect("a picture");
    fs_err::write(folder.join("still.txt"), "a still clock").expect("a caption");
}

#[test]
fn one_recipe_from_clips_to_a_clip() {
    let sandbox = Sandbox::new();
    draw(&sandbox);
    let (model, recipes) = (workspace().join("tests/parity/fixtures/wan-tiny"), workspace().join("recipes"));
    sandbox.write(
        "clips.toml",
        &format!(
            r#"name = "clips"
[ingest]
dataset = "clips"
[encode]
model = "{}"
max_pixels = 1536
frames = 9
max_sequence_length = 24
[train]
config = "{}/wan2_1_t2v_flow_lora.yaml"
[train.step_scheduler]
max_steps = 2
global_batch_size = 2
local_batch_size = 1
[train.peft]
dim = 4
alpha = 8
[train.samples]
prompts = ["a clock"]
every_steps = 2
width = 48
height = 32
frames = 5
steps = 2
guidance = 3.0
[generate]
prompts = ["a clock"]
width = 48
height = 32
frames = 5
steps = 2
guidance = 3.0
max_sequence_length = 24
"#,
            model.display(),
            recipes.display()
        ),
    );
    sandbox.pipeline(&["run", "clips.toml"]).expect(0);
    let sql = |query: &str| {
        let out = sandbox.pipeline(&["sql", "clips.toml", query, "--format", "csv"]).expect(0).stdout;
        out.lines().skip(1).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(sql("select source, frames from samples order by 1"), "a.mp4,30 b.mp4,20 short.mp4,12 still.png,1");
    assert_eq!(sql("select bucket_frames, count(*) from latents group by 1 order by 1"), "1,1 9,2");
    assert_eq!(sql("select stage, reason from rejects"), "encode,too_short");
    assert_eq!(sql("select count(*) from captions where tokens >= 24 or encoder <> 'umt5'"), "0");
    assert_eq!(sql("select count(*) from steps"), "2");
    assert_eq!(sql("select frames, fps from images"), "5,16");
    let path = |inside: &str| sandbox.path("runs/clips").join(inside);
    for made in ["train/epoch_0_step_1/pytorch_lora_weights.safetensors", "train/samples/step_1/000.png"] {
        assert!(path(made).is_file(), "{made}");
    }
    let clip = Bytes::from(fs_err::read(path("generate/000_a_clock.mp4")).expect("a clip"));
    let facts = video::probe(&clip).expect("a clip that can be decoded");
    assert_eq!((facts.frames, facts.width, facts.height), (5, 48, 32));
}

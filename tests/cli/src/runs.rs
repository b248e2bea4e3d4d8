//! The whole path, from pictures to pictures, with the real programs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::project::{small, tiny_flux};
use crate::support::{Sandbox, finish, kill_tree, workspace};

/// Relative path → contents, for every file of a published artifact but its manifest.
fn contents(root: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(root: &Path, dir: &Path, out: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs_err::read_dir(dir).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(root, &path, out);
            } else {
                let name = path.strip_prefix(root).expect("below").to_string_lossy().into_owned();
                out.insert(name, fs_err::read(&path).expect("a file"));
            }
        }
    }
    let mut out = BTreeMap::new();
    walk(root, &root.canonicalize().map_or_else(|_| root.to_owned(), |_| root.to_owned()), &mut out);
    out.remove("manifest.json");
    out
}

fn csv(sandbox: &Sandbox, query: &str) -> String {
    sandbox.pipeline(&["sql", "small.toml", query, "--format", "csv"]).expect(0).stdout
}

#[test]
fn one_recipe_from_pictures_to_pictures() {
    let sandbox = small();
    sandbox.pipeline(&["run", "small.toml"]).expect(0);

    // Results a person finds without knowing any hash. 12 samples are 3 micro-batches: 2 steps an epoch.
    for path in [
        "train/epoch_1_step_3/model_index.json",
        "train/epoch_1_step_3/transformer/config.json",
        "generate/contact_sheet.png",
    ] {
        assert!(sandbox.path("runs/small").join(path).exists(), "{path}");
    }
    // Every table of the run answers.
    assert_eq!(csv(&sandbox, "select count(*) from samples").trim(), "count(*)\n12");
    assert_eq!(
        csv(&sandbox, "select count(*), min(bucket_width), max(bucket_height) from latents").lines().nth(1),
        Some("12,64,128")
    );
    assert_eq!(csv(&sandbox, "select count(distinct caption_digest) from captions").lines().nth(1), Some("13"));
    assert_eq!(csv(&sandbox, "select count(*) from steps").lines().nth(1), Some("4"));
    assert_eq!(csv(&sandbox, "select sum(rows) from shards").lines().nth(1), Some("12"));
    assert_eq!(csv(&sandbox, "select count(*) from images").lines().nth(1), Some("2"));
    assert_eq!(csv(&sandbox, "select count(*) from rejects").lines().nth(1), Some("0"));
    assert_eq!(
        csv(&sandbox, "select count(*) from latents where has_nan(latent) or tensor_std(latent) = 0").lines().nth(1),
        Some("0")
    );
    csv(&sandbox, "select s.caption, avg(l.loss) from losses l join samples s using (sample_id) group by 1");
    assert_eq!(csv(&sandbox, "select count(*) from stages").lines().nth(1), Some("5"));

    // A second run does nothing, says so, and starts no stage.
    sandbox.pipeline(&["run", "small.toml"]).expect(0).says(&["nothing to do"]);
    // A changed value runs exactly what depends on it.
    let plan = sandbox.pipeline(&["plan", "small.toml", "--set", "generate.steps=3", "--json"]).expect(0).stdout;
    assert_eq!(to_run(&plan), ["generate"]);
    let plan = sandbox.pipeline(&["plan", "small.toml", "--set", "train.seed=8", "--json"]).expect(0).stdout;
    assert_eq!(to_run(&plan), ["train", "generate"]);
    // An operational setting runs nothing.
    let plan = sandbox.pipeline(&["plan", "small.toml", "--threads", "1", "--json"]).expect(0).stdout;
    assert_eq!(to_run(&plan), [""; 0]);
    sandbox.pipeline(&["show", "small.toml"]).expect(0).says(&["ingest", "encode", "bucket", "train", "generate"]);
}

#[test]
fn a_recipe_that_only_draws_uses_the_base_model_and_a_foreign_lora() {
    let sandbox = Sandbox::new();
    let model = tiny_flux();
    let recipe = |lora: &str| {
        let model = model.display();
        format!(
            "name = \"draw\"\n[generate]\nmodel = \"{model}\"\n{lora}prompts = [\"a disc\"]\nwidth = 64\nheight = 64\n\
             steps = 2\nmax_sequence_length = 16\n"
        )
    };
    sandbox.write("base.toml", &recipe(""));
    sandbox.write("lora.toml", &recipe(&format!("lora = \"{}\"\n", model.join("lora_peft").display())));
    let picture = |name: &str| {
        sandbox.pipeline(&["run", name]).expect(0);
        fs_err::read(sandbox.path("runs/draw/generate/000_a_disc.png")).expect("a picture")
    };
    assert_ne!(picture("base.toml"), picture("lora.toml"));
    let stages: Vec<_> = fs_err::read_dir(sandbox.path(".pipeline/artifacts")).expect("artifacts").collect();
    assert_eq!(stages.len(), 1, "{stages:?}");
}

/// Stages that a `plan --json` would run.
fn to_run(plan: &str) -> Vec<String> {
    let plan: serde_json::Value = serde_json::from_str(plan).expect("JSON");
    let stages = plan["stages"].as_array().expect("a list");
    stages
        .iter()
        .filter(|stage| stage["state"] != "cached")
        .map(|stage| stage["stage"].as_str().expect("a name").to_owned())
        .collect()
}

#[test]
fn a_killed_training_goes_on_to_the_same_bytes() {
    let undisturbed = small();
    undisturbed.pipeline(&["run", "small.toml", "--until", "train"]).expect(0);

    let killed = small();
    killed.pipeline(&["run", "small.toml", "--until", "bucket"]).expect(0);
    let mut child = killed.command(&["run", "small.toml", "--until", "train"]).spawn().expect("a started runner");
    // Kill runner and stage once the first checkpoint lies there, or let them finish: both must end in the same bytes.
    let deadline = Instant::now() + Duration::from_mins(2);
    let work = killed.path(".pipeline/work/train");
    while Instant::now() < deadline && child.try_wait().expect("a child").is_none() && !has_checkpoint(&work) {
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_tree(child.id());
    child.wait().expect("an ended runner");
    killed.pipeline(&["run", "small.toml", "--until", "train"]).expect(0);

    let (a, b) = (contents(&undisturbed.path("runs/small/train")), contents(&killed.path("runs/small/train")));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        // Seconds and memory are measured, not computed.
        assert!(name.starts_with("steps") || bytes == &b[name], "`{name}` differs after a kill and a resume");
    }
    let digest = |sandbox: &Sandbox| {
        let text = fs_err::read_to_string(sandbox.path("runs/small/train/manifest.json")).expect("a manifest");
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")["digest"].clone()
    };
    assert_eq!(digest(&undisturbed), digest(&killed), "what comes after would run again");
}

fn has_checkpoint(work: &Path) -> bool {
    let Ok(keys) = fs_err::read_dir(work) else { return false };
    keys.flatten().any(|key| {
        fs_err::read_dir(key.path().join("out"))
            .is_ok_and(|files| files.flatten().any(|file| file.file_name().to_string_lossy().starts_with("epoch_")))
    })
}

#[test]
fn ctrl_c_keeps_nothing_half_made_and_the_next_run_goes_on() {
    let sandbox = small();
    sandbox.pipeline(&["run", "small.toml", "--until", "bucket"]).expect(0);
    let long = ["run", "small.toml", "--until", "train", "--set", "train.step_scheduler.max_steps=100000"];
    let child = sandbox
        .command(&long)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("a runner");
    let deadline = Instant::now() + Duration::from_mins(2);
    while Instant::now() < deadline && !has_checkpoint(&sandbox.path(".pipeline/work/train")) {
        std::thread::sleep(Duration::from_millis(20));
    }
    finish(std::process::Command::new("kill").args(["-INT", &child.id().to_string()])).expect(0);
    let output = child.wait_with_output().expect("an ended runner");
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!sandbox.path("runs/small/train").exists(), "an interrupted stage was published");
    assert_eq!(fs_err::read_dir(sandbox.path(".pipeline/artifacts/train")).map_or(0, Iterator::count), 0);
}

#[test]
fn a_lora_trains_through_the_same_loop_and_generates() {
    let sandbox = small();
    let text = fs_err::read_to_string(sandbox.path("small.toml")).expect("a recipe");
    sandbox.write(
        "small.toml",
        &(text + "\n[train.peft]\ndim = 4\nalpha = 8\ntarget_modules = [\"*.attn.to_q\", \"*.attn.to_v\"]\n"),
    );
    sandbox.pipeline(&["run", "small.toml"]).expect(0);
    let checkpoint = sandbox.path("runs/small/train/epoch_1_step_3");
    for name in ["pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json"] {
        assert!(checkpoint.join(name).exists(), "{name}");
    }
    assert!(sandbox.path("runs/small/generate/contact_sheet.png").exists());
}

#[test]
fn the_real_cards_are_the_same_from_a_folder_and_from_parquet() {
    let cards = workspace().join("../shared/data/tarot");
    if !cards.exists() {
        eprintln!("skipped: ../shared/data/tarot is absent");
        return;
    }
    let latents = |dataset: &Path, columns: &str| {
        let sandbox = Sandbox::new();
        let recipe = format!(
            "name = \"small\"\n[ingest]\ndataset = \"{}\"\n{columns}\n[encode]\nmodel = \"{}\"\nmax_pixels = 245760\nmax_sequence_length = 16\n",
            dataset.display(),
            tiny_flux().display()
        );
        sandbox.write("small.toml", &recipe);
        sandbox.pipeline(&["run", "small.toml"]).expect(0);
        assert_eq!(csv(&sandbox, "select count(*), min(bucket_width), max(bucket_width), min(bucket_height), max(bucket_height) from latents").lines().nth(1), Some("78,384,384,640,640"));
        csv(
            &sandbox,
            "select sample_id, tensor_mean(latent) m, tensor_norm(latent) n, tensor_max(latent) x from latents order by sample_id",
        )
    };
    let parquet = latents(&cards.join("data"), "");
    let folder = latents(&cards.join("images"), "");
    assert_eq!(parquet, folder);
}

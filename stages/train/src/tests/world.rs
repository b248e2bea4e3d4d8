//! A throw-away data set and runs of the stage on it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use half::{bf16, f16};
use models::{ModelFolder, TextInput, family_of};
use nn::rng::Stream;
use nn::{BuildOptions, Weights};
use serde_json::{Value, json};
use spec::Bucket;
use stage::{CONTRACT, Events, Failure, Outcome, ResolvedSource, RunRequest, SourceKind, Work};
use tables::{
    Caption, CaptionsWriter, LatentMeta, Loss, Normalisation, ShardRow, ShardWriter, Step, TextMeta, caption_digest,
};
use tch::{Device, Kind, Tensor};

use crate::{Parameters, Settings, Train};

/// The tiny FLUX.
pub(super) fn model() -> PathBuf {
    fixture("flux-tiny")
}

/// A model folder of the fixtures.
pub(super) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures").join(name).canonicalize().unwrap()
}

/// Shards and captions in a folder of their own.
pub(super) struct World {
    dir: tempfile::TempDir,
    model: PathBuf,
    /// Overrides of every run.
    common: Value,
    /// Holds a model of our own.
    _made: Option<tempfile::TempDir>,
}

pub(super) const SQUARE: Bucket = Bucket { width: 64, height: 64, frames: 1 };
pub(super) const TALL: Bucket = Bucket { width: 64, height: 128, frames: 1 };

impl World {
    /// `count` random samples in each bucket, for the tiny FLUX; the last row of each shard is a repeat of the first.
    pub(super) fn new(buckets: &[(Bucket, usize)]) -> Self {
        Self::with_latents(buckets, |id, n| Stream::new(1, &["latent".into(), id.into()]).normals(n))
    }

    pub(super) fn with_latents(buckets: &[(Bucket, usize)], latent: impl Fn(&str, usize) -> Vec<f32>) -> Self {
        Self::of(&ModelFolder::open(model()).unwrap(), buckets, latent)
    }

    /// As [`World::new`], one for each tiny model there is; those that know clips get clips of two latent frames.
    pub(super) fn each(buckets: &[(Bucket, usize)], body: impl Fn(&Self)) {
        for (name, folder) in models::testing::fixtures() {
            println!("{name}");
            let frames = family_of(&folder).unwrap().clips(&folder).unwrap().map_or(1, |clips| 1 + clips.stride);
            let buckets: Vec<_> =
                buckets.iter().map(|(bucket, count)| (Bucket { frames, ..*bucket }, *count)).collect();
            let latent = |id: &str, n| Stream::new(1, &["latent".into(), id.into()]).normals(n);
            body(&Self::of(&folder, &buckets, latent));
        }
    }

    pub(super) fn of(
        folder: &ModelFolder,
        buckets: &[(Bucket, usize)],
        latent: impl Fn(&str, usize) -> Vec<f32>,
    ) -> Self {
        const SIDE: u32 = 1 << 10;
        let dir = tempfile::tempdir().unwrap();
        let family = family_of(folder).unwrap();
        let vae = family.vae(folder, BuildOptions::frozen(Device::Cpu, Kind::Float)).unwrap();
        let shape = vae.latent_shape(SIDE, SIDE, 1);
        let meta = LatentMeta {
            encoder: "test".to_owned(),
            channels: shape[0] as u32,
            spatial_stride: SIDE / *shape.last().unwrap() as u32,
            temporal_stride: family.clips(folder).unwrap().map(|clips| clips.stride),
            normalisation: Normalisation::ScaleShift { scaling: 1.0, shift: 0.0 },
        };
        let mut captions = vec![String::new()];
        let mut index = Vec::new();
        for (bucket, count) in buckets {
            let shard = format!("shards/{bucket}/00000.arrow");
            let path = dir.path().join("bucket").join(&shard);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            let mut writer = ShardWriter::create(&path, &meta, *bucket).unwrap();
            let values: usize = meta.shape(*bucket).iter().product();
            for (i, repeated) in (0..*count).map(|i| (i, false)).chain([(0, true)]) {
                let (id, caption) = (format!("{bucket}-{i}"), format!("caption {}", i % 3));
                let values: Vec<f16> = latent(&id, values).into_iter().map(f16::from_f32).collect();
                writer.push(&id, &caption_digest(&caption), repeated, &values).unwrap();
                if !captions.contains(&caption) {
                    captions.push(caption);
                }
            }
            writer.finish().unwrap();
            let row = ShardRow {
                shard,
                bucket_width: bucket.width as i32,
                bucket_height: bucket.height as i32,
                bucket_frames: bucket.frames as i32,
                rows: *count as i64 + 1,
                repeated: 1,
                bytes: 0,
                digest: String::new(),
            };
            index.push(row);
        }
        tables::write(&dir.path().join("bucket/shards.parquet"), index).unwrap();
        write_captions(dir.path(), &captions, &family.text_inputs(folder).unwrap());
        // As the training recipe of the family names it; our default is that of FLUX.
        let adapter = if family.name() == "flux" { "flux" } else { "simple" };
        let common = json!({
            "base_model": folder.path,
            "flow_matching": {"adapter_type": adapter, "cfg_dropout_prob": 0.1},
            "seed": 5,
            "model": {"torch_dtype": "float32", "compute_dtype": "float32"},
            "optimizer": {"lr": 1e-3},
            "step_scheduler": {"global_batch_size": 8, "local_batch_size": 8, "max_steps": 4, "ckpt_every_steps": 2},
        });
        Self { dir, model: folder.path.clone(), common, _made: None }
    }

    /// As [`World::new`], for a model like the fixture `name` with `layers` layers and weights drawn by chance.
    pub(super) fn deep(name: &str, layers: u64, buckets: &[(Bucket, usize)]) -> Self {
        let made = tempfile::tempdir().unwrap();
        let fixture = model().with_file_name(name);
        let all = format!("{}/.", fixture.display());
        let copied = std::process::Command::new("cp").arg("-rL").arg(all).arg(made.path()).status();
        assert!(copied.unwrap().success());
        for part in ["transformer", "transformer_2"] {
            let path = made.path().join(part).join("config.json");
            let Ok(config) = fs_err::read(&path) else { continue };
            let mut config: Value = serde_json::from_slice(&config).unwrap();
            config["num_layers"] = json!(layers);
            fs_err::write(&path, config.to_string()).unwrap();
        }
        let folder = ModelFolder::open(made.path()).unwrap();
        let frames = family_of(&folder).unwrap().clips(&folder).unwrap().map_or(1, |clips| 1 + clips.stride);
        let buckets: Vec<_> = buckets.iter().map(|(bucket, count)| (Bucket { frames, ..*bucket }, *count)).collect();
        let mut world = Self::of(&folder, &buckets, |id, n| Stream::new(1, &["latent".into(), id.into()]).normals(n));
        world.common["model"]["mode"] = json!("pretrain");
        Self { _made: Some(made), ..world }
    }

    pub(super) fn output(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the stage into the folder `name`, with `over` laid over the common recipe.
    #[expect(clippy::needless_pass_by_value, reason = "calls with `json!` read better")]
    pub(super) fn run(&self, name: &str, over: Value) -> Result<Outcome, Failure> {
        self.run_until(name, &over, false)
    }

    /// As [`World::run`]; `interrupted`: someone pressed ctrl-C before the first step.
    pub(super) fn run_until(&self, name: &str, over: &Value, interrupted: bool) -> Result<Outcome, Failure> {
        crate::trainer::run(&self.work(name, over, interrupted), &spec::Launch::alone())
    }

    /// Runs the stage as `ranks` ranks, threads of this process; what the first of them gave, after all agree.
    pub(super) fn run_ranks(&self, name: &str, ranks: usize, over: &Value) -> Result<Outcome, Failure> {
        Self::agreed(comm::testing::launches(ranks, |launch| {
            crate::trainer::run(&self.work(name, over, false), launch)
        }))
    }

    /// As [`World::run_ranks`], every rank pausing at random, as `seed` says, before it calls the others.
    pub(super) fn run_delayed(&self, name: &str, ranks: usize, seed: u64, over: &Value) -> Result<Outcome, Failure> {
        let longest = Duration::from_millis(4);
        let run = |launch: &spec::Launch| crate::trainer::run(&self.work(name, over, false), launch);
        Self::agreed(comm::testing::delayed(ranks, seed, longest, run))
    }

    fn agreed(mut ended: Vec<Result<Outcome, Failure>>) -> Result<Outcome, Failure> {
        let (ok, all) = (ended.iter().filter(|ended| ended.is_ok()).count(), ended.len());
        assert!(ok == 0 || ok == all, "{ended:?}");
        ended.swap_remove(0)
    }

    /// What the stage is told, with `over` laid over the common recipe.
    pub(super) fn table(&self, over: &Value) -> (Parameters, Settings) {
        let mut table = self.common.clone();
        overlay(&mut table, over);
        let split = |inside: bool| -> Value {
            let operational = |key: &str| ["fsdp", "ddp", "dist_env"].contains(&key);
            let entries = table.as_object().unwrap().iter().filter(|(key, _)| operational(key) == inside);
            Value::Object(entries.map(|(k, v)| (k.clone(), v.clone())).collect())
        };
        (serde_json::from_value(split(false)).unwrap(), serde_json::from_value(split(true)).unwrap())
    }

    fn work(&self, name: &str, over: &Value, interrupted: bool) -> Work<Train> {
        let mut table = self.common.clone();
        overlay(&mut table, over);
        let (parameters, settings) = self.table(over);
        let own = || self.model.to_string_lossy().into_owned();
        let source = ResolvedSource {
            kind: SourceKind::Path,
            location: table["model"]["pretrained_model_name_or_path"].as_str().map_or_else(own, str::to_owned),
            commit: None,
            parts: Vec::new(),
            digest: String::new(),
        };
        let mut sources = BTreeMap::from([("model".to_owned(), source.clone())]);
        if let Some(from) = table["checkpoint"]["restore_from"].as_str() {
            sources.insert("restore_from".to_owned(), ResolvedSource { location: from.to_owned(), ..source });
        }
        let inputs = [("shards", "bucket"), ("captions", "encode")];
        let events = Events::to(Box::new(std::io::sink()));
        if interrupted {
            events.interrupt();
        }
        Work {
            parameters,
            settings,
            request: RunRequest {
                contract: CONTRACT,
                parameters: Value::Null,
                base_dir: self.dir.path().to_owned(),
                sources,
                inputs: inputs.map(|(name, folder)| (name.to_owned(), self.dir.path().join(folder))).into(),
                output: self.output(name),
                scratch: self.dir.path().join("scratch"),
                previous: Vec::new(),
                memo: None,
                device: "cpu".to_owned(),
                threads: 1,
            },
            events,
        }
    }

    /// (step, sample) → loss of a run.
    pub(super) fn losses(&self, name: &str) -> BTreeMap<(i64, String), f32> {
        let rows: Vec<Loss> = tables::read(&self.output(name).join("losses.parquet")).unwrap();
        let count = rows.len();
        let losses: BTreeMap<_, _> = rows.into_iter().map(|row| ((row.step, row.sample_id), row.loss)).collect();
        assert_eq!(losses.len(), count, "a sample comes twice in a step");
        losses
    }

    pub(super) fn steps(&self, name: &str) -> Vec<Step> {
        tables::read(&self.output(name).join("steps.parquet")).unwrap()
    }

    /// Every tensor of a checkpoint's file.
    pub(super) fn tensors(&self, name: &str, file: &str) -> BTreeMap<String, Tensor> {
        let weights = Weights::file(&self.output(name).join(file)).unwrap();
        weights.names().map(|key| (key.to_owned(), weights.tensor(key).unwrap())).collect()
    }

    /// Names of the checkpoints, oldest first.
    pub(super) fn checkpoints(&self, name: &str) -> Vec<String> {
        let found = crate::checkpoint::finished(&self.output(name)).unwrap();
        found.into_iter().map(|c| c.path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    }
}

fn write_captions(dir: &Path, captions: &[String], inputs: &[TextInput]) {
    const TOKENS: i32 = 8;
    let folder = dir.join("encode/captions");
    fs_err::create_dir_all(&folder).unwrap();
    let encoders = inputs.iter().map(|input| (input.encoder.to_owned(), "test".to_owned())).collect();
    let meta = TextMeta { encoders, max_tokens: TOKENS as u32 };
    let mut writer = CaptionsWriter::create(&folder.join("part-00000.parquet"), &meta).unwrap();
    let bytes = |text: &str, encoder: &str, n: i64| -> Vec<u8> {
        let values = Stream::new(2, &[text.into(), encoder.into()]).normals(n as usize);
        values.into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()
    };
    for text in captions {
        for TextInput { encoder, width, pooled } in inputs {
            let row = Caption {
                caption_digest: caption_digest(text),
                text: text.clone(),
                encoder: (*encoder).to_owned(),
                tokens: TOKENS,
                width: *width as i32,
                text_tokens: 3,
                max_tokens: TOKENS,
                item_key: String::new(),
                embedding: (!pooled).then(|| bytes(text, encoder, i64::from(TOKENS) * width)),
                pooled: pooled.then(|| bytes(text, encoder, *width)),
            };
            writer.push(row).unwrap();
        }
    }
    writer.finish().unwrap();
}

/// Lays `over` over `under`; what it sets to null is gone.
fn overlay(under: &mut Value, over: &Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            under.retain(|key, _| !over.get(key).is_some_and(Value::is_null));
            for (key, value) in over.iter().filter(|(_, value)| !value.is_null()) {
                overlay(under.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (under, over) => *under = over.clone(),
    }
}

/// Largest difference relative to the largest value, over all tensors.
pub(super) fn difference(a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>) -> f64 {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    let of = |(a, b): (&Tensor, &Tensor)| {
        let scale = a.abs().max().double_value(&[]).max(1e-12);
        (a - b).abs().max().double_value(&[]) / scale
    };
    a.values().zip(b.values()).map(of).fold(0.0, f64::max)
}

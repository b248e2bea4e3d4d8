//! Runs of the stage on small data sets with the model `flux-tiny`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use encode::{Encode, Parameters, Settings};
use media::Picture;
use serde_json::{Value, json};
use stage::{CONTRACT, Event, Events, Failure, Outcome, ResolvedSource, RunRequest, SourceKind, Stage, Work};
use tables::{Sample, caption_digest};
use tempfile::TempDir;

/// The model of all these tests.
pub(crate) fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures/flux-tiny")
}

/// A file of the goldens that `tools/fixtures/encoded.py` writes.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// A picture with detail, a function of its size and `seed`.
pub(crate) fn picture(width: u32, height: u32, seed: u32) -> Picture {
    let value = |x: u32, y: u32, c: u32| ((x * (3 + c) + y * (5 + seed) + c * 70 + seed * 31) % 256) as u8;
    let rgb = (0..height).flat_map(|y| (0..width).flat_map(move |x| (0..3).map(move |c| value(x, y, c)))).collect();
    Picture { width, height, rgb }
}

/// A row as `ingest` writes it.
pub(crate) fn sample(picture: &Picture, caption: &str) -> Sample {
    raw(media::encode_png(picture, &[]).unwrap(), picture.width, picture.height, caption)
}

/// A row with any bytes.
pub(crate) fn raw(bytes: Vec<u8>, width: u32, height: u32, caption: &str) -> Sample {
    let digest = store::Digest::of_bytes(&bytes).to_string();
    let sample_id = digest[..16].to_owned();
    Sample {
        source: format!("{sample_id}.png"),
        sample_id,
        media: "png".into(),
        width: width as i32,
        height: height as i32,
        frames: 1,
        fps: None,
        caption: caption.into(),
        digest,
        bytes,
    }
}

/// One run.
pub(crate) struct Run {
    pub(crate) folder: TempDir,
    pub(crate) result: Result<Outcome, Failure>,
    pub(crate) events: Vec<Event>,
}

impl Run {
    pub(crate) fn output(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    pub(crate) fn outcome(&self) -> &Outcome {
        self.result.as_ref().unwrap_or_else(|failure| panic!("{failure:?}"))
    }

    pub(crate) fn warnings(&self) -> Vec<&str> {
        let text = |event: &'_ Event| match event {
            Event::Warning { message } => Some(message.clone()),
            _ => None,
        };
        self.events.iter().filter_map(text).map(|text| &*text.leak()).collect()
    }

    /// Writes the manifest that the runner would: the artifact, as later runs are offered it.
    pub(crate) fn publish(&self) -> PathBuf {
        let file = |(path, bytes): (&String, &Vec<u8>)| json!({"path": path, "bytes": bytes.len(), "digest": store::Digest::of_bytes(bytes)});
        let files: Vec<_> = self.files().iter().map(file).collect();
        let none = store::Digest::of_bytes(b"");
        let manifest = json!({
            "schema": store::SCHEMA, "stage": "encode", "kind": "encoded", "key": none, "digest": none, "files": files,
            "material": {"schema": store::SCHEMA, "stage": "encode", "version": 1, "parameters": null, "sources": {}, "inputs": {}},
            "sources": {}, "inputs": {}, "ledger": null, "info": null, "summary": "", "warnings": [], "seconds": 0.0,
        });
        fs_err::write(self.output().join("manifest.json"), manifest.to_string()).unwrap();
        self.output()
    }

    /// Latents and captions that were encoded, not taken over.
    pub(crate) fn made_anew(&self) -> (u64, u64) {
        let new = |what: &str| self.outcome().info["new"][what].as_u64().unwrap();
        (new("latents"), new("captions"))
    }

    /// Path → bytes of every file made.
    pub(crate) fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let output = self.output();
        let names = store::files_matching(&output, &[]).unwrap();
        let names = names.into_iter().filter(|name| name != "manifest.json");
        names.map(|name| (name.clone(), fs_err::read(output.join(&name)).unwrap())).collect()
    }
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs the stage on `samples` with `extra` parameters.
pub(crate) fn run(samples: Vec<Sample>, extra: Value) -> Run {
    run_with(samples, extra, Settings::default(), 1, |_| {})
}

/// As [`run`], with operational settings.
pub(crate) fn run_with(
    samples: Vec<Sample>,
    extra: Value,
    settings: Settings,
    threads: usize,
    before: impl Fn(&Events),
) -> Run {
    run_in_world(&World::default(), samples, extra, settings, threads, before)
}

/// What there is before a run.
pub(crate) struct World {
    pub(crate) model: PathBuf,
    /// See [`RunRequest::previous`].
    pub(crate) previous: Vec<PathBuf>,
}

impl Default for World {
    fn default() -> Self {
        Self { model: model(), previous: Vec::new() }
    }
}

pub(crate) fn run_in_world(
    world: &World,
    samples: Vec<Sample>,
    extra: Value,
    settings: Settings,
    threads: usize,
    before: impl Fn(&Events),
) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("ingest");
    tables::write(&input.join("samples/part-00000.parquet"), samples).unwrap();
    let mut parameters = json!({"model": world.model, "max_pixels": 8192, "max_sequence_length": 32});
    parameters.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let source = ResolvedSource {
        kind: SourceKind::Path,
        location: world.model.to_string_lossy().into_owned(),
        commit: None,
        parts: Vec::new(),
        digest: "unused".into(),
    };
    let sink = Sink::default();
    let events = Events::to(Box::new(sink.clone()));
    before(&events);
    fs_err::create_dir_all(folder.path().join("out")).unwrap();
    let work = Work::<Encode> {
        parameters: serde_json::from_value::<Parameters>(parameters.clone()).unwrap(),
        settings,
        request: RunRequest {
            contract: CONTRACT,
            parameters,
            base_dir: folder.path().into(),
            sources: [("model".to_owned(), source)].into(),
            inputs: [("samples".to_owned(), input)].into(),
            output: folder.path().join("out"),
            scratch: folder.path().join("scratch"),
            previous: world.previous.clone(),
            memo: None,
            device: "cpu".into(),
            threads,
        },
        events,
    };
    let result = Encode::run(&work);
    let bytes = sink.0.lock().unwrap().clone();
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let events = lines.map(|line| serde_json::from_slice(line).unwrap()).collect();
    Run { folder, result, events }
}

/// Digest of a caption, as rows name it.
pub(crate) fn digest(caption: &str) -> String {
    caption_digest(caption)
}

//! Runs of the stage on the fixtures.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use generate::{Generate, Settings};
use media::Picture;
use serde_json::{Value, json};
use stage::{CONTRACT, Event, Events, Failure, Outcome, ResolvedSource, RunRequest, SourceKind, Stage, Work};
use tempfile::TempDir;

/// A model folder of the fixtures.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures").join(name)
}

/// The settings and the picture of a golden that `tools/fixtures/pictures.py` wrote.
pub(crate) fn golden(name: &str) -> (Value, Picture) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let cases: Value = serde_json::from_slice(&fs_err::read(folder.join("pictures.json")).unwrap()).unwrap();
    (cases[name].clone(), read(&folder.join(format!("{name}.png"))))
}

/// A picture file.
pub(crate) fn read(path: &Path) -> Picture {
    media::decode(&fs_err::read(path).unwrap(), [255; 3]).unwrap()
}

/// Largest difference of any value of two pictures of one size.
pub(crate) fn difference(a: &Picture, b: &Picture) -> u8 {
    assert_eq!((a.width, a.height), (b.width, b.height));
    a.rgb.iter().zip(&b.rgb).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
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

    /// The pictures, in order.
    pub(crate) fn pictures(&self) -> Vec<Picture> {
        let names = self.outcome().info["pictures"].as_array().unwrap().clone();
        names.iter().map(|name| read(&self.output().join(name.as_str().unwrap()))).collect()
    }
}

/// A run to be described.
pub(crate) struct Setup {
    /// Model folder.
    pub(crate) model: PathBuf,
    /// The `train` artifact, if there is one.
    pub(crate) checkpoint: Option<PathBuf>,
    /// Parameters beside the model.
    pub(crate) parameters: Value,
    /// Operational settings.
    pub(crate) settings: Settings,
    /// Something to do to the events before the run.
    pub(crate) before: fn(&Events),
}

impl Setup {
    pub(crate) fn new(model: PathBuf, parameters: Value) -> Self {
        Self { model, checkpoint: None, parameters, settings: Settings::default(), before: |_| {} }
    }

    /// The run that should draw a golden, and that golden.
    pub(crate) fn golden(name: &str) -> (Self, Picture) {
        let (case, picture) = golden(name);
        let model = fixture(case["model"].as_str().unwrap());
        let mut parameters = json!({"prompts": [case["prompt"]]});
        let fields = parameters.as_object_mut().unwrap();
        for (key, value) in case.as_object().unwrap() {
            match key.as_str() {
                "prompt" | "model" => {}
                "lora" => drop(fields.insert(key.clone(), json!(model.join(value.as_str().unwrap())))),
                _ => drop(fields.insert(key.clone(), value.clone())),
            }
        }
        (Self::new(model, parameters), picture)
    }

    pub(crate) fn run(&self) -> Run {
        let folder = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(folder.path().join("out")).unwrap();
        let mut parameters = self.parameters.clone();
        parameters["model"] = json!(self.model);
        let source = |path: &Path| ResolvedSource {
            kind: SourceKind::Path,
            location: path.to_string_lossy().into_owned(),
            commit: None,
            parts: Vec::new(),
            digest: format!("digest of {}", path.display()),
        };
        let mut sources = std::collections::BTreeMap::from([("model".to_owned(), source(&self.model))]);
        if let Some(lora) = parameters["lora"].as_str() {
            sources.insert("lora".to_owned(), source(Path::new(lora)));
        }
        let sink = Sink::default();
        let events = Events::to(Box::new(sink.clone()));
        (self.before)(&events);
        let work = Work::<Generate> {
            parameters: serde_json::from_value(parameters.clone()).unwrap(),
            settings: self.settings.clone(),
            request: RunRequest {
                contract: CONTRACT,
                parameters,
                base_dir: folder.path().into(),
                sources,
                inputs: self.checkpoint.iter().map(|path| ("checkpoint".to_owned(), path.clone())).collect(),
                output: folder.path().join("out"),
                scratch: folder.path().join("scratch"),
                previous: Vec::new(),
                memo: None,
                device: "cpu".into(),
                threads: 1,
            },
            events,
        };
        let result = Generate::run(&work);
        let bytes = sink.0.lock().unwrap().clone();
        let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let events = lines.map(|line| serde_json::from_slice(line).unwrap()).collect();
        Run { folder, result, events }
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

/// Copies a folder.
pub(crate) fn copy(from: &Path, to: &Path) {
    for file in store::files_matching(from, &[]).unwrap() {
        let target = to.join(&file);
        fs_err::create_dir_all(target.parent().unwrap()).unwrap();
        fs_err::copy(from.join(&file), target).unwrap();
    }
}

//! Pictures, data sets, and the stage as a function.

use std::collections::BTreeMap;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use image::{ExtendedColorType, ImageFormat};
use ingest::{Ingest, Parameters, Settings};
use serde_json::{Value, json};
use stage::{CONTRACT, Checked, Events, Failure, Outcome, ResolvedSource, RunRequest, SourceKind, Stage, Work};
use tables::{Reject, Sample};

/// A picture that `seed` tells from others.
pub(crate) fn picture(seed: u8, format: ImageFormat) -> Vec<u8> {
    let rgb: Vec<u8> = (0..3 * 24 * 16).map(|i| (i as u8).wrapping_mul(seed | 1).wrapping_add(seed)).collect();
    let mut out = Cursor::new(Vec::new());
    image::write_buffer_with_format(&mut out, &rgb, 24, 16, ExtendedColorType::Rgb8, format).unwrap();
    out.into_inner()
}

pub(crate) fn png(seed: u8) -> Vec<u8> {
    picture(seed, ImageFormat::Png)
}

/// A folder for one test.
pub(crate) struct World(tempfile::TempDir);

impl World {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        self.0.path().join(inside)
    }

    pub(crate) fn write(&self, inside: &str, bytes: impl AsRef<[u8]>) -> &Self {
        let path = self.path(inside);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, bytes).unwrap();
        self
    }

    pub(crate) fn check(&self, parameters: Value) -> Checked {
        let request = stage::CheckRequest::new(parameters.clone(), self.0.path());
        let parameters: Parameters = serde_json::from_value(parameters).unwrap();
        Ingest::check(&parameters, &Settings::default(), &request)
    }

    /// Runs on a local data set, by the source that `check` names.
    pub(crate) fn run(&self, parameters: Value) -> Result<Ran, Failure> {
        self.run_with(parameters, json!({}))
    }

    pub(crate) fn run_with(&self, parameters: Value, settings: Value) -> Result<Ran, Failure> {
        self.run_on(parameters, settings, Vec::new(), &Log::default())
    }

    /// As [`World::run`]; `meanwhile` is done when the first row is refused.
    pub(crate) fn run_while(
        &self,
        parameters: Value,
        meanwhile: impl FnOnce() + Send + 'static,
    ) -> Result<Ran, Failure> {
        let log = Log { meanwhile: Arc::new(Mutex::new(Some(Box::new(meanwhile)))), ..Log::default() };
        self.run_on(parameters, json!({}), Vec::new(), &log)
    }

    /// As [`World::run`], of the files that `parts` count.
    pub(crate) fn run_counting(&self, parameters: Value, parts: Vec<String>) -> Result<Ran, Failure> {
        self.run_on(parameters, json!({}), parts, &Log::default())
    }

    fn run_on(&self, parameters: Value, settings: Value, parts: Vec<String>, log: &Log) -> Result<Ran, Failure> {
        let checked = self.check(parameters.clone());
        assert_eq!(checked.problems, [], "{parameters}");
        let location = checked.sources[0].location.clone();
        let source = ResolvedSource { kind: SourceKind::Path, location, commit: None, parts, digest: String::new() };
        let output = self.0.path().join("artifact");
        let _ = fs_err::remove_dir_all(&output);
        fs_err::create_dir_all(&output).unwrap();
        let work = Work::<Ingest> {
            parameters: serde_json::from_value(parameters).unwrap(),
            settings: serde_json::from_value(settings).unwrap(),
            request: RunRequest {
                contract: CONTRACT,
                parameters: Value::Null,
                base_dir: self.0.path().to_owned(),
                sources: BTreeMap::from([("dataset".to_owned(), source)]),
                inputs: BTreeMap::new(),
                output: output.clone(),
                scratch: self.0.path().join("scratch"),
                previous: Vec::new(),
                memo: None,
                device: "cpu".to_owned(),
                threads: 2,
            },
            events: Events::to(Box::new(log.clone())),
        };
        let outcome = Ingest::run(&work)?;
        assert!(outcome.ledger.balances(), "{:?}", outcome.ledger);
        let samples: Vec<Sample> = tables::read(&output.join("samples")).unwrap();
        let rejects: Vec<Reject> = tables::read(&output.join("rejects.parquet")).unwrap();
        assert_eq!(outcome.ledger.out, samples.len() as u64);
        assert_eq!(outcome.ledger.rejected, rejects.len() as u64);
        assert_eq!(log.rejected(), rejects.iter().map(|r| r.source.clone()).collect::<Vec<_>>());
        Ok(Ran { outcome, samples, rejects })
    }
}

/// What a run made.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) outcome: Outcome,
    pub(crate) samples: Vec<Sample>,
    pub(crate) rejects: Vec<Reject>,
}

impl Ran {
    /// Source and caption of each sample.
    pub(crate) fn captions(&self) -> Vec<(&str, &str)> {
        self.samples.iter().map(|s| (s.source.as_str(), s.caption.as_str())).collect()
    }

    /// Source and reason of each reject.
    pub(crate) fn reasons(&self) -> Vec<(&str, &str)> {
        self.rejects.iter().map(|r| (r.source.as_str(), r.reason.as_str())).collect()
    }

    pub(crate) fn ids(&self) -> Vec<&str> {
        self.samples.iter().map(|s| s.sample_id.as_str()).collect()
    }
}

/// Events of a run, and what is done at the first refusal.
#[derive(Clone, Default)]
pub(crate) struct Log {
    written: Arc<Mutex<Vec<u8>>>,
    meanwhile: Arc<Mutex<Option<Meanwhile>>>,
}

type Meanwhile = Box<dyn FnOnce() + Send>;

impl Log {
    /// Items of the `rejected` events.
    fn rejected(&self) -> Vec<String> {
        let bytes = self.written.lock().unwrap();
        let events = bytes.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        let events = events.map(|line| serde_json::from_slice::<Value>(line).unwrap());
        events.filter(|e| e["event"] == "rejected").map(|e| e["item"].as_str().unwrap().to_owned()).collect()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.windows(10).any(|word| word == b"\"rejected\"")
            && let Some(meanwhile) = self.meanwhile.lock().unwrap().take()
        {
            meanwhile();
        }
        self.written.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes a Parquet file in the way of `datasets`: a struct of `bytes` and `path`, and a text column.
pub(crate) fn write_parquet(
    path: &Path,
    image: &str,
    caption: &str,
    rows: &[(Option<Vec<u8>>, Option<&str>, Option<&str>)],
) {
    use ::parquet::arrow::ArrowWriter;
    use ::parquet::file::properties::WriterProperties;
    use arrow::array::{ArrayRef, BinaryArray, RecordBatch, StringArray, StructArray};
    use arrow::datatypes::{DataType, Field};
    let bytes: ArrayRef = Arc::new(rows.iter().map(|row| row.0.as_deref()).collect::<BinaryArray>());
    let paths: ArrayRef = Arc::new(rows.iter().map(|row| row.1).collect::<StringArray>());
    let field = |name: &str, kind| Arc::new(Field::new(name, kind, true));
    let pictures =
        StructArray::from(vec![(field("bytes", DataType::Binary), bytes), (field("path", DataType::Utf8), paths)]);
    let captions: ArrayRef = Arc::new(rows.iter().map(|row| row.2).collect::<StringArray>());
    let batch = RecordBatch::try_from_iter_with_nullable([
        (image, Arc::new(pictures) as ArrayRef, true),
        (caption, captions, true),
    ])
    .unwrap();
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(2)).build();
    let mut writer =
        ArrowWriter::try_new(fs_err::File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

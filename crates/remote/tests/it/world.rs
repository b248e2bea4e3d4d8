//! Two caches, a way between them, and artifacts to send.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use remote::testing::{Line, S3};
use remote::{Error, Remote};
use serde_json::{Value, json};
use store::{Artifact, Cache, Digest, Finished, Lookup, Manifest, Material, SCHEMA};

/// Where the artifacts go by.
pub(crate) enum Place {
    Folder(PathBuf),
    S3 { server: &'static S3, line: Line, bucket: String },
}

/// One server for all tests of this process.
static SERVER: OnceLock<Option<S3>> = OnceLock::new();
/// Buckets of it so far.
static BUCKETS: AtomicUsize = AtomicUsize::new(0);

impl Place {
    /// Replaces an object, or removes it.
    pub(crate) fn set(&self, object: &str, bytes: Option<&[u8]>) {
        match (self, bytes) {
            (Self::Folder(folder), Some(bytes)) => fs_err::write(folder.join(object), bytes).unwrap(),
            (Self::Folder(folder), None) => fs_err::remove_file(folder.join(object)).unwrap(),
            (Self::S3 { server, bucket, .. }, Some(bytes)) => server.put(&format!("/{bucket}/team/{object}"), bytes),
            (Self::S3 { server, bucket, .. }, None) => server.delete(&format!("/{bucket}/team/{object}")),
        }
    }

    pub(crate) fn get(&self, object: &str) -> Vec<u8> {
        match self {
            Self::Folder(folder) => fs_err::read(folder.join(object)).unwrap(),
            Self::S3 { server, bucket, .. } => server.get(&format!("/{bucket}/team/{object}")),
        }
    }

    pub(crate) fn remote(&self) -> Remote {
        match self {
            Self::Folder(folder) => Remote::open(&format!("file://{}", folder.display())).unwrap(),
            Self::S3 { line, bucket, .. } => s3(line.port(), bucket),
        }
    }
}

pub(crate) fn s3(port: u16, bucket: &str) -> Remote {
    let settings = [
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_ACCESS_KEY_ID", "test".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
    ];
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value));
    Remote::open_with(&format!("s3://{bucket}/team/"), settings).unwrap()
}

pub(crate) struct World {
    folder: tempfile::TempDir,
    pub(crate) place: Place,
    pub(crate) theirs: Cache,
    pub(crate) ours: Cache,
}

impl World {
    fn new(place: impl FnOnce(&Path) -> Place) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cache = |name: &str| Cache::open(&folder.path().join(name)).unwrap();
        let (theirs, ours) = (cache("theirs"), cache("ours"));
        Self { place: place(folder.path()), theirs, ours, folder }
    }

    pub(crate) fn folder() -> Self {
        Self::new(|folder| {
            let shared = folder.join("shared");
            fs_err::create_dir(&shared).unwrap();
            Place::Folder(shared)
        })
    }

    /// `None`: there is no server, which was said.
    pub(crate) fn s3() -> Option<Self> {
        let server = SERVER.get_or_init(|| S3::start(Path::new(env!("CARGO_TARGET_TMPDIR")))).as_ref()?;
        let bucket = format!("box-{}", BUCKETS.fetch_add(1, Ordering::Relaxed));
        server.make_bucket(&bucket);
        let line = Line::to(server.port());
        Some(Self::new(|_| Place::S3 { server, line, bucket }))
    }

    pub(crate) fn all() -> Vec<Self> {
        std::iter::once(Self::folder()).chain(Self::s3()).collect()
    }

    /// A further cache.
    pub(crate) fn another(&self, name: &str) -> Cache {
        Cache::open(&self.folder.path().join(name)).unwrap()
    }
}

/// An artifact of files by path.
pub(crate) fn make(cache: &Cache, n: u32, files: &[(&str, Vec<u8>)]) -> Artifact {
    let material = Material {
        schema: SCHEMA,
        stage: "demo".to_owned(),
        version: 1,
        parameters: json!({ "n": n }),
        sources: BTreeMap::new(),
        inputs: BTreeMap::new(),
    };
    let staging = cache.stage_work("demo", &material.key(), false).unwrap();
    for (path, bytes) in files {
        let path = staging.out.join(path);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, bytes).unwrap();
    }
    let finished = Finished {
        kind: "things".to_owned(),
        material,
        sources: BTreeMap::new(),
        inputs: BTreeMap::new(),
        measured: Vec::new(),
        ledger: Value::Null,
        info: Value::Null,
        summary: "made there".to_owned(),
        warnings: Vec::new(),
        seconds: 1.5,
    };
    cache.publish(&staging, finished).unwrap()
}

/// Bytes that no two places share.
pub(crate) fn bytes(seed: u32, count: usize) -> Vec<u8> {
    let mut state = u64::from(seed) << 32 | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    (0..count.div_ceil(4)).flat_map(|_| next().to_le_bytes()).take(count).collect()
}

pub(crate) fn quiet(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

pub(crate) fn pull(remote: &Remote, cache: &Cache, key: &Digest) -> Result<Artifact, Error> {
    let manifest = remote.manifest("demo", key)?.expect("the remote has it");
    remote.pull(cache, manifest, &quiet)
}

pub(crate) fn object(digest: &Digest) -> String {
    format!("objects/{}/{digest}", &digest.to_string()[..2])
}

/// The artifact, every file of it read.
pub(crate) fn whole(cache: &Cache, manifest: &Manifest) -> Artifact {
    match cache.verify("demo", &manifest.key) {
        Lookup::Hit(artifact) => *artifact,
        other => panic!("{other:?}"),
    }
}

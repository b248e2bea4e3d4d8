//! Items that need not be made again: rows of earlier artifacts and of unfinished tries, found by their keys.
//!
//! A file is hashed before a row of it counts, so that nothing damaged is taken over. Files of unfinished tries are named by
//! their digest; those of artifacts are listed in the manifest.

use std::collections::{BTreeSet, HashMap};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use stage::{Failure, RunRequest};
use store::{Digest, Manifest};
use tables::{
    Caption, CaptionsWriter, ItemKey, Latent, LatentMeta, LatentsWriter, Location, Row, TableReader, TextMeta,
};

use crate::unusable;

/// A file of new rows is closed after so many bytes, or so much time: what a kill may cost.
const PART_BYTES: usize = 64 << 20;
const PART_TIME: Duration = Duration::from_secs(1);

/// A table of items.
pub(crate) trait Table {
    /// Folder, in an artifact and in the scratch folder.
    const FOLDER: &str;
    /// A row, which has an `item_key`.
    type Row: Row;
    /// What its files say about all their rows.
    type Meta: PartialEq + Clone;
    /// Writes a file.
    type Writer;

    fn meta(path: &Path) -> tables::Result<Self::Meta>;
    fn create(path: &Path, meta: &Self::Meta) -> tables::Result<Self::Writer>;
    fn push(writer: &mut Self::Writer, row: Self::Row) -> tables::Result<()>;
    fn finish(writer: Self::Writer) -> tables::Result<()>;
}

/// Latents.
pub(crate) struct Latents;
/// Embeddings of captions.
pub(crate) struct Captions;

macro_rules! table {
    ($table:ident, $folder:literal, $row:ty, $meta:ty, $writer:ty) => {
        impl Table for $table {
            const FOLDER: &str = $folder;
            type Row = $row;
            type Meta = $meta;
            type Writer = $writer;

            fn meta(path: &Path) -> tables::Result<$meta> {
                <$meta>::read(path)
            }
            fn create(path: &Path, meta: &$meta) -> tables::Result<$writer> {
                <$writer>::create(path, meta)
            }
            fn push(writer: &mut $writer, row: $row) -> tables::Result<()> {
                writer.push(row)
            }
            fn finish(writer: $writer) -> tables::Result<()> {
                writer.finish().map(drop)
            }
        }
    };
}
table!(Latents, "latents", Latent, LatentMeta, LatentsWriter);
table!(Captions, "captions", Caption, TextMeta, CaptionsWriter);

/// A file with rows that count.
pub(crate) struct File {
    /// Where it lies.
    pub(crate) path: PathBuf,
    /// Its rows.
    pub(crate) table: TableReader,
    /// Whether it is of an artifact: in the order of its rows, and not to be changed.
    pub(crate) published: bool,
}

/// A row that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Number of the file.
    pub(crate) file: usize,
    /// Place in it.
    pub(crate) at: Location,
}

/// All rows of a table that are there.
pub(crate) struct Stock<T> {
    /// Files with rows that count.
    pub(crate) files: Vec<File>,
    items: HashMap<Digest, Place>,
    table: PhantomData<T>,
}

impl<T: Table> Stock<T> {
    /// Looks for the `wanted` items in earlier artifacts and unfinished tries. Rows of the latter are first moved into
    /// `scratch`, the folder of this try, if there is one.
    pub(crate) fn gather(
        previous: &[PathBuf],
        scratch: Option<&Path>,
        wanted: &BTreeSet<Digest>,
    ) -> Result<Self, Failure> {
        let mut stock = Self { files: Vec::new(), items: HashMap::new(), table: PhantomData };
        let mut files = Vec::new();
        let tries = previous.iter().filter(|folder| manifest(folder).is_none()).map(|folder| folder.join(T::FOLDER));
        match scratch.map(|scratch| scratch.join(T::FOLDER)) {
            Some(own) => {
                fs_err::create_dir_all(&own)?;
                tries.for_each(|folder| salvage(&folder, &own));
                remove_halves(&own);
                files.extend(parts(&own));
            }
            None => files.extend(tries.flat_map(|folder| parts(&folder))),
        }
        let mut files: Vec<_> = files.into_iter().map(|(path, digest)| (path, digest, false)).collect();
        for (folder, manifest) in previous.iter().filter_map(|folder| Some((folder, manifest(folder)?))) {
            let of_table = manifest.files.into_iter().filter(|file| below(T::FOLDER, &file.path));
            files.extend(of_table.map(|file| (folder.join(file.path), file.digest, true)));
        }
        let mut seen = BTreeSet::new();
        for (path, digest, published) in files {
            if stock.items.len() == wanted.len() {
                break;
            }
            if seen.insert(digest) {
                stock.add(path, Some(digest), published, wanted);
            }
        }
        Ok(stock)
    }

    /// Counts the rows of a file that are wanted and not there yet, unless it is damaged.
    fn add(&mut self, path: PathBuf, digest: Option<Digest>, published: bool, wanted: &BTreeSet<Digest>) {
        let Ok(table) = TableReader::open(&path) else { return };
        let keys = table.rows::<ItemKey>().map_while(Result::ok);
        let keys = keys.filter_map(|(at, row)| Some((row.item_key.parse::<Digest>().ok()?, at)));
        let new: Vec<_> = keys.filter(|(key, _)| wanted.contains(key) && !self.items.contains_key(key)).collect();
        let sound = || digest.is_none_or(|digest| Digest::of_file(&path).is_ok_and(|found| found == digest));
        if new.is_empty() || !sound() {
            return;
        }
        let file = self.files.len();
        self.items.extend(new.into_iter().map(|(key, at)| (key, Place { file, at })));
        self.files.push(File { path, table, published });
    }

    /// Where an item is.
    pub(crate) fn find(&self, key: &Digest) -> Option<Place> {
        self.items.get(key).copied()
    }

    /// What the rows say about themselves; none if nothing is there.
    pub(crate) fn meta(&self) -> Result<Option<T::Meta>, Failure> {
        self.files.first().map(|file| T::meta(&file.path).map_err(unusable)).transpose()
    }

    /// Adds the rows of a file that was just written.
    pub(crate) fn learn(&mut self, path: PathBuf, wanted: &BTreeSet<Digest>) {
        self.add(path, None, false, wanted);
    }
}

/// Whether a file lies in a folder or below it.
fn below(folder: &str, path: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

fn manifest(folder: &Path) -> Option<Manifest> {
    serde_json::from_slice(&fs_err::read(folder.join("manifest.json")).ok()?).ok()
}

/// Whole files of a scratch folder with their digests.
fn parts(folder: &Path) -> Vec<(PathBuf, Digest)> {
    let Ok(entries) = fs_err::read_dir(folder) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let mut found: Vec<_> = paths.filter_map(|path| digest_in(&path).map(|digest| (path, digest))).collect();
    found.sort();
    found
}

fn remove_halves(folder: &Path) {
    let Ok(entries) = fs_err::read_dir(folder) else { return };
    let halves = entries.flatten().map(|entry| entry.path()).filter(|path| digest_in(path).is_none());
    // One that cannot be removed is in nobody's way.
    halves.for_each(|path| drop(fs_err::remove_file(path)));
}

/// The digest that a whole file is named by.
fn digest_in(path: &Path) -> Option<Digest> {
    path.file_name()?.to_str()?.strip_suffix(".parquet")?.parse().ok()
}

/// Gives the files of another try's scratch folder a second name in ours, where nobody removes them.
fn salvage(from: &Path, to: &Path) {
    let Ok(entries) = fs_err::read_dir(from) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if let (Some(_), Some(name)) = (digest_in(&path), path.file_name()) {
            // One that is gone, or on a disk without hard links, is made again.
            let _ = fs_err::hard_link(&path, to.join(name));
        }
    }
}

/// New rows on their way to the disk, where they survive a kill.
pub(crate) struct Parts<'a, T: Table> {
    folder: PathBuf,
    meta: T::Meta,
    open: Option<(T::Writer, Instant, usize)>,
    wanted: &'a BTreeSet<Digest>,
}

impl<'a, T: Table> Parts<'a, T> {
    pub(crate) fn new(request: &RunRequest, meta: T::Meta, wanted: &'a BTreeSet<Digest>) -> Self {
        Self { folder: request.scratch.join(T::FOLDER), meta, open: None, wanted }
    }

    /// Appends rows that were made together, and closes the file if it is due.
    pub(crate) fn push(&mut self, stock: &mut Stock<T>, rows: Vec<T::Row>) -> Result<(), Failure> {
        for row in rows {
            let (mut writer, since, bytes) = if let Some(open) = self.open.take() {
                open
            } else {
                (T::create(&self.half(), &self.meta).map_err(unusable)?, Instant::now(), 0)
            };
            let bytes = bytes + row.size();
            T::push(&mut writer, row).map_err(unusable)?;
            self.open = Some((writer, since, bytes));
        }
        let due =
            self.open.as_ref().is_some_and(|(_, since, bytes)| *bytes >= PART_BYTES || since.elapsed() >= PART_TIME);
        if due { self.close(stock) } else { Ok(()) }
    }

    /// Closes the file, whose rows count from now on.
    pub(crate) fn close(&mut self, stock: &mut Stock<T>) -> Result<(), Failure> {
        let Some((writer, ..)) = self.open.take() else { return Ok(()) };
        T::finish(writer).map_err(unusable)?;
        let digest = Digest::of_file(&self.half()).map_err(Failure::from_error)?;
        let whole = self.folder.join(format!("{digest}.parquet"));
        fs_err::rename(self.half(), &whole)?;
        stock.learn(whole, self.wanted);
        Ok(())
    }

    fn half(&self) -> PathBuf {
        self.folder.join("next.parquet")
    }
}

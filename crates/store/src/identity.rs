//! Identity of things outside the cache: equal contents, equal digest, wherever they lie and whoever reads them.
//!
//! Hashing is done once per state of a file, as told by (device, inode, size, mtime, ctime).

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spec::glob::{matches_any, takes_out};

use crate::{Cache, Digest, Error, Memo, Result};

/// A file of a source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Path relative to the source's root, with `/`.
    pub path: String,
    /// Identity of its contents: a BLAKE3 digest here, the Hub's own hash for Hub files.
    pub digest: String,
}

/// What a source was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Digest of `entries`.
    pub digest: Digest,
    /// Sorted by path.
    pub entries: Vec<Entry>,
}

impl Identity {
    /// Of a set of files.
    pub fn of_entries(mut entries: Vec<Entry>) -> Self {
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        // The digest of their canonical JSON, without a tree of values for each of perhaps a million files.
        let text = |text: &str| Value::from(text).to_string();
        let mut form = String::from("[");
        for (index, Entry { path, digest }) in entries.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            form.extend([comma, "{\"digest\":", &text(digest), ",\"path\":", &text(path), "}"]);
        }
        form.push(']');
        Self { digest: Digest::of_bytes(form.as_bytes()), entries }
    }
}

/// State of a file, by which a remembered digest is believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    pub(crate) dev: u64,
    pub(crate) ino: u64,
    pub(crate) size: u64,
    pub(crate) mtime: i128,
    pub(crate) ctime: i128,
}

impl FileStamp {
    /// Of a file, symbolic links followed.
    pub fn of(path: &Path) -> Result<Self> {
        Ok(Self::of_metadata(&fs_err::metadata(path)?))
    }

    /// Of a file whose metadata was asked for.
    pub fn of_metadata(meta: &Metadata) -> Self {
        let time = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            size: meta.size(),
            mtime: time(meta.mtime(), meta.mtime_nsec()),
            ctime: time(meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// When it was written last, in nanoseconds of the file system's time.
    pub fn mtime(&self) -> i128 {
        self.mtime
    }

    /// Whether a digest that was remembered at `written` for a file in this state can be believed: a file that changed
    /// just before may change again without a new stamp.
    pub fn settled(&self, written: i128) -> bool {
        self.ctime + RACY.as_nanos() as i128 <= written
    }
}

/// Time stamps of files are no finer than this.
pub const RACY: std::time::Duration = std::time::Duration::from_millis(50);

/// Files of a source, sorted by path.
type Known = Vec<(String, FileStamp, Digest)>;

impl Memo {
    /// Identity of the files under `path` that match `globs`, or of `path` itself if it is a file.
    pub fn identify(&self, path: &Path, globs: &[String]) -> Result<Identity> {
        let meta = match fs_err::metadata(path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::Missing { path: path.to_owned() });
            }
            Err(error) => return Err(error.into()),
        };
        let files = if meta.is_dir() {
            stamped(path, globs)?
        } else {
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| Error::Name { path: path.to_owned() })?;
            vec![(name.to_owned(), FileStamp::of_metadata(&meta))]
        };
        if files.is_empty() {
            return Err(Error::Empty { path: path.to_owned(), globs: globs.to_vec() });
        }
        let root = if meta.is_dir() { path } else { path.parent().unwrap_or(path) };

        // Asked by inode, so that a renamed folder is known at once.
        let question = json!({"dev": meta.dev(), "ino": meta.ino(), "globs": globs});
        let written = self.written("files", &question);
        let known: Known = self.recall("files", &question).unwrap_or_default();
        let mut now = Known::with_capacity(files.len());
        let mut hashed = false;
        for (file, stamp) in files {
            let before = known.binary_search_by(|(name, ..)| name.cmp(&file)).map(|index| &known[index]);
            let digest = match before {
                Ok((_, seen, digest)) if *seen == stamp && stamp.settled(written) => *digest,
                _ => {
                    hashed = true;
                    Digest::of_file(&root.join(&file))?
                }
            };
            now.push((file, stamp, digest));
        }
        if hashed || now.len() != known.len() {
            self.remember("files", &question, &now);
        }
        drop(known);
        let entries = now.into_iter().map(|(path, _, digest)| Entry { path, digest: digest.to_string() }).collect();
        Ok(Identity::of_entries(entries))
    }
}

impl Cache {
    /// See [`Memo::identify`].
    pub fn identify(&self, path: &Path, globs: &[String]) -> Result<Identity> {
        self.memo.identify(path, globs)
    }

    /// Keeps the list of files behind an identity, so that a later change can be told file by file.
    pub fn keep_entries(&self, identity: &Identity) {
        let question = json!(identity.digest);
        if !self.memo.holds("trees", &question) {
            self.remember("trees", &question, &identity.entries);
        }
    }

    /// The list kept by [`Cache::keep_entries`].
    pub fn entries_of(&self, digest: &Digest) -> Option<Vec<Entry>> {
        self.recall("trees", &json!(digest))
    }
}

/// Files below `folder` that match `globs`, sorted, relative to it with `/`.
pub fn files_matching(folder: &Path, globs: &[String]) -> Result<Vec<String>> {
    Ok(stamped(folder, globs)?.into_iter().map(|(file, _)| file).collect())
}

/// As [`files_matching`], each with its state.
fn stamped(folder: &Path, globs: &[String]) -> Result<Vec<(String, FileStamp)>> {
    let mut files = Vec::new();
    walk(folder, "", globs, &mut BTreeSet::new(), &mut files)?;
    files.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(files)
}

/// All files below `folder`, symbolic links followed, each real folder visited once per way into it.
fn walk(
    folder: &Path,
    prefix: &str,
    globs: &[String],
    above: &mut BTreeSet<(u64, u64)>,
    files: &mut Vec<(String, FileStamp)>,
) -> Result<()> {
    let meta = fs_err::metadata(folder)?;
    let here = (meta.dev(), meta.ino());
    if !above.insert(here) {
        return Ok(());
    }
    for entry in fs_err::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let relative = format!("{prefix}{}", name.to_string_lossy());
        let none_below = takes_out(globs, &relative);
        if name.to_str().is_none() && !none_below {
            return Err(Error::Name { path: entry.path() });
        }
        // The folder says what is a link; asking for the rest by name in the open folder is cheaper than by path.
        let linked = entry.file_type()?.is_symlink();
        let meta = if linked { fs_err::metadata(entry.path()) } else { entry.metadata() };
        match meta {
            Ok(meta) if meta.is_dir() && none_below => {}
            Ok(meta) if meta.is_dir() => walk(&entry.path(), &format!("{relative}/"), globs, above, files)?,
            Ok(meta) if meta.is_file() && matches_any(globs, &relative) => {
                files.push((relative, FileStamp::of_metadata(&meta)));
            }
            // A dangling link has no contents.
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(_) if none_below && !matches_any(globs, &relative) => {}
            Err(error) => return Err(error.into()),
        }
    }
    above.remove(&here);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn setup() -> (tempfile::TempDir, Cache, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(&folder.path().join("cache")).unwrap();
        let data = folder.path().join("data");
        fs_err::create_dir_all(data.join("sub")).unwrap();
        fs_err::write(data.join("a.png"), "one").unwrap();
        fs_err::write(data.join("sub/b.png"), "two").unwrap();
        fs_err::write(data.join("note.txt"), "three").unwrap();
        (folder, cache, data)
    }

    #[test]
    fn an_identity_is_the_digest_of_its_entries_in_canonical_form() {
        let entry = |path: &str| Entry { path: path.to_owned(), digest: format!("of {path}") };
        for paths in [&[][..], &["a"], &["b\"\n.png", "a\\é", "c"]] {
            let identity = Identity::of_entries(paths.iter().map(|path| entry(path)).collect());
            assert_eq!(identity.digest, Digest::of_json(&json!(identity.entries)));
        }
    }

    #[test]
    fn moved_renamed_and_touched_sources_are_the_same() {
        let (folder, cache, data) = setup();
        let before = cache.identify(&data, &[]).unwrap();
        let moved = folder.path().join("elsewhere");
        fs_err::rename(&data, &moved).unwrap();
        let later = fs_err::metadata(moved.join("a.png")).unwrap().modified().unwrap() + Duration::from_mins(1);
        fs_err::File::options().write(true).open(moved.join("a.png")).unwrap().file().set_modified(later).unwrap();
        assert_eq!(cache.identify(&moved, &[]).unwrap(), before);
    }

    #[test]
    fn any_counted_file_changes_the_identity_and_no_other() {
        let (_folder, cache, data) = setup();
        let globs = ["**/*.png".to_owned()];
        let before = cache.identify(&data, &globs).unwrap();
        assert_eq!(before.entries.iter().map(|e| e.path.as_str()).collect::<Vec<_>>(), ["a.png", "sub/b.png"]);
        fs_err::write(data.join("note.txt"), "other").unwrap();
        assert_eq!(cache.identify(&data, &globs).unwrap(), before);
        // Same size, written at once: the clock of the file system may not have moved.
        fs_err::write(data.join("sub/b.png"), "TWO").unwrap();
        let after = cache.identify(&data, &globs).unwrap();
        assert_ne!(after.digest, before.digest);
        fs_err::rename(data.join("a.png"), data.join("c.png")).unwrap();
        assert_ne!(cache.identify(&data, &globs).unwrap().digest, after.digest);
    }

    #[test]
    fn what_is_taken_out_is_not_looked_into_and_changes_no_identity() {
        let (_folder, cache, data) = setup();
        let visible = ["!.*".to_owned(), "!*/.*".to_owned()];
        let before = cache.identify(&data, &[]).unwrap();
        assert_eq!(cache.identify(&data, &visible).unwrap(), before, "nothing is hidden yet");
        fs_err::create_dir_all(data.join("sub/.store")).unwrap();
        fs_err::write(data.join(".DS_Store"), "x").unwrap();
        fs_err::write(data.join("sub/.store/c.png"), "y").unwrap();
        std::os::unix::fs::symlink(".loop", data.join(".loop")).unwrap();
        assert!(cache.identify(&data, &[]).is_err(), "a link to itself cannot be followed");
        assert_eq!(cache.identify(&data, &visible).unwrap(), before);
        // What a visible link leads to is read, wherever it lies.
        std::os::unix::fs::symlink(".store/c.png", data.join("sub/c.png")).unwrap();
        let linked = cache.identify(&data, &visible).unwrap();
        assert_eq!(linked.entries.iter().filter(|entry| entry.path == "sub/c.png").count(), 1);
        fs_err::write(data.join("sub/.store/c.png"), "z").unwrap();
        assert_ne!(cache.identify(&data, &visible).unwrap(), linked);
    }

    #[test]
    fn a_file_is_its_name_and_contents() {
        let (folder, cache, data) = setup();
        let one = cache.identify(&data.join("a.png"), &[]).unwrap();
        fs_err::copy(data.join("a.png"), folder.path().join("a.png")).unwrap();
        assert_eq!(cache.identify(&folder.path().join("a.png"), &[]).unwrap(), one);
    }

    #[test]
    fn nothing_to_identify_is_an_error() {
        let (_folder, cache, data) = setup();
        let empty = cache.identify(&data, &["*.parquet".to_owned()]).unwrap_err();
        assert!(empty.to_string().ends_with("has no file that matches `*.parquet`"), "{empty}");
        assert!(matches!(cache.identify(&data.join("x"), &[]), Err(Error::Missing { .. })));
    }

    #[test]
    fn a_folder_that_contains_itself_ends() {
        let (_folder, cache, data) = setup();
        std::os::unix::fs::symlink("..", data.join("sub/up")).unwrap();
        assert_eq!(cache.identify(&data, &["*.png".to_owned()]).unwrap().entries.len(), 2);
    }
}

//! Whether a file of the cache holds what the Hub states. It is hashed once per state of it, as told by (device, inode, size,
//! mtime, ctime); what came out is kept beside the blobs, under `checked/`.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::cache::{RemoteFile, replace};
use crate::transfer::content_hash;

/// Time stamps of files are no finer than this: one that changed just before may change again without a new stamp.
const RACY: Duration = Duration::from_millis(50);
/// Files of more bytes than this are worth a short wait, so that they need not be hashed again.
const WORTH_A_WAIT: u64 = 256 << 20;

/// What lies at the place of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing, or something of another length.
    Nothing,
    /// The file, or one whose identity is no hash.
    Sound,
    /// Something else: its hash.
    Damaged(String),
}

/// State of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    dev: u64,
    ino: u64,
    size: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl Stamp {
    /// Of a file, symbolic links followed; `None` if there is none.
    fn of(path: &Path) -> Option<Self> {
        let meta = fs_err::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
        let (mtime, ctime) = ((meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec()));
        Some(Self { dev: meta.dev(), ino: meta.ino(), size: meta.size(), mtime, ctime })
    }

    /// Whether a record that was written then can be believed for a file in this state.
    fn settled(&self, record: &Path) -> bool {
        let nanos = |(seconds, nanos): (i64, i64)| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        Self::of(record).is_some_and(|record| nanos(self.ctime) + RACY.as_nanos() as i128 <= nanos(record.mtime))
    }
}

/// What a file was when it was hashed last.
#[derive(Debug, Serialize, Deserialize)]
struct Checked {
    stamp: Stamp,
    /// Not the file's identity where a mirror made that up.
    hash: String,
}

fn recall(record: &Path) -> Option<Checked> {
    serde_json::from_slice(&fs_err::read(record).ok()?).ok()
}

/// Looks at the file, and into it unless it was in this very state when it was hashed last.
pub(crate) fn look(path: &Path, record: &Path, file: &RemoteFile, stop: &AtomicBool) -> Result<Found, Error> {
    let Some(stamp) = Stamp::of(path).filter(|stamp| stamp.size == file.size) else { return Ok(Found::Nothing) };
    let known = recall(record);
    if known.as_ref().is_some_and(|known| known.stamp == stamp) && stamp.settled(record) {
        return Ok(Found::Sound);
    }
    let Some(hash) = content_hash(path, file, stop)? else { return Ok(Found::Sound) };
    let accepted = || known.is_some_and(|known| known.hash == hash);
    if !hash.eq_ignore_ascii_case(&file.identity) && !accepted() {
        return Ok(Found::Damaged(hash));
    }
    write(record, &Checked { stamp, hash });
    Ok(Found::Sound)
}

/// Notes what a file that was just fetched was found to be.
pub(crate) fn note(path: &Path, record: &Path, hash: String) {
    if let Some(stamp) = Stamp::of(path) {
        write(record, &Checked { stamp, hash });
    }
}

fn write(record: &Path, checked: &Checked) {
    let Ok(bytes) = serde_json::to_vec(checked) else { return };
    // A cache that may only be read is hashed each time, no more.
    let written = replace(record, &bytes);
    if written.is_ok() && checked.stamp.size > WORTH_A_WAIT && !checked.stamp.settled(record) {
        std::thread::sleep(RACY + RACY / 4);
        let _ = replace(record, &bytes);
    }
}

//! Whether a file of the cache holds what the Hub states. It is hashed once per state of it, as told by (device, inode, size,
//! mtime, ctime); what came out is kept beside the blobs, under `checked/`.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};
use store::{FileStamp, RACY};

use crate::Error;
use crate::cache::{RemoteFile, replace};
use crate::transfer::content_hash;

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

/// State of a file; `None` if there is none.
fn stamp(path: &Path) -> Option<FileStamp> {
    fs_err::metadata(path).ok().filter(std::fs::Metadata::is_file).map(|meta| FileStamp::of_metadata(&meta))
}

/// Whether a record can be believed for a file in this state.
fn settled(file: &FileStamp, record: &Path) -> bool {
    stamp(record).is_some_and(|record| file.settled(record.mtime()))
}

/// What a file was when it was hashed last.
#[derive(Debug, Serialize, Deserialize)]
struct Checked {
    stamp: FileStamp,
    /// Not the file's identity where a mirror made that up.
    hash: String,
}

fn recall(record: &Path) -> Option<Checked> {
    serde_json::from_slice(&fs_err::read(record).ok()?).ok()
}

/// Looks at the file, and into it unless it was in this very state when it was hashed last.
pub(crate) fn look(path: &Path, record: &Path, file: &RemoteFile, stop: &AtomicBool) -> Result<Found, Error> {
    let Some(stamp) = stamp(path).filter(|stamp| stamp.size() == file.size) else { return Ok(Found::Nothing) };
    let known = recall(record);
    if known.as_ref().is_some_and(|known| known.stamp == stamp) && settled(&stamp, record) {
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
    if let Some(stamp) = stamp(path) {
        write(record, &Checked { stamp, hash });
    }
}

fn write(record: &Path, checked: &Checked) {
    let Ok(bytes) = serde_json::to_vec(checked) else { return };
    // A cache that may only be read is hashed each time, no more.
    let written = replace(record, &bytes);
    if written.is_ok() && checked.stamp.size() > WORTH_A_WAIT && !settled(&checked.stamp, record) {
        std::thread::sleep(RACY + RACY / 4);
        let _ = replace(record, &bytes);
    }
}

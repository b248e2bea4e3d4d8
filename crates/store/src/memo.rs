//! Small remembered answers. Losing one costs time; a damaged one counts as lost, and one that cannot be written is not
//! remembered.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::publish::write_whole;
use crate::{Digest, FileStamp};

/// A folder of answers; stages are given it, too.
#[derive(Debug, Clone)]
pub struct Memo {
    folder: PathBuf,
}

impl Memo {
    /// The answers in `folder`, which need not exist.
    pub fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The answer remembered for `question`, if any.
    pub fn recall<T: DeserializeOwned>(&self, kind: &str, question: &Value) -> Option<T> {
        serde_json::from_slice(self.sound(kind, question)?.get(65..)?).ok()
    }

    /// Whether an answer is remembered.
    pub(crate) fn holds(&self, kind: &str, question: &Value) -> bool {
        self.sound(kind, question).is_some()
    }

    /// The bytes of an answer. A bit that flipped in one would be a wrong key: the first line is the digest of the rest.
    fn sound(&self, kind: &str, question: &Value) -> Option<Vec<u8>> {
        let bytes = fs_err::read(self.path(kind, question)).ok()?;
        let (digest, body) = (bytes.get(..64)?, bytes.get(65..)?);
        (digest == Digest::of_bytes(body).to_string().as_bytes()).then_some(bytes)
    }

    /// Remembers an answer, if the disk lets it. It is not forced to the disk: after a power failure it may be lost.
    pub fn remember(&self, kind: &str, question: &Value, answer: &impl Serialize) {
        let Ok(body) = serde_json::to_vec(answer) else { return };
        let mut bytes = Digest::of_bytes(&body).to_string().into_bytes();
        bytes.push(b'\n');
        bytes.extend(body);
        // Another question next time, no more.
        let _ = write_whole(&self.path(kind, question), &bytes, false);
    }

    /// When an answer was remembered, in the file system's time; long ago if there is none.
    pub(crate) fn written(&self, kind: &str, question: &Value) -> i128 {
        FileStamp::of(&self.path(kind, question)).map_or(i128::MIN, |stamp| stamp.mtime)
    }

    fn path(&self, kind: &str, question: &Value) -> PathBuf {
        self.folder.join(kind).join(format!("{}.json", Digest::of_json(question)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_flipped_bit_anywhere_is_a_lost_answer() {
        let folder = tempfile::tempdir().unwrap();
        let memo = Memo::at(folder.path());
        let question = json!("steps?");
        memo.remember("check", &question, &json!({"steps": 8}));
        let path = memo.path("check", &question);
        let good = fs_err::read(&path).unwrap();
        assert_eq!(memo.recall::<Value>("check", &question), Some(json!({"steps": 8})));
        for bit in 0..8 * good.len() {
            // The line break between digest and answer says nothing.
            if bit / 8 == 64 {
                continue;
            }
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            fs_err::write(&path, bad).unwrap();
            assert_eq!(memo.recall::<Value>("check", &question), None, "bit {bit}");
        }
        fs_err::write(&path, &good[..20]).unwrap();
        assert_eq!(memo.recall::<Value>("check", &question), None);
    }

    #[test]
    fn a_memo_that_cannot_be_written_is_no_failure() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("memo"), "a file in the way").unwrap();
        let memo = Memo::at(&folder.path().join("memo"));
        memo.remember("check", &json!(1), &2);
        assert_eq!(memo.recall::<u32>("check", &json!(1)), None);
    }
}

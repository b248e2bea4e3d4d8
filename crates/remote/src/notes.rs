//! Small answers that are shared beside the artifacts. Losing one costs little; a damaged one counts as lost.

use object_store::{ObjectStoreExt, PutPayload};
use serde::Serialize;
use serde::de::DeserializeOwned;
use store::Digest;

use crate::{Remote, Result};

impl Remote {
    /// The answer noted for a question, if any.
    pub fn recall<T: DeserializeOwned>(&self, kind: &str, question: &Digest) -> Result<Option<T>> {
        let Some(bytes) = self.read_small(&self.note_path(kind, question))? else { return Ok(None) };
        // The first line is the digest of the rest.
        let Some((digest, body)) = bytes.get(..64).zip(bytes.get(65..)) else { return Ok(None) };
        let sound = digest == Digest::of_bytes(body).to_string().as_bytes();
        Ok(sound.then(|| serde_json::from_slice(body).ok()).flatten())
    }

    /// Notes an answer, over an older one.
    pub fn note(&self, kind: &str, question: &Digest, answer: &impl Serialize) -> Result<()> {
        let body = serde_json::to_vec(answer).map_err(std::io::Error::from)?;
        let mut bytes = Digest::of_bytes(&body).to_string().into_bytes();
        bytes.push(b'\n');
        bytes.extend(body);
        let path = self.note_path(kind, question);
        self.runtime
            .block_on(self.store.put(&path, PutPayload::from(bytes)))
            .map(|_| ())
            .map_err(|error| self.failed(&path, &error))
    }

    fn note_path(&self, kind: &str, question: &Digest) -> object_store::path::Path {
        self.at(&["notes", kind, &format!("{question}.json")])
    }
}

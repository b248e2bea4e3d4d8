//! BLAKE3 digests, and the one JSON form that is digested.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Error, Result};

/// A BLAKE3 digest, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// Of bytes in memory.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Of a file's contents, read in pieces.
    pub fn of_file(path: &Path) -> Result<Self> {
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(fs_err::File::open(path)?)?;
        Ok(Self(*hasher.finalize().as_bytes()))
    }

    /// Of a value's [`canonical_json`].
    pub fn of_json(value: &Value) -> Self {
        Self::of_bytes(canonical_json(value).as_bytes())
    }

    /// The first 12 digits, for people.
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refused = || Error::Digest(text.to_owned());
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(refused());
        }
        blake3::Hash::from_hex(text).map(|hash| Self(*hash.as_bytes())).map_err(|_| refused())
    }
}

impl TryFrom<String> for Digest {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// JSON with sorted keys and no white space: equal values, equal text.
pub fn canonical_json(value: &Value) -> String {
    let mut text = String::new();
    write_canonical(value, &mut text);
    text
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(object) => {
            // `serde_json` may keep insertion order, depending on what other crates ask of it.
            let mut entries: Vec<_> = object.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            out.push('{');
            for (index, (key, value)) in entries.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
                write_canonical(value, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn digests_are_blake3() {
        // Test vector of the BLAKE3 paper's reference implementation: the empty input.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(Digest::of_bytes(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of_bytes(b""));
        assert!("AF13".parse::<Digest>().is_err());
    }

    #[test]
    fn canonical_form_ignores_the_order_of_keys_and_nothing_else() {
        let a: Value = serde_json::from_str(r#"{"b": [1, 2.0, "x\n"], "a": {"d": null, "c": true}}"#).unwrap();
        assert_eq!(canonical_json(&a), r#"{"a":{"c":true,"d":null},"b":[1,2.0,"x\n"]}"#);
        assert_ne!(canonical_json(&json!(1)), canonical_json(&json!(1.0)));
    }

    #[test]
    fn a_file_is_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let bytes = vec![7; 3 << 20];
        fs_err::write(&path, &bytes).unwrap();
        assert_eq!(Digest::of_file(&path).unwrap(), Digest::of_bytes(&bytes));
    }
}

//! What an artifact says of itself: what was asked (the key's material) and what came out (files and their digest).

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Digest;
use crate::cache::MANIFEST;

/// Version of the manifest and of the key's material; part of every key.
pub const SCHEMA: u32 = 2;

/// All that a result depends on, readable. Its digest is the key. Has no path, host, user, time, thread count or device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Material {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The verb.
    pub stage: String,
    /// The stage's step version.
    pub version: u32,
    /// Semantic parameters, defaults filled in.
    pub parameters: Value,
    /// Source name → identity of its contents.
    pub sources: BTreeMap<String, Digest>,
    /// Input name → digest of the artifact that came in: what it is, not how it was made.
    pub inputs: BTreeMap<String, Digest>,
}

impl Material {
    /// The key.
    pub fn key(&self) -> Digest {
        Digest::of_json(&json!(self))
    }
}

/// A file of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Path inside the artifact, with `/`.
    pub path: String,
    /// Size.
    pub bytes: u64,
    /// Of its contents.
    pub digest: Digest,
    /// Whether it holds measurements, which differ from run to run, and so is left out of the artifact's digest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub measured: bool,
}

/// Where a source was when the artifact was made; for people, in no key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceRecord {
    /// Path or Hub id.
    pub location: String,
    /// Commit on the Hub.
    pub commit: Option<String>,
}

/// Which artifact an input was; for lineage, in no key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputRecord {
    /// The stage that made it.
    pub stage: String,
    /// Its key.
    pub key: Digest,
}

/// `manifest.json` of an artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The verb.
    pub stage: String,
    /// Kind of artifact.
    pub kind: String,
    /// Digest of `material`.
    pub key: Digest,
    /// Digest of the files' paths and contents.
    pub digest: Digest,
    /// What was asked.
    pub material: Material,
    /// Sorted by path.
    pub files: Vec<FileRecord>,
    /// Source name → where it was.
    pub sources: BTreeMap<String, SourceRecord>,
    /// Input name → which artifact it was.
    pub inputs: BTreeMap<String, InputRecord>,
    /// Rows in, out, rejected, held, as the stage counted them.
    pub ledger: Value,
    /// The stage's own facts.
    pub info: Value,
    /// The stage's sentence.
    pub summary: String,
    /// What a person should know.
    pub warnings: Vec<String>,
    /// How long it took to make.
    pub seconds: f64,
    /// Digest of all the above, so that a flipped bit is no news; schema 1 had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Digest>,
}

impl Manifest {
    /// The manifest in `bytes`, if it is one of that stage and key, is as it was written, and names files that lie inside
    /// the artifact; else what is wrong.
    pub fn read(bytes: &[u8], stage: &str, key: &Digest) -> Result<Self, String> {
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| format!("its manifest cannot be read: {error}"))?;
        let asked = manifest.material.key() == *key && manifest.key == *key && manifest.stage == stage;
        let whole = Self::digest_of(&manifest.files) == manifest.digest && manifest.is_sealed();
        if !asked || !whole {
            return Err("its manifest contradicts itself".to_owned());
        }
        match manifest.files.iter().find(|file| !is_inside(&file.path)) {
            Some(file) => Err(format!("its manifest names `{}`, which is no path inside an artifact", file.path)),
            None => Ok(manifest),
        }
    }

    /// Digest of what came out: paths and contents, of measurements only the path.
    pub fn digest_of(files: &[FileRecord]) -> Digest {
        let list: Vec<_> = files.iter().map(|file| (&file.path, (!file.measured).then_some(&file.digest))).collect();
        Digest::of_json(&json!(list))
    }

    /// With its seal.
    #[must_use]
    pub(crate) fn sealed(mut self) -> Self {
        self.seal = None;
        self.seal = Some(Digest::of_json(&json!(self)));
        self
    }

    /// Whether it is as it was written.
    pub(crate) fn is_sealed(&self) -> bool {
        self.schema < 2 || self.seal == self.clone().sealed().seal
    }

    /// Sum of the files' sizes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// Whether a path stays inside the folder that it is relative to, and leaves the manifest alone.
fn is_inside(path: &str) -> bool {
    let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
    path != MANIFEST && !path.is_empty() && Path::new(path).components().all(normal)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1e6..1e6f64).prop_map(Value::from),
            "[a-z\"\\\\ é]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-z]{1,4}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    fn digests() -> impl Strategy<Value = BTreeMap<String, Digest>> {
        prop::collection::btree_map("[a-z]{1,4}", any::<u64>().prop_map(|n| Digest::of_bytes(&n.to_le_bytes())), 0..3)
    }

    fn material() -> impl Strategy<Value = Material> {
        (0..3u32, "[a-z]{1,5}", 0..3u32, value(), digests(), digests()).prop_map(
            |(schema, stage, version, parameters, sources, inputs)| Material {
                schema,
                stage,
                version,
                parameters,
                sources,
                inputs,
            },
        )
    }

    #[test]
    fn a_manifest_that_leads_out_of_its_artifact_is_refused() {
        let material: Material = serde_json::from_value(json!({
            "schema": SCHEMA, "stage": "demo", "version": 1, "parameters": {}, "sources": {}, "inputs": {},
        }))
        .unwrap();
        let key = material.key();
        let bytes = |path: &str| {
            let files = vec![FileRecord { path: path.to_owned(), bytes: 1, digest: key, measured: false }];
            let manifest = Manifest {
                schema: SCHEMA,
                stage: "demo".to_owned(),
                kind: String::new(),
                key,
                digest: Manifest::digest_of(&files),
                material: material.clone(),
                files,
                sources: BTreeMap::new(),
                inputs: BTreeMap::new(),
                ledger: Value::Null,
                info: Value::Null,
                summary: String::new(),
                warnings: Vec::new(),
                seconds: 0.0,
                seal: None,
            };
            serde_json::to_vec(&manifest.sealed()).unwrap()
        };
        for path in ["a", "a/b.c", "..a"] {
            assert!(Manifest::read(&bytes(path), "demo", &key).is_ok(), "{path}");
        }
        for path in ["", "..", "../a", "a/../../b", "/etc/passwd", "manifest.json"] {
            let refused = Manifest::read(&bytes(path), "demo", &key).unwrap_err();
            assert!(refused.contains("no path inside"), "{path}: {refused}");
        }
        let good = bytes("a");
        assert!(Manifest::read(&good, "other", &key).is_err());
        assert!(Manifest::read(&good[..good.len() - 1], "demo", &key).is_err());
    }

    /// Of schema 1, which had no seal, and of a schema to come.
    #[test]
    fn an_older_manifest_is_read_and_a_newer_one_is_cleanly_refused() {
        let text = |schema: u32, more: &str| {
            let material = json!({
                "schema": schema, "stage": "demo", "version": 1, "parameters": {"n": 1}, "sources": {}, "inputs": {},
            });
            let key = Digest::of_json(&material);
            let digest = Manifest::digest_of(&[]);
            let text = format!(
                r#"{{"schema": {schema}, "stage": "demo", "kind": "x", "key": "{key}", "digest": "{digest}",
                "material": {material}, "files": [], "sources": {{}}, "inputs": {{}}, "ledger": null, "info": null,
                "summary": "", "warnings": [], "seconds": 0.0{more}}}"#
            );
            (key, text)
        };
        let (key, old) = text(1, "");
        assert_eq!(Manifest::read(old.as_bytes(), "demo", &key).unwrap().schema, 1);
        let (key, unsealed) = text(SCHEMA, "");
        assert!(Manifest::read(unsealed.as_bytes(), "demo", &key).is_err());
        let (key, new) = text(SCHEMA + 1, r#", "colour": "red""#);
        let refused = Manifest::read(new.as_bytes(), "demo", &key).unwrap_err();
        assert!(refused.contains("cannot be read") && refused.contains("colour"), "{refused}");
    }

    proptest! {
        #[test]
        fn the_key_changes_if_and_only_if_the_material_does(a in material(), b in material()) {
            prop_assert_eq!(a.key() == b.key(), a == b);
        }

        #[test]
        fn every_field_moves_the_key(a in material(), b in material()) {
            let swaps: [fn(&mut Material, &Material); 6] = [
                |m, o| m.schema = o.schema,
                |m, o| m.stage.clone_from(&o.stage),
                |m, o| m.version = o.version,
                |m, o| m.parameters.clone_from(&o.parameters),
                |m, o| m.sources.clone_from(&o.sources),
                |m, o| m.inputs.clone_from(&o.inputs),
            ];
            for swap in swaps {
                let mut c = a.clone();
                swap(&mut c, &b);
                prop_assert_eq!(c.key() == a.key(), c == a);
            }
        }

        #[test]
        fn a_material_survives_its_manifest(a in material()) {
            let text = serde_json::to_string(&a).unwrap();
            let back: Material = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(back.key(), a.key());
        }
    }
}

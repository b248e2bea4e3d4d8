//! The layering of `crates/README.md`, in code: every edge between our crates is in a table, and the left side never
//! reaches libtorch.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use crate::support::{finish, workspace};

/// Crate → crates of ours it may use in the product (tests may use more).
const ALLOWED: &[(&str, &[&str])] = &[
    ("spec", &[]),
    ("store", &["spec"]),
    ("stage", &["spec", "store"]),
    ("tables", &["spec", "store"]),
    ("media", &[]),
    ("video", &["media"]),
    ("hub", &["spec", "store"]),
    ("query", &["spec", "tables"]),
    ("report", &["query", "media"]),
    ("remote", &["store"]),
    ("pipeline", &["spec", "store", "stage", "hub", "query", "report", "remote"]),
    ("torch", &[]),
    ("nn", &["torch"]),
    ("models", &["nn", "torch"]),
    ("diffusion", &["nn", "torch"]),
    ("comm", &["spec", "torch"]),
    ("parallel", &["spec", "comm", "nn", "torch"]),
    ("ingest", &["spec", "store", "stage", "tables", "media", "video", "hub"]),
    ("encode", &["spec", "store", "stage", "tables", "media", "video", "hub", "nn", "models", "torch"]),
    ("bucket", &["spec", "store", "stage", "tables", "query"]),
    ("train", &["spec", "store", "stage", "tables", "media", "hub", "nn", "models", "diffusion", "parallel", "torch"]),
    ("generate", &["spec", "store", "stage", "tables", "media", "video", "hub", "nn", "models", "diffusion", "torch"]),
    ("datasets", &["media", "video"]),
    ("mini", &["media", "nn", "models", "torch"]),
    ("cli-tests", &[]),
    ("parity-tests", &[]),
];

const TORCH_FREE: &[&str] = &[
    "spec", "store", "stage", "tables", "media", "video", "hub", "query", "report", "remote", "pipeline", "ingest",
    "bucket", "datasets",
];

/// Package → normal dependencies (by package name), over the whole graph.
fn edges() -> BTreeMap<String, BTreeSet<String>> {
    // Only this platform's crates: a build has fetched those, and the test needs no network.
    let platform = ["--filter-platform", "x86_64-unknown-linux-gnu"];
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--offline", "--locked"]).args(platform).current_dir(workspace());
    let out = finish(&mut cargo).expect(0);
    let metadata: serde_json::Value = serde_json::from_str(&out.stdout).expect("cargo metadata prints JSON");
    let name_of: BTreeMap<&str, &str> = metadata["packages"]
        .as_array()
        .expect("packages")
        .iter()
        .map(|p| (p["id"].as_str().expect("id"), p["name"].as_str().expect("name")))
        .collect();
    let mut edges = BTreeMap::<String, BTreeSet<String>>::new();
    for node in metadata["resolve"]["nodes"].as_array().expect("nodes") {
        let from = name_of[node["id"].as_str().expect("id")];
        let to = edges.entry(from.to_owned()).or_default();
        for dep in node["deps"].as_array().expect("deps") {
            let normal = dep["dep_kinds"].as_array().expect("kinds").iter().any(|kind| kind["kind"].is_null());
            if normal {
                to.insert(name_of[dep["pkg"].as_str().expect("pkg")].to_owned());
            }
        }
    }
    edges
}

#[test]
fn every_edge_between_our_crates_is_in_the_table() {
    let edges = edges();
    let ours: BTreeSet<&str> = ALLOWED.iter().map(|(name, _)| *name).collect();
    for (name, allowed) in ALLOWED {
        let actual: BTreeSet<&str> = edges[*name].iter().map(String::as_str).filter(|to| ours.contains(to)).collect();
        let extra: Vec<&&str> = actual.iter().filter(|to| !allowed.contains(to)).collect();
        assert!(
            extra.is_empty(),
            "`{name}` may not depend on {extra:?}: a new edge needs a line in the table and in crates/README.md"
        );
    }
}

#[test]
fn every_member_is_in_the_table() {
    let manifest = fs_err::read_to_string(workspace().join("Cargo.toml")).expect("Cargo.toml");
    let members = toml::from_str::<toml::Table>(&manifest).expect("TOML")["workspace"]["members"].clone();
    assert_eq!(members.as_array().expect("a list").len(), 5, "a new member glob needs a look at this test");
    let mut names = BTreeSet::new();
    for folder in ["crates", "stages", "tests"] {
        for entry in fs_err::read_dir(workspace().join(folder)).expect("a folder") {
            let manifest = entry.expect("an entry").path().join("Cargo.toml");
            if manifest.exists() {
                let table: toml::Table = fs_err::read_to_string(manifest).expect("a manifest").parse().expect("TOML");
                names.insert(table["package"]["name"].as_str().expect("a name").to_owned());
            }
        }
    }
    for name in names {
        assert!(ALLOWED.iter().any(|(known, _)| *known == name), "`{name}` is not in the table of allowed edges");
    }
}

#[test]
fn the_torch_free_side_never_reaches_libtorch() {
    let edges = edges();
    for start in TORCH_FREE {
        let mut seen = BTreeSet::new();
        let mut queue = vec![(*start).to_owned()];
        while let Some(name) = queue.pop() {
            assert_ne!(name, "torch-sys", "`{start}` reaches libtorch");
            if seen.insert(name.clone()) {
                queue.extend(edges[&name].iter().cloned());
            }
        }
    }
}

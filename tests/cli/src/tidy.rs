//! Rules about the text of the repository that no compiler checks.

use std::path::{Path, PathBuf};

use crate::support::workspace;

/// Lines a source file may have; more is a second concept.
const LONGEST: usize = 600;

fn files(extensions: &[&str]) -> Vec<PathBuf> {
    fn walk(dir: &Path, extensions: &[&str], out: &mut Vec<PathBuf>) {
        for entry in fs_err::read_dir(dir).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_symlink() || ["target", "libtorch", "runs", ".git", ".pipeline"].contains(&name) {
                continue;
            }
            if path.is_dir() {
                walk(&path, extensions, out);
            } else if path.extension().and_then(|ext| ext.to_str()).is_some_and(|ext| extensions.contains(&ext)) {
                out.push(path);
            }
        }
    }
    let mut out = Vec::new();
    walk(&workspace(), extensions, &mut out);
    out.sort();
    assert!(!out.is_empty());
    out
}

#[test]
fn every_rust_file_says_what_it_is_and_holds_one_concept() {
    for path in files(&["rs"]) {
        let text = fs_err::read_to_string(&path).expect("UTF-8");
        assert!(
            text.starts_with("//!") || path.ends_with("build.rs"),
            "{}: the first line says what the file is (`//! …`)",
            path.display()
        );
        let lines = text.lines().count();
        assert!(lines <= LONGEST, "{}: {lines} lines; what is the second concept in it?", path.display());
    }
}

#[test]
fn no_file_name_says_nothing() {
    for path in files(&["rs", "py"]) {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        assert!(
            !["util", "utils", "common", "helpers", "misc", "manager", "base"].contains(&stem),
            "{}",
            path.display()
        );
    }
}

#[test]
fn paths_named_in_the_documents_exist() {
    let root = workspace();
    for document in ["README.md", "crates/README.md"] {
        let text = fs_err::read_to_string(root.join(document)).expect("a document");
        for word in text.split(['`', '(', ')', '"', ' ', '\n']) {
            let word = word.trim_end_matches(['.', ',', ';', ':']);
            let is_path = ["crates/", "stages/", "recipes/", "tests/", "tools/", "scripts/", "datasets/"]
                .iter()
                .any(|top| word.starts_with(top));
            if is_path && !word.contains(['<', '*', '…', '$']) {
                assert!(root.join(word).exists(), "{document} names `{word}`, which does not exist");
            }
        }
    }
}

/// `transparent` hands out the source of the `io::Error` instead of the error itself, and a full disk no longer tells its kind.
#[test]
fn errors_keep_the_io_error_they_wrap() {
    for path in files(&["rs"]) {
        let text = fs_err::read_to_string(&path).expect("UTF-8");
        let mut transparent = false;
        for (number, line) in text.lines().enumerate() {
            let attribute = line.trim_start().starts_with("#[");
            transparent = line.contains("#[error(transparent)]") || (transparent && attribute);
            let wraps = transparent && line.contains("io::Error") && !attribute;
            assert!(!wraps, "{}:{}: write `#[error(\"{{0}}\")]`", path.display(), number + 1);
        }
    }
}

#[test]
fn dependencies_are_declared_once_for_the_workspace() {
    for path in files(&["toml"]).into_iter().filter(|path| path.ends_with("Cargo.toml")) {
        if path == workspace().join("Cargo.toml") {
            continue;
        }
        let manifest: toml::Table = fs_err::read_to_string(&path).expect("UTF-8").parse().expect("TOML");
        for table in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for (name, value) in manifest.get(table).and_then(toml::Value::as_table).into_iter().flatten() {
                let inherited = value.get("workspace").and_then(toml::Value::as_bool) == Some(true);
                assert!(inherited, "{}: `{name}` belongs in [workspace.dependencies]", path.display());
            }
        }
    }
}

/// A model is written for one device: how it is spread over ranks is nobody's business there.
#[test]
fn no_model_speaks_of_ranks_meshes_or_collectives() {
    let spoken = "rank ranks mesh world collective comm parallel distributed shard all_gather all_reduce all_to_all \
                  reduce_scatter broadcast seam division";
    let models = workspace().join("crates/models/src");
    let sources = files(&["rs"]).into_iter().filter(|path| path.starts_with(&models)).collect::<Vec<_>>();
    assert!(sources.iter().any(|path| path.ends_with("wan.rs")));
    for path in sources {
        let text = fs_err::read_to_string(&path).expect("UTF-8");
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default().to_lowercase();
            let mut words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let found = words.find(|word| spoken.split(' ').any(|spoken| spoken == *word));
            assert!(
                found.is_none(),
                "{}:{}: a model names `{}`",
                path.display(),
                number + 1,
                found.unwrap_or_default()
            );
        }
    }
}

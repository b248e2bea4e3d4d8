//! `runs/<recipe>/<stage>`: a link that a person can follow to the current artifact.

use std::path::{Component, Path, PathBuf};

use store::replace_link;

use crate::error::Result;

/// Points `runs/<recipe>/<stage>` at the artifact; answers the link's path.
pub(crate) fn point(runs: &Path, recipe: &str, stage: &str, artifact: &Path) -> Result<PathBuf> {
    let folder = runs.join(recipe);
    let link = folder.join(stage);
    fs_err::create_dir_all(&folder)?;
    // Relative, so that a project folder can be moved as a whole.
    let target = relative(&fs_err::canonicalize(&folder)?, artifact);
    if fs_err::read_link(&link).ok().as_deref() != Some(&target) {
        replace_link(&target, &link)?;
    }
    Ok(link)
}

/// Points `runs/<recipe>/<stage>.running` at what a running stage has made so far.
pub(crate) fn point_running(runs: &Path, recipe: &str, stage: &str, work: &Path) -> Result<PathBuf> {
    point(runs, recipe, &running(stage), work)
}

/// Removes that link.
pub(crate) fn remove_running(runs: &Path, recipe: &str, stage: &str) -> Result<()> {
    match fs_err::remove_file(runs.join(recipe).join(running(stage))) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

fn running(stage: &str) -> String {
    format!("{stage}.running")
}

/// The way from one absolute folder to another.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let (from, to): (Vec<Component<'_>>, Vec<Component<'_>>) = (from.components().collect(), to.components().collect());
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    std::iter::repeat_n(Component::ParentDir, from.len() - shared).chain(to[shared..].iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_relative_and_follow_the_newest() {
        assert_eq!(relative(Path::new("/a/runs/x"), Path::new("/a/.pipeline/y")), Path::new("../../.pipeline/y"));
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in ["one", "two"] {
            fs_err::create_dir(root.join(name)).unwrap();
            let link = point(&root.join("runs"), "r", "s", &root.join(name)).unwrap();
            assert_eq!(fs_err::canonicalize(link).unwrap(), root.join(name));
        }
    }
}

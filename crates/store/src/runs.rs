//! `runs/<recipe>/<n>/`: what ran, why and how long. Knows the folders, not what is written into them.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Cache, Result};

/// Folder of one run.
#[derive(Debug, Clone)]
pub struct RunFolder {
    /// From 1.
    pub number: u64,
    /// The folder.
    pub path: PathBuf,
}

impl Cache {
    /// Makes the folder of the next run of a recipe and points `latest` at it.
    pub fn new_run(&self, recipe: &str) -> Result<RunFolder> {
        let folder = self.root().join("runs").join(recipe);
        fs_err::create_dir_all(&folder)?;
        let mut number = self.run_numbers(recipe).last().map_or(1, |last| last + 1);
        loop {
            let path = folder.join(number.to_string());
            match fs_err::create_dir(&path) {
                Ok(()) => {
                    replace_link(Path::new(&number.to_string()), &folder.join("latest"))?;
                    return Ok(RunFolder { number, path });
                }
                // Another runner was quicker.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Numbers of a recipe's runs, ascending.
    pub fn run_numbers(&self, recipe: &str) -> Vec<u64> {
        let Ok(folder) = fs_err::read_dir(self.root().join("runs").join(recipe)) else { return Vec::new() };
        let mut numbers: Vec<u64> =
            folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Records of a recipe's runs, newest first; unreadable ones are left out.
    pub fn run_records<T: DeserializeOwned>(&self, recipe: &str) -> impl Iterator<Item = T> {
        let folder = self.root().join("runs").join(recipe);
        let numbers = self.run_numbers(recipe).into_iter().rev();
        numbers.filter_map(move |number| {
            serde_json::from_slice(&fs_err::read(folder.join(number.to_string()).join("run.json")).ok()?).ok()
        })
    }

    /// Writes a run's record, whole or not at all.
    pub fn write_run_record(&self, run: &RunFolder, record: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec_pretty(record).map_err(std::io::Error::from)?;
        self.write_atomically(&run.path.join("run.json"), &text)
    }
}

/// Makes or atomically replaces a symbolic link.
pub fn replace_link(target: &Path, link: &Path) -> Result<()> {
    let name = format!(".{}-{}", link.file_name().unwrap_or_default().to_string_lossy(), std::process::id());
    let beside = link.with_file_name(name);
    let _ = fs_err::remove_file(&beside);
    fs_err::os::unix::fs::symlink(target, &beside)?;
    fs_err::rename(&beside, link)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_and_the_latest_is_linked() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        for expected in 1..=3 {
            let run = cache.new_run("tarot").unwrap();
            assert_eq!(run.number, expected);
            cache.write_run_record(&run, &expected).unwrap();
        }
        assert_eq!(cache.run_records::<u64>("tarot").collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(fs_err::read_link(cache.root().join("runs/tarot/latest")).unwrap(), Path::new("3"));
    }
}

//! `runs/<recipe>/<n>/`: what ran, why and how long. Knows the folders, not what is written into them.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::publish::write_whole;
use crate::{Cache, Digest, Result};

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

    /// Recipes that have runs, sorted.
    pub fn recipes(&self) -> Vec<String> {
        crate::cache::names(&self.root().join("runs"))
    }

    /// Record of one run, unless it cannot be read or is damaged.
    pub fn run_record<T: DeserializeOwned>(&self, recipe: &str, number: u64) -> Option<T> {
        let path = self.root().join("runs").join(recipe).join(number.to_string()).join("run.json");
        let mut record: Value = serde_json::from_slice(&fs_err::read(path).ok()?).ok()?;
        let seal = record.as_object_mut()?.remove("seal")?;
        (*seal.as_str()? == Digest::of_json(&record).to_string()).then(|| serde_json::from_value(record).ok())?
    }

    /// Records of a recipe's runs, newest first; unreadable ones are left out.
    pub fn run_records<T: DeserializeOwned>(&self, recipe: &str) -> impl Iterator<Item = T> {
        self.run_numbers(recipe).into_iter().rev().filter_map(|number| self.run_record(recipe, number))
    }

    /// Removes the folder of a run.
    pub fn remove_run(&self, recipe: &str, number: u64) -> Result<()> {
        crate::cache::remove_tree(&self.root().join("runs").join(recipe).join(number.to_string()))
    }

    /// Writes a run's record, whole or not at all. It is not forced to the disk: no result depends on it.
    pub fn write_run_record(&self, run: &RunFolder, record: &impl Serialize) -> Result<()> {
        let mut record = serde_json::to_value(record).map_err(std::io::Error::from)?;
        let seal = Digest::of_json(&record).to_string();
        if let Value::Object(fields) = &mut record {
            fields.insert("seal".to_owned(), seal.into());
        }
        let text = serde_json::to_vec_pretty(&record).map_err(std::io::Error::from)?;
        write_whole(&run.path.join("run.json"), &text, false)
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
            cache.write_run_record(&run, &serde_json::json!({"n": expected})).unwrap();
        }
        let numbers = || cache.run_records::<Value>("tarot").map(|record| record["n"].clone()).collect::<Vec<_>>();
        assert_eq!(numbers(), [3, 2, 1]);
        let path = cache.root().join("runs/tarot/2/run.json");
        let text = fs_err::read_to_string(&path).unwrap().replace("\"n\": 2", "\"n\": 3");
        fs_err::write(&path, text).unwrap();
        assert_eq!(numbers(), [3, 1], "a record whose bits flipped is no record");
        assert_eq!(fs_err::read_link(cache.root().join("runs/tarot/latest")).unwrap(), Path::new("3"));
    }
}

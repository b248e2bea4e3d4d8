//! A disk that is full or may not be written: an answer, and nothing of what was finished is lost.

use std::path::Path;
use std::process::Command;

use crate::support::{Forge, stage_line};

/// A file system of a few megabytes in a folder; gone when dropped.
struct Tiny(std::path::PathBuf);

impl Tiny {
    #[expect(clippy::print_stderr, reason = "a skipped test says so")]
    fn mount(path: &Path, options: &str) -> Option<Self> {
        fs_err::create_dir_all(path).unwrap();
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(path).output();
        if done.is_ok_and(|done| done.status.success()) {
            return Some(Self(path.to_owned()));
        }
        eprintln!("skipped: a file system cannot be mounted here");
        None
    }

    fn remount(&self, options: &str) {
        let done = Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(&self.0).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn sixteen_megabytes_are_too_few_and_what_was_finished_stays() {
    let forge = Forge::new();
    let Some(_tiny) = Tiny::mount(&forge.path(".pipeline"), "size=16m") else { return };
    forge.edit("sword.toml", "text = \"iron\"", "text = \"iron\"\nfill = 6");
    let said = forge.run(&["run", "sword.toml", "--set", "smelt.fill=40"]);
    assert_eq!(said.code, 6, "{}", said.err);
    let text = said.err.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    for part in
        ["`smelt` failed: cannot write `fill.bin`", "it needs about 4", "MB; ", " are free in ", "`pipeline gc`"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert_eq!((forge.artifacts("dig"), forge.artifacts("smelt")), (1, 0));
    assert!(forge.good(&["verify"]).out.contains("all 1 artifacts are sound"));
    forge.ran();
    forge.good(&["run", "sword.toml", "--set", "smelt.fill=2"]);
    assert_eq!(forge.ran(), ["smelt", "forge"], "what the failed try wrote was removed, what was finished kept");
}

#[test]
fn a_cache_that_may_not_be_written_answers_all_questions() {
    let forge = Forge::new();
    let Some(tiny) = Tiny::mount(&forge.path(".pipeline"), "size=16m") else { return };
    forge.good(&["run", "sword.toml"]);
    forge.ran();
    // Nothing remembered, either: the answers must be found anew and cannot be kept.
    fs_err::remove_dir_all(forge.path(".pipeline/memo")).unwrap();
    tiny.remount("ro");
    assert!(stage_line(&forge.good(&["plan", "sword.toml"]).out, "forge").contains("cached"));
    let rows = forge.good(&["sql", "sword.toml", "select stage, status from stages", "--format", "csv"]).out;
    assert_eq!(rows, "stage,status\ndig,cached\nsmelt,cached\nforge,cached\n");
    assert!(forge.good(&["run", "sword.toml"]).out.contains("nothing to do"));
    forge.good(&["show", "sword.toml"]);
    forge.good(&["verify", "sword.toml"]);
    let said = forge.run(&["run", "sword.toml", "--set", "forge.text=axe"]);
    assert_eq!(said.code, 6, "{}", said.err);
    assert!(said.err.contains("--cache DIR"), "{}", said.err);
    assert!(!said.err.contains("panicked"));
}

//! A damaged artifact is never read as good: it is named, moved aside, and made again alone.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;
use store::{Digest, FileStamp, Memo};

use crate::support::{Forge, stage_line};

const RUN: &[&str] = &["run", "sword.toml"];

/// One bit of a published file, its size and time kept.
fn flip(path: &Path) {
    let time = fs_err::metadata(path).unwrap().modified().unwrap();
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut bytes = fs_err::read(path).unwrap();
    bytes[0] ^= 4;
    fs_err::write(path, bytes).unwrap();
    fs_err::File::options().write(true).open(path).unwrap().file().set_modified(time).unwrap();
}

/// As if the bit had flipped on the disk itself: the remembered state of the file is the one it has now.
fn forget_the_change(forge: &Forge, stage: &str, good: &str) {
    std::thread::sleep(std::time::Duration::from_millis(80));
    let stamp = FileStamp::of(&forge.path("runs/sword").join(stage).join("out.txt")).unwrap();
    Memo::at(&forge.path(".pipeline/memo")).remember("sound", &json!(Digest::of_bytes(good.as_bytes())), &[stamp]);
}

#[test]
fn a_flipped_bit_is_found_before_use_and_repaired_alone() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    flip(&forge.path("runs/sword/smelt/out.txt"));
    let plan = forge.good(&["plan", "sword.toml"]);
    let line = stage_line(&plan.out, "smelt");
    assert!(
        line.contains("to run  the earlier artifact is damaged: the contents of `out.txt` are not those"),
        "{line}"
    );
    assert!(line.contains("it was moved to `.pipeline/quarantine/"), "{line}");
    let said = forge.good(RUN);
    assert!(stage_line(&said.err, "smelt").contains("`out.txt` was damaged and lies in"), "{}", said.err);
    assert_eq!(forge.ran(), ["smelt"], "the same bytes came out, so what follows stays");
    assert_eq!(forge.read("runs/sword/smelt/out.txt"), "default+iron");
}

#[test]
fn verify_reads_everything_and_names_what_is_bad() {
    let forge = Forge::new();
    forge.good(RUN);
    assert!(forge.good(&["verify", "sword.toml"]).out.contains("all 3 artifacts are sound"));
    flip(&forge.path("runs/sword/dig/out.txt"));
    forget_the_change(&forge, "dig", "iron");
    assert!(stage_line(&forge.good(&["plan", "sword.toml"]).out, "dig").contains("cached"), "no stamp tells");
    let said = forge.run(&["verify", "--cache", ".pipeline"]);
    assert_eq!(said.code, 4, "{}{}", said.out, said.err);
    assert!(stage_line(&said.out, "damaged  dig").contains("the contents of `out.txt`"), "{}", said.out);
    assert!(said.err.contains("1 of 3 artifacts are damaged") && said.err.contains("--repair"), "{}", said.err);
    forge.ran();
    forge.good(&["run", "sword.toml", "--repair"]);
    assert_eq!(forge.ran(), ["dig"]);
    forge.good(&["verify", "sword.toml", "--json"]);
}

#[test]
fn an_input_that_rotted_on_the_disk_is_made_again_before_it_is_read() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    flip(&forge.path("runs/sword/dig/out.txt"));
    forget_the_change(&forge, "dig", "iron");
    forge.good(&["run", "sword.toml", "--set", "smelt.text=hot"]);
    assert_eq!(forge.ran(), ["dig", "smelt", "forge"]);
    assert_eq!(forge.read("runs/sword/forge/out.txt"), "blade+hot+iron");
}

#[test]
fn a_dear_artifact_is_rebuilt_only_when_asked() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    let path = forge.path("runs/sword/smelt/manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    manifest["seconds"] = json!(7500.0);
    manifest.as_object_mut().unwrap().remove("seal");
    manifest["seal"] = json!(Digest::of_json(&manifest));
    fs_err::write(&path, manifest.to_string()).unwrap();
    forge.good(RUN);
    assert_eq!(forge.ran(), Vec::<String>::new(), "still whole");
    flip(&forge.path("runs/sword/smelt/out.txt"));
    let said = forge.run(RUN);
    assert_eq!((said.code, forge.ran()), (4, Vec::new()), "{}", said.err);
    assert!(said.err.contains("`smelt` took 2 h 05 min to make") && said.err.contains("--repair"), "{}", said.err);
    forge.good(&["run", "sword.toml", "--repair"]);
    assert_eq!(forge.ran(), ["smelt"]);
}

#[test]
fn a_damaged_record_or_memo_is_as_if_it_were_not_there() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    for kind in ["check", "files", "sound", "describe"] {
        for entry in fs_err::read_dir(forge.path(".pipeline/memo").join(kind)).unwrap() {
            flip(&entry.unwrap().path());
        }
    }
    flip(&forge.path(".pipeline/runs/sword/1/run.json"));
    forge.good(RUN);
    assert_eq!(forge.ran(), Vec::<String>::new());
}

#[test]
fn what_is_collected_is_a_clean_miss_and_the_latest_run_stays() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.good(&["run", "sword.toml", "--set", "dig.text=gold"]);
    forge.ran();
    let dry = forge.good(&["gc", "--dry-run"]);
    assert!(dry.out.contains("would remove 3 artifacts, 0 leftovers and 1 run record"), "{}", dry.out);
    assert_eq!(forge.artifacts("forge"), 2);
    let done: serde_json::Value = serde_json::from_str(&forge.good(&["gc", "--json"]).out).unwrap();
    assert_eq!((done["artifacts"].as_array().map(Vec::len), done["runs"].as_u64()), (Some(3), Some(1)));
    assert_eq!(forge.artifacts("forge"), 1);
    forge.good(&["run", "sword.toml", "--set", "dig.text=gold"]);
    assert_eq!(forge.ran(), Vec::<String>::new());
    let plan = forge.good(&["plan", "sword.toml"]);
    assert!(stage_line(&plan.out, "dig").contains("parameter `text` changed \"gold\" → \"iron\""), "{}", plan.out);
    forge.good(RUN);
    assert_eq!(forge.ran(), ["dig", "smelt", "forge"]);
    assert_eq!(forge.run(&["gc", "--older-than", "soon"]).code, 2);
}

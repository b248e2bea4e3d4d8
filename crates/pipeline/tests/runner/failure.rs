//! Law L3 at the runner: what failed or was stopped leaves nothing that could be taken for a result.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::Forge;

fn end(how: &str) -> (Forge, String, i32) {
    let forge = Forge::new();
    let said = forge.run(&["run", "sword.toml", "--set", &format!("smelt.{how}")]);
    assert_eq!((forge.artifacts("dig"), forge.artifacts("smelt")), (1, 0), "{}", said.err);
    assert_eq!(forge.ran(), ["dig", "smelt"], "nothing runs after a failure");
    assert!(!said.err.contains("panicked"));
    (forge, said.err, said.code)
}

#[test]
fn a_failing_stage_publishes_nothing_and_is_quoted() {
    let (forge, report, code) = end("end=fail");
    assert_eq!(code, 4, "the stage's own code");
    for part in ["`smelt` failed: the furnace is cold", "help: light it", "smelt.log", "about to fail"] {
        assert!(report.contains(part), "{part} is not in\n{report}");
    }
    let record: serde_json::Value = serde_json::from_str(&forge.read(".pipeline/runs/sword/latest/run.json")).unwrap();
    assert_eq!((record["exit"].as_i64(), record["stages"][1]["status"].as_str()), (Some(4), Some("failed")));

    forge.good(&["run", "sword.toml"]);
    assert_eq!(forge.ran(), ["smelt", "forge"], "what was finished is kept");
}

#[test]
fn a_crash_names_the_signal() {
    let (_, report, code) = end("end=crash");
    assert_eq!(code, 1);
    assert!(report.contains("`pipeline-smelt` crashed: killed by signal 11 (SIGSEGV)"), "{report}");
}

#[test]
fn an_end_without_a_word_is_a_failure() {
    let (_, report, code) = end("end=mute");
    assert_eq!(code, 1);
    assert!(report.contains("`pipeline-smelt` ended without saying `done`"), "{report}");
}

#[test]
fn rows_that_do_not_add_up_fail_the_stage() {
    let (_, report, code) = end("unbalanced=true");
    assert_eq!(code, 1);
    assert!(report.contains("`smelt` does not account for every row: 3 in ≠ 2 out + 0 rejected + 0 held"), "{report}");
}

#[test]
fn a_source_that_changes_while_it_is_read_gives_no_artifact() {
    let forge = Forge::new();
    let said = forge.run(&["run", "sword.toml", "--set", "dig.end=edit"]);
    assert_eq!((said.code, forge.artifacts("dig")), (4, 0), "{}", said.err);
    assert!(said.err.contains("changed while `dig` was reading it"), "{}", said.err);
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap().success());
}

fn interrupted(signals: &[&str]) -> (Forge, crate::support::Said) {
    let forge = Forge::new();
    let child = forge.start(&["run", "sword.toml", "--set", "smelt.seconds=60"]);
    let log = forge.path(".pipeline/runs/sword/1/smelt.log");
    forge.wait_for(|| fs_err::read_to_string(&log).is_ok_and(|text| text.contains("hello")));
    for name in signals {
        signal(name, child.id());
        std::thread::sleep(Duration::from_millis(150));
    }
    let began = Instant::now();
    let said = forge.finish(child);
    assert!(began.elapsed() < Duration::from_secs(20));
    (forge, said)
}

#[test]
fn an_interrupt_stops_the_stage_at_a_clean_point() {
    for name in ["INT", "TERM"] {
        let (forge, said) = interrupted(&[name]);
        assert_eq!((said.code, forge.artifacts("smelt")), (130, 0), "{}", said.err);
        assert!(said.err.contains("kept: `dig`"), "{}", said.err);
        let record: serde_json::Value = serde_json::from_str(&forge.read(".pipeline/runs/sword/1/run.json")).unwrap();
        assert_eq!((record["exit"].as_i64(), record["stages"][1]["status"].as_str()), (Some(130), Some("interrupted")));
        forge.ran();
        forge.good(&["run", "sword.toml"]);
        assert_eq!(forge.ran(), ["smelt", "forge"]);
    }
}

#[test]
fn a_second_interrupt_kills() {
    let forge = Forge::new();
    // Deaf to the first signal.
    forge.edit("bin/pipeline-smelt", "stop.append(1)", "None");
    let child = forge.start(&["run", "sword.toml", "--set", "smelt.seconds=60"]);
    let log = forge.path(".pipeline/runs/sword/1/smelt.log");
    forge.wait_for(|| fs_err::read_to_string(&log).is_ok_and(|text| text.contains("hello")));
    signal("INT", child.id());
    std::thread::sleep(Duration::from_millis(300));
    signal("INT", child.id());
    let said = forge.finish(child);
    assert_eq!((said.code, forge.artifacts("smelt")), (130, 0), "{}", said.err);
}

#[test]
fn a_killed_runner_leaves_no_artifact_and_the_next_one_goes_on() {
    let forge = Forge::new();
    let mut child = forge.start(&["run", "sword.toml", "--set", "smelt.seconds=2"]);
    let log = forge.path(".pipeline/runs/sword/1/smelt.log");
    forge.wait_for(|| fs_err::read_to_string(&log).is_ok_and(|text| text.contains("hello")));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(forge.artifacts("smelt"), 0);
    forge.ran();
    forge.good(&["run", "sword.toml"]);
    assert_eq!(forge.ran(), ["smelt", "forge"]);
}

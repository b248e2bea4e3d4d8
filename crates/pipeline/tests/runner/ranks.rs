//! Several processes for one run: who they are, one result, and one report of what went wrong first.

use crate::support::Forge;

#[test]
fn ranks_get_the_environment_of_torchrun_and_make_one_result() {
    let forge = Forge::new();
    let said = forge.good(&["run", "sword.toml", "--ranks", "2"]);
    assert!(said.err.contains("on 2 ranks"), "{}", said.err);
    let calls = forge.calls();
    // `dig` and `forge` cannot share work.
    let others: Vec<_> = calls.iter().filter(|call| call.contains("rank")).collect();
    assert_eq!(others, ["smelt rank 1: 2 1 2 127.0.0.1"]);
    assert_eq!(calls.iter().filter(|call| call.ends_with(" run")).count(), 3);
    let log = forge.read(".pipeline/runs/sword/latest/smelt.log");
    for line in ["[rank 0] hello log", "[rank 1] hello log", "[rank 0] not an event"] {
        assert!(log.lines().any(|found| found == line), "{line} is not in\n{log}");
    }
    let record: serde_json::Value = serde_json::from_str(&forge.read(".pipeline/runs/sword/latest/run.json")).unwrap();
    let ranks: Vec<_> = (0..3).map(|stage| record["stages"][stage]["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [1, 2, 1]);

    // How many made it is in no key.
    forge.good(&["run", "sword.toml"]);
    forge.good(&["run", "sword.toml", "--ranks", "3"]);
    assert_eq!(forge.ran(), [""; 0]);
}

#[test]
fn a_caller_that_is_a_rank_itself_does_not_make_its_stages_ranks() {
    let forge = Forge::new();
    let mut command = forge.command(&["run", "sword.toml"]);
    command.envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "nowhere"), ("MASTER_PORT", "1")]);
    assert!(command.output().unwrap().status.success());
    assert_eq!(forge.artifacts("forge"), 1);
}

#[test]
fn the_rank_that_failed_first_is_the_one_reported() {
    for (end, code, report) in [
        ("crash", 1, "`pipeline-smelt`, rank 1 of 2, crashed: killed by signal 9 (SIGKILL)"),
        ("fail", 4, "`smelt` failed: rank 1 of 2: the furnace is cold"),
    ] {
        let forge = Forge::new();
        let said = forge.run(&["run", "sword.toml", "--ranks", "2", "--set", &format!("smelt.end={end}")]);
        assert_eq!((said.code, forge.artifacts("smelt")), (code, 0), "{}", said.err);
        assert!(said.err.contains(report), "{}", said.err);
        assert!(!said.err.contains("lost another rank"), "{}", said.err);
    }
}

#[test]
fn ranks_are_refused_where_they_cannot_be() {
    let forge = Forge::new();
    let refused = |set: &str| {
        let said = forge.run(&["plan", "sword.toml", "--set", set]);
        assert_eq!(said.code, 3, "{}", said.err);
        said.err
    };
    let report = refused("dig.ranks=2");
    assert!(report.contains("`dig` runs as one process: it cannot share work between 2 ranks"), "{report}");
    let report = refused("smelt.ranks=0");
    assert!(report.contains("`ranks` must be an integer > 0"), "{report}");
    let plan = forge.good(&["plan", "sword.toml", "--set", "smelt.ranks=2", "--json"]).out;
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    assert_eq!((plan["stages"][0]["ranks"].as_u64(), plan["stages"][1]["ranks"].as_u64()), (Some(1), Some(2)));
}

/// The same result as without a failure; what was tried is told, and nothing that would come again is tried again.
#[test]
fn a_stage_that_crashed_starts_again_from_what_it_saved() {
    let run = |arguments: &[&str]| {
        let forge = Forge::new();
        let mut command = forge.command(&[&["run", "sword.toml"], arguments].concat());
        let output = command.env("FAKE_RESUMABLE", "1").output().unwrap();
        (forge, output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let crashes = |times: u32| format!("smelt.crashes={times}");

    let (_, code, said) = run(&["--set", &crashes(1)]);
    assert!(code == 1 && said.contains("killed by signal 9"), "{said}");
    let (forge, code, said) = run(&["--set", &crashes(2), "--max-restarts", "2"]);
    assert_eq!(code, 0, "{said}");
    for told in ["restart 1 of 2", "restart 2 of 2", "`smelt` failed: `pipeline-smelt` crashed: killed by signal 9"] {
        assert!(said.contains(told), "{told} is not in {said}");
    }
    let record: serde_json::Value = serde_json::from_str(&forge.read(".pipeline/runs/sword/latest/run.json")).unwrap();
    assert_eq!(record["stages"][1]["warnings"].as_array().unwrap().len(), 3);
    let (_, code, said) = run(&["--set", &crashes(2), "--max-restarts", "1"]);
    assert!(code == 1 && said.contains("restart 1 of 1") && !said.contains("restart 2"), "{said}");

    // What is wrong stays wrong.
    let (_, code, said) = run(&["--set", "smelt.end=fail", "--max-restarts", "3"]);
    assert!(code == 4 && !said.contains("restart"), "{said}");
}

#[test]
fn a_restart_that_comes_no_further_takes_fewer_ranks_if_it_may() {
    let tries = |arguments: &[&str]| {
        let forge = Forge::new();
        let always = ["run", "sword.toml", "--ranks", "4", "--max-restarts", "3", "--set", "smelt.crashes=3"];
        let output = forge.command(&[&always, arguments].concat()).env("FAKE_RESUMABLE", "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let mut tries: Vec<String> = fs_err::read_dir(forge.path("runs/sword/smelt"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with("try"))
            .collect();
        tries.sort();
        let record: serde_json::Value =
            serde_json::from_str(&forge.read(".pipeline/runs/sword/latest/run.json")).unwrap();
        (tries, record["stages"][1]["ranks"].as_u64().unwrap())
    };
    let all = |counts: [u32; 3]| (0..3).map(|at| format!("try {at} on {}", counts[at])).collect::<Vec<_>>();
    assert_eq!(tries(&[]), (all([4, 4, 4]), 4));
    // The second try comes no further than the first; 3 is no number of ranks for this stage.
    assert_eq!(tries(&["--min-ranks", "2", "--set", "smelt.refuses=3"]), (all([4, 4, 2]), 2));
    assert_eq!(tries(&["--min-ranks", "1"]), (all([4, 4, 3]), 2));
}

//! Stages without a dependency between them run at the same time, within the threads and devices there are.

use crate::support::Forge;

const GRAPH: &str = r#"
[stage.dig]
program = "bin/pipeline-dig"
[stage.left]
program = "bin/pipeline-left"
inputs = { ore = "dig" }
threads = 1
[stage.right]
program = "bin/pipeline-right"
inputs = { ore = "dig" }
threads = 1
[stage.join]
program = "bin/pipeline-join"
inputs = { a = "left", b = "right" }
"#;

/// A diamond whose two middle stages each wait until the other has come.
fn diamond() -> Forge {
    let forge = Forge::new();
    forge.write("pipeline.toml", GRAPH);
    let meet = forge.path("meet").display().to_string();
    fs_err::create_dir(&meet).unwrap();
    forge.write(
        "sword.toml",
        &format!(
            "name = \"sword\"\n[dig]\n[left]\nmeet = \"{meet}\"\n[right]\nmeet = \"{meet}\"\n[join]\ntext = \"joined\"\n"
        ),
    );
    for verb in ["left", "right", "join"] {
        fs_err::copy(forge.path("bin/pipeline-dig"), forge.path(&format!("bin/pipeline-{verb}"))).unwrap();
        forge.edit(
            &format!("bin/pipeline-{verb}"),
            "KINDS = {",
            "KINDS = {\"left\": ({\"ore\": \"ore\"}, \"metal\"), \"right\": ({\"ore\": \"ore\"}, \"metal\"), \
             \"join\": ({\"a\": \"metal\", \"b\": \"metal\"}, \"tool\"), ",
        );
    }
    forge
}

#[test]
fn independent_stages_meet_while_they_run() {
    let forge = diamond();
    let said = forge.good(&["run", "sword.toml"]);
    assert!(said.out.contains("done: 4 made"), "{}", said.out);
    assert_eq!(forge.read("runs/sword/join/out.txt"), "joined+default+default+default+default");
    let ran = forge.ran();
    assert_eq!((ran[0].as_str(), ran[3].as_str()), ("dig", "join"), "{ran:?}");
    let record: serde_json::Value = serde_json::from_str(&forge.read(".pipeline/runs/sword/1/run.json")).unwrap();
    let stages = record["stages"].as_array().unwrap();
    assert!(stages.len() == 4 && stages.iter().all(|stage| stage["status"] == "made"), "{record}");
    assert_eq!(stages[1]["threads"], 1);
    // At no time was anything made twice, and a second run makes nothing.
    assert!(forge.good(&["run", "sword.toml"]).out.contains("nothing to do: all 4"));
}

#[test]
fn one_job_at_a_time_is_one_at_a_time() {
    let forge = diamond();
    let said = forge.run(&["run", "sword.toml", "--jobs", "1", "--set", "left.seconds=0.4"]);
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(said.err.contains("`left` failed: nobody came; 1 threads"), "{}", said.err);
    assert_eq!(forge.ran(), ["dig", "left"], "nothing starts after a failure");
}

#[test]
fn what_runs_beside_a_failure_is_kept() {
    let forge = diamond();
    let said = forge.run(&["run", "sword.toml", "--set", "left.end=fail"]);
    assert_eq!(said.code, 4, "{}", said.err);
    assert!(said.err.contains("`left` failed: the furnace is cold"), "{}", said.err);
    assert_eq!((forge.artifacts("left"), forge.artifacts("right"), forge.artifacts("join")), (0, 1, 0));
    forge.ran();
    forge.good(&["run", "sword.toml"]);
    assert_eq!(forge.ran(), ["left", "join"]);
}

#[test]
fn an_interrupt_reaches_every_running_stage() {
    let forge = diamond();
    let child = forge.start(&["run", "sword.toml", "--set", "left.seconds=60", "--set", "right.seconds=60"]);
    let met = forge.path("meet");
    forge.wait_for(|| fs_err::read_dir(&met).unwrap().count() == 2);
    std::thread::sleep(std::time::Duration::from_millis(200));
    let kill = format!("kill -INT {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    let said = forge.finish(child);
    assert_eq!((said.code, forge.artifacts("left"), forge.artifacts("right")), (130, 0, 0), "{}", said.err);
    assert!(said.err.contains("kept: `dig`"), "{}", said.err);
}

#[test]
fn a_graph_may_say_how_many_threads_a_stage_can_use() {
    let forge = diamond();
    forge.edit("pipeline.toml", "threads = 1", "threads = 0");
    let report = forge.report(&["run", "sword.toml"], 3);
    assert!(report.contains("`stage.left.threads` must be an integer > 0"), "{report}");
}

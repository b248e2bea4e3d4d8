//! What `plan`, `explain` and `status` say, to people and to programs.

use serde_json::Value;

use crate::support::{Forge, stage_line};

const RUN: &[&str] = &["run", "sword.toml"];

fn json(forge: &Forge, args: &[&str]) -> Value {
    serde_json::from_str(&forge.good(args).out).unwrap()
}

/// Line and the one below it.
fn lines<'a>(text: &'a str, stage: &str) -> (&'a str, &'a str) {
    let mut lines = text.lines().skip_while(|line| !line.starts_with(stage));
    (lines.next().unwrap(), lines.next().unwrap_or_default().trim())
}

#[test]
fn a_plan_has_a_price_and_the_items_of_a_stage_that_waits() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    forge.write("mine/a.txt", "gold");
    let plan = forge.good(&["plan", "sword.toml"]).out;
    assert_eq!(stage_line(&plan, "dig"), "dig    to run  source `source` changed: a.txt");
    let (line, below) = lines(&plan, "smelt");
    assert_eq!(line, "smelt  waits   for dig");
    assert!(below.starts_with("1 of 2 bars (ore of `a.txt` changed), about "), "{plan}");
    assert!(below.contains(" s, 12.0 MB, memory "), "{plan}");
    assert!(plan.contains("\n               1 batch a day\n"), "{plan}");
    assert!(plan.lines().last().unwrap().starts_with("3 to run, about "), "{plan}");
    assert_eq!(forge.calls(), ["smelt estimate"], "a plan runs nothing");

    let plan = json(&forge, &["plan", "sword.toml", "--json"]);
    let smelt = &plan["stages"][1]["forecast"];
    assert_eq!((smelt["items"][0]["todo"].as_u64(), smelt["bytes"].as_u64()), (Some(1), Some(12_000_000)));
    assert!(smelt["seconds"].as_f64().is_some() && smelt["memory_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20));
    assert_eq!(plan["stages"][0]["changes"][0]["files"][0], "a.txt");
    assert!(plan["free_bytes"].as_u64().is_some());
}

#[test]
fn a_changed_value_is_told_with_its_place_and_both_values() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.edit("sword.toml", "\"blade\"", "\"axe\"");
    let said = forge.good(&["explain", "sword.toml", "forge"]).out;
    for part in [
        "forge runs: 1 thing changed\n",
        "  - parameter `text` changed \"blade\" → \"axe\" (sword.toml:11)\n",
        "  last made or used ",
        "  to do: about ",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
    assert!(!said.contains("smelt") && !said.contains("dig"), "they are not to blame:\n{said}");

    // From the command line, through a wire of the graph, and through the stages before.
    let said = forge.good(&["explain", "sword.toml", "smelt", "--set", "dig.text=gold"]).out;
    assert!(said.starts_with("smelt waits for dig; whether it runs depends on what comes out\n"), "{said}");
    assert!(
        said.contains("dig runs: 1 thing changed\n  - parameter `text` changed \"iron\" → \"gold\" (--set)\n"),
        "{said}"
    );
    let changes = json(&forge, &["explain", "sword.toml", "forge", "--json"]);
    let change = &changes[0]["changes"][0];
    assert_eq!((change["parameter"].as_str(), change["place"].as_str()), (Some("text"), Some("sword.toml:11")));
    assert_eq!((change["old"].as_str(), change["new"].as_str()), (Some("blade"), Some("axe")));

    let said = forge.good(&["explain", "sword.toml", "dig"]).out;
    assert!(said.starts_with("dig is cached: its parameters, its sources, its version are those of "), "{said}");
    let said = forge.run(&["explain", "sword.toml", "smetl"]);
    assert_eq!(said.code, 2);
    assert!(said.err.contains("`smetl` is neither a stage nor a sample"), "{}", said.err);
}

#[test]
fn more_files_than_fit_a_sentence_are_listed() {
    let forge = Forge::new();
    for n in 0..6 {
        forge.write(&format!("mine/{n}.txt"), "rock");
    }
    forge.good(RUN);
    for n in 0..6 {
        forge.write(&format!("mine/{n}.txt"), "gold");
    }
    let said = forge.good(&["explain", "sword.toml", "dig"]).out;
    assert!(said.contains("source `source` changed: 0.txt, 1.txt, 2.txt and 3 more\n"), "{said}");
    for file in ["3.txt", "4.txt", "5.txt"] {
        assert!(said.contains(&format!("\n      {file}\n")), "{said}");
    }
}

#[test]
fn the_status_tells_stages_and_runs() {
    let forge = Forge::new();
    assert!(forge.good(&["status", "sword.toml"]).out.ends_with("no run yet\n"));
    forge.good(RUN);
    forge.run(&["run", "sword.toml", "--set", "smelt.text=hot", "--set", "smelt.end=fail"]);
    forge.edit("sword.toml", "\"blade\"", "\"axe\"");
    let said = forge.good(&["status", "sword.toml"]).out;
    assert_eq!(stage_line(&said, "dig").split_whitespace().nth(1), Some("cached"), "{said}");
    assert_eq!(stage_line(&said, "forge").split_whitespace().nth(1), Some("stale"), "{said}");
    assert!(stage_line(&said, "run 2").ends_with("exit 4  cached dig; failed smelt"), "{said}");
    assert!(stage_line(&said, "run 1").ends_with("exit 0  made dig, smelt, forge"), "{said}");

    let running = forge.start(&["run", "sword.toml", "--set", "smelt.text=slow", "--set", "smelt.seconds=2"]);
    forge.wait_for(|| forge.path(".pipeline/runs/sword/3/smelt.log").exists());
    let status = json(&forge, &["status", "sword.toml", "--json"]);
    assert_eq!(status["stages"][1]["being_made"].as_array().map(Vec::len), Some(1), "{status}");
    assert_eq!(status["runs"][0]["run"], 3);
    assert_eq!(forge.finish(running).code, 0);
}

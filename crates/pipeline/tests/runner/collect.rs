//! `pipeline gc` frees nothing that the recipe stands for now, whatever ran since, how much of it and how it ended.

use crate::support::{Forge, stage_line};

const RUN: &[&str] = &["run", "sword.toml"];
const STAGES: [&str; 3] = ["dig", "smelt", "forge"];

/// Every link that people follow leads somewhere.
fn links_resolve(forge: &Forge, after: &str) {
    for entry in fs_err::read_dir(forge.path("runs/sword")).unwrap() {
        let path = entry.unwrap().path();
        assert!(path.exists(), "{} leads nowhere after {after}", path.display());
    }
}

fn cached(forge: &Forge) -> Vec<bool> {
    let plan = forge.good(&["plan", "sword.toml"]).out;
    STAGES.iter().map(|stage| stage_line(&plan, stage).contains("cached")).collect()
}

#[test]
fn runs_of_a_part_and_failed_ones_cost_no_result() {
    const STEEL: &str = "dig.text=steel";
    const FAIL: &str = "dig.end=fail";
    // What is run after a whole good run, and with which exit codes.
    let histories: &[&[(&[&str], i32)]] = &[
        &[(&["run", "sword.toml", "--until", "dig"], 0)],
        &[(&["run", "sword.toml", "--until", "smelt"], 0), (&["run", "sword.toml", "--only", "dig"], 0)],
        &[(&["run", "sword.toml", "--from", "forge"], 0)],
        &[(&["run", "sword.toml", "--only", "forge"], 0)],
        &[(&["dig", "sword.toml", "--force"], 0)],
        &[(&["run", "sword.toml", "--force", "dig", "--until", "dig"], 0)],
        &[(&["run", "sword.toml", "--set", FAIL, "--set", STEEL], 4)],
        &[(&["run", "sword.toml", "--set", FAIL, "--force", "dig"], 4)],
        &[(&["run", "sword.toml", "--set", "smelt.end=fail", "--set", STEEL], 4)],
        &[(&["run", "sword.toml", "--set", "forge.end=crash", "--set", STEEL], 1)],
        &[(&["run", "sword.toml", "--set", STEEL, "--until", "dig"], 0)],
        &[(&["run", "sword.toml", "--set", STEEL, "--until", "smelt"], 0), (&["dig", "sword.toml"], 0)],
        &[
            (&["run", "sword.toml", "--set", FAIL, "--set", STEEL], 4),
            (&["run", "sword.toml", "--set", "smelt.text=hot", "--until", "smelt"], 0),
            (&["run", "sword.toml", "--set", FAIL, "--set", "dig.text=lead"], 4),
        ],
    ];
    for history in histories {
        let forge = Forge::new();
        forge.good(RUN);
        for (args, code) in *history {
            let said = forge.run(args);
            assert_eq!(said.code, *code, "{args:?}\n{}{}", said.out, said.err);
        }
        forge.ran();
        let after = format!("{history:?}");
        assert_eq!(cached(&forge), [true; 3], "{after}");
        // A second one sees only what the first left, run records included.
        for _ in 0..2 {
            forge.good(&["gc"]);
            links_resolve(&forge, &after);
            assert_eq!(cached(&forge), [true; 3], "{after}");
        }
        forge.good(RUN);
        assert_eq!(forge.ran(), Vec::<String>::new(), "{after}");
        forge.good(&["verify", "sword.toml"]);
    }
}

#[test]
fn a_record_by_which_another_stage_is_known_stays() {
    let forge = Forge::new();
    let graph = forge.read("pipeline.toml");
    forge.write("pipeline.toml", &format!("{graph}[stage.assay]\nprogram = \"bin/pipeline-assay\"\n"));
    let recipe = forge.read("sword.toml");
    forge.write("sword.toml", &format!("{recipe}\n[assay]\nrequired_here = \"yes\"\ntext = \"acid\"\n"));
    forge.good(RUN);
    // Another leaf has a newer result, so that of the first run goes; the first run is still all that is known of `forge`.
    forge.good(&["run", "sword.toml", "--only", "assay", "--set", "assay.text=fire"]);
    forge.ran();
    for _ in 0..2 {
        forge.good(&["gc"]);
        links_resolve(&forge, "a run of another leaf");
        assert_eq!((forge.artifacts("assay"), cached(&forge)), (1, vec![true; 3]));
    }
    forge.good(RUN);
    assert_eq!(forge.ran(), ["assay"]);
}

#[test]
fn so_many_results_of_each_stage_are_kept_as_runs_were_asked_for() {
    let forge = Forge::new();
    for text in ["iron", "steel", "gold"] {
        forge.good(&["run", "sword.toml", "--set", &format!("dig.text={text}")]);
    }
    forge.good(&["run", "sword.toml", "--set", "dig.text=lead", "--until", "dig"]);
    forge.good(&["gc", "--keep-runs", "2"]);
    // Lead and gold, and the steel that a kept metal was made of.
    assert_eq!((forge.artifacts("dig"), forge.artifacts("smelt"), forge.artifacts("forge")), (3, 2, 2));
    forge.good(&["gc"]);
    assert_eq!((forge.artifacts("dig"), forge.artifacts("smelt"), forge.artifacts("forge")), (2, 1, 1));
    links_resolve(&forge, "four runs");
}

#[test]
fn what_was_pulled_stays() {
    let forge = Forge::new();
    fs_err::create_dir(forge.path("shared")).unwrap();
    let address = format!("file://{}", forge.path("shared").display());
    forge.good(&["run", "sword.toml", "--remote", &address]);
    forge.good(&["pull", "sword.toml", "--remote", &address, "--cache", "other"]);
    fs_err::remove_dir_all(forge.path("shared")).unwrap();
    forge.good(&["gc", "--cache", "other"]);
    links_resolve(&forge, "a pull");
    forge.ran();
    forge.good(&["run", "sword.toml", "--cache", "other"]);
    assert_eq!(forge.ran(), Vec::<String>::new());
}

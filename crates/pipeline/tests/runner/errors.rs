//! Law L7: a user's mistake is answered with its place, the rule and the remedy. What a person reads is pinned here.

use insta::assert_snapshot;

use crate::support::Forge;

#[test]
fn an_unknown_key() {
    let forge = Forge::new();
    forge.edit("sword.toml", "text = \"iron\"", "txet = \"iron\"");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
}

#[test]
fn an_unknown_key_on_the_command_line() {
    let forge = Forge::new();
    assert_snapshot!(forge.report(&["plan", "sword.toml", "--set", "forge.txet=axe"], 3));
}

#[test]
fn all_mistakes_at_once() {
    let forge = Forge::new();
    forge.edit("sword.toml", "amount = 2", "amount = \"two\"");
    forge.edit("sword.toml", "\"blade\"", "\"bad\"");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
}

#[test]
fn a_value_taken_from_another_stage() {
    let forge = Forge::new();
    forge.edit("sword.toml", "text = \"blade\"", "");
    forge.edit("sword.toml", "\"iron\"", "\"blunt\"");
    let report = forge.report(&["run", "sword.toml"], 3);
    assert!(report.contains("taken from here for `forge`"), "{report}");
    // What two stages refuse is told once, where it stands.
    forge.edit("sword.toml", "\"blunt\"", "\"bad\"");
    let report = forge.report(&["run", "sword.toml"], 3);
    assert_eq!(report.matches("may not be `bad`").count(), 1, "{report}");
}

#[test]
fn an_unknown_stage() {
    let forge = Forge::new();
    forge.edit("sword.toml", "[smelt]", "[smetl]");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
}

#[test]
fn an_unknown_stage_on_the_command_line() {
    let forge = Forge::new();
    assert_snapshot!(forge.report(&["run", "sword.toml", "--until", "smetl"], 2));
    let report = forge.report(&["plna", "sword.toml"], 2);
    assert!(
        report.contains("`plna` is neither a command nor a stage") && report.contains("did you mean `plan`?"),
        "{report}"
    );
}

#[test]
fn broken_toml() {
    let forge = Forge::new();
    forge.edit("sword.toml", "[forge]", "[forge");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
}

#[test]
fn a_cycle() {
    let forge = Forge::new();
    forge.edit("pipeline.toml", "program = \"bin/pipeline-dig\"", "inputs = { scrap = \"forge\" }");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
}

#[test]
fn an_edge_to_nowhere() {
    let forge = Forge::new();
    forge.edit("pipeline.toml", "metal = \"smelt\"", "metal = \"smetl\"");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
}

#[test]
fn the_wrong_kind_of_artifact() {
    let forge = Forge::new();
    forge.edit("pipeline.toml", "metal = \"smelt\"", "metal = \"dig\"");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
}

#[test]
fn an_input_stage_that_is_left_out() {
    let forge = Forge::new();
    forge.edit("pipeline.toml", "[stage.dig]", "[stage.assay]\nprogram = \"bin/pipeline-assay\"\n[stage.dig]");
    forge.edit("pipeline.toml", "{ ore = \"dig\" }", "{ ore = \"assay\" }");
    forge.edit("bin/pipeline-assay", "KINDS = {", "KINDS = {\"assay\": ({}, \"ore\"), ");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 3));
    // A stage that can run on its defaults needs no table.
    let forge = Forge::new();
    forge.edit("sword.toml", "[smelt]\namount = 2\n", "");
    forge.good(&["run", "sword.toml"]);
    assert_eq!(forge.ran(), ["dig", "smelt", "forge"]);
}

#[test]
fn a_missing_source() {
    let forge = Forge::new();
    fs_err::remove_dir_all(forge.path("mine")).unwrap();
    assert_snapshot!(forge.report(&["run", "sword.toml"], 4));
}

#[test]
fn a_missing_recipe() {
    assert_snapshot!(Forge::new().report(&["run", "swrd.toml"], 3));
}

#[test]
fn a_missing_program() {
    let forge = Forge::new();
    forge.edit("pipeline.toml", "bin/pipeline-smelt", "pipeline-smelt-of-nowhere");
    assert_snapshot!(forge.report(&["run", "sword.toml"], 2));
}

#[test]
fn a_program_that_is_broken() {
    let forge = Forge::new();
    forge.write("bin/pipeline-smelt", "#!/bin/sh\necho 'no furnace' >&2\nexit 7\n");
    let report = forge.report(&["run", "sword.toml"], 1);
    assert!(report.contains("failed (exit code 7)") && report.contains("no furnace"), "{report}");
    forge.write("bin/pipeline-smelt", "#!/bin/sh\necho hello\n");
    let report = forge.report(&["run", "sword.toml"], 1);
    assert!(report.contains("gave an answer that cannot be read"), "{report}");
}

#[test]
fn a_wrong_device() {
    let forge = Forge::new();
    assert_snapshot!(forge.report(&["run", "sword.toml", "--set", "smelt.device=\"gpu\""], 3));
}

#[test]
fn json_errors_have_their_place() {
    let forge = Forge::new();
    let said = forge.run(&["plan", "sword.toml", "--set", "forge.text=bad", "--json"]);
    let line: serde_json::Value = serde_json::from_str(said.out.lines().next().unwrap()).unwrap();
    assert_eq!((line["exit"].as_i64(), line["place"].as_str()), (Some(3), Some("--set:1")));
    assert!(said.err.is_empty(), "{}", said.err);
}

#[test]
fn the_help_is_frozen() {
    let said = Forge::new().good(&["--help"]);
    assert_snapshot!(said.out);
}

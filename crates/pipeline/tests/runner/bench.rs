//! `bench`: a run whose numbers must lie within bounds.

use crate::support::Forge;

const BENCH: &[&str] = &["bench", "sword.toml"];

fn bounds(forge: &Forge, text: &str) {
    let recipe = forge.read("sword.toml");
    forge.write("sword.toml", &format!("{recipe}\n{text}"));
}

#[test]
fn numbers_within_their_bounds_are_good_and_others_have_a_code_of_their_own() {
    let forge = Forge::new();
    bounds(
        &forge,
        "[bench.stages]\nquery = \"select count(*) from stages where status = 'cached'\"\nat_least = 3\n\
         [bench.runs]\nquery = \"select count(*) n from runs\"\nat_most = 1\n",
    );
    let said = forge.good(BENCH).out;
    assert!(said.contains("stages      3.0000  at least 3  good\n"), "{said}");
    assert!(said.contains("runs        1.0000  at most 1  good\n"), "{said}");
    assert!(forge.good(&["run", "sword.toml"]).out.contains("nothing to do"), "bounds are in no key");

    let report = forge.report(&["bench", "sword.toml", "--set", "bench.stages.at_least=4"], 9);
    assert!(report.contains("`stages` is 3.0000, not at least 4"), "{report}");
    let lines = forge.good(&["bench", "sword.toml", "--json"]).out;
    let line = lines.lines().find(|line| line.contains("\"runs\"")).unwrap();
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!((line["number"].as_f64(), line["good"].as_bool()), (Some(1.0), Some(true)));
}

#[test]
fn what_is_no_number_is_told_with_the_bounds_name() {
    let forge = Forge::new();
    let report = forge.report(BENCH, 3);
    assert!(report.contains("has no `[bench.NAME]` tables"), "{report}");
    bounds(&forge, "[bench.odd]\nquery = \"QUERY\"\nat_most = 1\n");
    for (query, code, part) in [
        ("select stage from stages", 3, "gave 3 rows"),
        ("select 1 a, 2 b", 3, "gave 2 columns"),
        ("select 'x' a", 3, "gave `\\\"x\\\"`"),
        ("select null a", 3, "gave null"),
        ("select stag from stages", 2, "stag"),
    ] {
        let report = forge.report(&["bench", "sword.toml", "--set", &format!("bench.odd.query=\"{query}\"")], code);
        assert!(report.replace('\n', " ").contains(&part.replace('\\', "")), "{query}: {report}");
    }
}

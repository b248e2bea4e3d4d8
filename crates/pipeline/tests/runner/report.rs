//! Each run leaves a page: of what it did, also when it failed; a run that does nothing leaves the last one alone.

use crate::support::Forge;

#[test]
fn every_run_leaves_a_page_and_says_where() {
    let forge = Forge::new();
    let said = forge.good(&["run", "sword.toml"]);
    assert!(said.out.contains("\nreport: runs/sword/report.html\n"), "{}", said.out);
    let first = forge.read("runs/sword/report.html");
    for part in ["dig", "smelt", "forge", "no earlier artifact", "2 rows forgeed", "a bit warm"] {
        assert!(first.contains(part), "`{part}` is not in the page");
    }

    let said = forge.good(&["run", "sword.toml"]);
    assert!(!said.out.contains("report"), "nothing was done, so there is nothing to tell: {}", said.out);
    assert_eq!(forge.read("runs/sword/report.html"), first);

    let said = forge.run(&["run", "sword.toml", "--set", "smelt.text=tin", "--set", "smelt.end=fail"]);
    assert_eq!(said.code, 4);
    let failed = forge.read("runs/sword/report.html");
    for part in ["the furnace is cold", "not run", "cached", "smelt.end=fail"] {
        assert!(failed.contains(part), "`{part}` is not in the page");
    }
    assert_eq!(forge.read(".pipeline/runs/sword/1/report.html"), first, "the page of an earlier run stays");
}

#[test]
fn the_page_can_be_written_anew_and_elsewhere() {
    let forge = Forge::new();
    let said = forge.run(&["report", "sword.toml"]);
    assert_eq!(said.code, 4);
    assert!(
        said.err.contains("`sword` has no run yet") && said.err.contains("pipeline run sword.toml"),
        "{}",
        said.err
    );
    forge.good(&["run", "sword.toml", "--until", "smelt"]);
    fs_err::remove_dir_all(forge.path("runs")).unwrap();
    assert_eq!(forge.good(&["report", "sword.toml"]).out, "runs/sword/report.html\n");
    forge.good(&["report", "sword.toml", "--output", "page.html"]);
    assert_eq!(forge.read("page.html"), forge.read("runs/sword/report.html"));
}

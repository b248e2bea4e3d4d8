//! Law L1: a result is reused if and only if nothing that could change it changed.

use std::time::Duration;

use crate::support::{Forge, exists, stage_line};

const RUN: &[&str] = &["run", "sword.toml"];

fn set(value: &str) -> Vec<&str> {
    vec!["run", "sword.toml", "--set", value]
}

#[test]
fn a_second_run_starts_no_process_and_says_so() {
    let forge = Forge::new();
    let first = forge.good(RUN);
    assert!(stage_line(&first.out, "forge").contains("2 rows forgeed  runs/sword/forge"), "{}", first.out);
    assert_eq!(forge.ran(), ["dig", "smelt", "forge"]);
    assert_eq!(forge.read("runs/sword/forge/out.txt"), "blade+default+iron");

    let second = forge.good(RUN);
    assert!(second.out.contains("nothing to do: all 3 stages are cached"), "{}", second.out);
    for stage in ["dig", "smelt", "forge"] {
        assert!(stage_line(&second.out, stage).contains("cached"));
    }
    assert_eq!(forge.calls(), Vec::<String>::new());
    assert_eq!(fs_err::read_dir(forge.path(".pipeline/runs/sword")).unwrap().count(), 2, "one run and `latest`");
}

#[test]
fn a_changed_parameter_reruns_exactly_what_depends_on_it() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    forge.edit("sword.toml", "\"blade\"", "\"axe\"");
    let plan = forge.good(&["plan", "sword.toml"]);
    assert!(stage_line(&plan.out, "dig").contains("cached"));
    assert_eq!(
        stage_line(&plan.out, "forge"),
        "forge  to run  parameter `text` changed \"blade\" → \"axe\" (sword.toml:11)"
    );
    forge.good(RUN);
    assert_eq!(forge.ran(), ["forge"]);

    let plan = forge.good(&["plan", "sword.toml", "--set", "dig.text=copper"]);
    assert_eq!(stage_line(&plan.out, "dig"), "dig    to run  parameter `text` changed \"iron\" → \"copper\" (--set)");
    assert_eq!(stage_line(&plan.out, "smelt"), "smelt  waits   for dig");
    assert_eq!(stage_line(&plan.out, "forge"), "forge  waits   for smelt");
    let plan = forge.good(&["plan", "sword.toml", "--set", "dig.text=copper", "--json"]);
    let plan: serde_json::Value = serde_json::from_str(&plan.out).unwrap();
    assert_eq!((plan["to_run"].as_u64(), plan["stages"][2]["state"].as_str()), (Some(3), Some("waits")));
    forge.good(&set("dig.text=copper"));
    assert_eq!(forge.ran(), ["dig", "smelt", "forge"]);
    assert_eq!(forge.read("runs/sword/forge/out.txt"), "axe+default+copper");

    // Back and forth: the older artifacts are still there.
    forge.good(RUN);
    assert_eq!(forge.ran(), Vec::<String>::new());
    assert_eq!(forge.read("runs/sword/forge/out.txt"), "axe+default+iron");
}

#[test]
fn operational_settings_move_no_key() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    for args in [
        &["run", "sword.toml", "--set", "dig.workers=7", "--set", "smelt.seconds=0.5"][..],
        &["run", "sword.toml", "--threads", "3", "--device", "cuda"],
        &["run", "sword.toml", "--set", "threads=2", "--set", "dig.device=cpu"],
    ] {
        forge.good(args);
        assert_eq!(forge.ran(), Vec::<String>::new(), "{args:?}");
    }
}

#[test]
fn equal_results_cut_the_rest_off() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    // Another key, the same bytes: the fake stage drops what follows `#`.
    let said = forge.good(&set("dig.text=iron#2"));
    assert_eq!(forge.ran(), ["dig"]);
    assert!(stage_line(&said.out, "smelt").contains("cached"));
}

#[test]
fn sources_count_by_content_and_nothing_else() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    let file = fs_err::File::options().append(true).open(forge.path("mine/a.txt")).unwrap();
    let later = file.metadata().unwrap().modified().unwrap() + Duration::from_secs(100);
    file.file().set_modified(later).unwrap();
    forge.good(RUN);
    assert_eq!(forge.ran(), Vec::<String>::new(), "touched");

    fs_err::rename(forge.path("mine"), forge.path("quarry")).unwrap();
    forge.edit("sword.toml", "\"mine\"", "\"quarry\"");
    forge.good(RUN);
    assert_eq!(forge.ran(), Vec::<String>::new(), "moved");

    forge.write("quarry/a.txt", "gold");
    forge.write("quarry/b.txt", "more");
    let plan = forge.good(&["plan", "sword.toml"]);
    assert_eq!(stage_line(&plan.out, "dig"), "dig    to run  source `source` changed: a.txt, b.txt (new)");
    forge.good(RUN);
    assert_eq!(forge.ran()[0], "dig", "edited");
}

#[test]
fn a_moved_cache_and_a_moved_project_keep_their_hits() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    fs_err::rename(forge.path(".pipeline"), forge.path("elsewhere")).unwrap();
    forge.good(&["run", "sword.toml", "--cache", "elsewhere"]);
    assert_eq!(forge.ran(), Vec::<String>::new());
    assert_eq!(forge.read("runs/sword/forge/out.txt"), "blade+default+iron", "the links follow");
    let by_environment = forge.command(RUN).env("PIPELINE_CACHE", forge.path("elsewhere")).output().unwrap();
    assert!(by_environment.status.success());
    assert_eq!(forge.ran(), Vec::<String>::new());
    assert!(!exists(&forge.path(".pipeline")));
}

/// A project that has only its recipe, its programs and its cache, elsewhere.
#[test]
fn absent_sources_are_taken_as_they_were_and_only_they() {
    let forge = Forge::new();
    forge.write("kiln/b.txt", "clay");
    forge.edit("sword.toml", "amount = 2", "amount = 2\nsource = \"kiln\"");
    forge.good(RUN);
    forge.ran();
    for name in ["pipeline.toml", "sword.toml", "bin", ".pipeline", "kiln"] {
        fs_err::create_dir_all(forge.path("moved")).unwrap();
        fs_err::rename(forge.path(name), forge.path("moved").join(name)).unwrap();
    }
    fs_err::remove_dir_all(forge.path("mine")).unwrap();
    let there = |args: &[&str]| {
        let mut command = forge.command(args);
        let output = command.current_dir(forge.path("moved")).stdout(std::process::Stdio::piped());
        forge.finish(output.stderr(std::process::Stdio::piped()).spawn().unwrap())
    };
    for _ in 0..2 {
        let said = there(RUN);
        assert_eq!((said.code, forge.ran()), (0, Vec::new()), "{}{}", said.out, said.err);
        assert!(said.out.contains("nothing to do"), "{}", said.out);
        assert_eq!(
            said.err.matches("note: `moved/mine` is not there; it is taken to be what it was").count(),
            1,
            "{}",
            said.err
        );
    }
    let plan = there(&["plan", "sword.toml"]).out;
    assert!(stage_line(&plan, "dig").contains("cached") && plan.contains("note: `moved/mine` is not there"), "{plan}");
    // What is there is looked at.
    forge.write("moved/kiln/b.txt", "mud");
    assert!(stage_line(&there(&["plan", "sword.toml"]).out, "smelt").contains("source `source` changed: b.txt"));
    assert_eq!(there(RUN).code, 0);
    assert_eq!(forge.ran()[0], "smelt");

    // What must run and cannot says what it lacks, before anything is spent.
    let said = there(&["run", "sword.toml", "--force", "dig"]);
    let text = said.err.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(said.code, 4, "{text}");
    assert!(text.contains("`dig` must run (forced), and `moved/mine`, which it reads, is not there"), "{text}");
    assert!(text.contains("sword.toml:5"), "{text}");
    // Another question has no answer, and another folder is not this one.
    for set in ["dig.text=gold", "dig.source=mien"] {
        let said = there(&["run", "sword.toml", "--set", set]);
        assert_eq!(said.code, 4, "{set}: {}", said.err);
        assert!(said.err.contains("does not exist"), "{set}: {}", said.err);
    }
    assert_eq!(forge.ran(), Vec::<String>::new());
}

/// Sets the time of every file below a folder.
fn set_times(folder: &std::path::Path, time: std::time::SystemTime) {
    for entry in fs_err::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.symlink_metadata().unwrap() {
            meta if meta.is_dir() => set_times(&path, time),
            meta if meta.is_file() => fs_err::File::open(&path).unwrap().file().set_modified(time).unwrap(),
            _ => {}
        }
    }
}

/// As if the clock had been years ahead, or had started in 1970, when any file was written.
#[test]
fn a_clock_that_jumps_makes_nothing_stale_and_nothing_fresh() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    let now = forge.path("sword.toml").metadata().unwrap().modified().unwrap();
    let years = Duration::from_hours(10 * 365 * 24);
    for (number, time) in [now + years, std::time::UNIX_EPOCH, now].into_iter().enumerate() {
        for folder in [".pipeline", "mine", "bin"] {
            set_times(&forge.path(folder), time);
        }
        for _ in 0..2 {
            assert!(forge.good(RUN).out.contains("nothing to do"));
            assert_eq!(forge.ran(), Vec::<String>::new(), "{number}");
        }
        // Same size, and the time that it had.
        forge.write("mine/a.txt", &format!("roc{number}"));
        set_times(&forge.path("mine"), time);
        forge.good(RUN);
        assert_eq!(forge.ran()[0], "dig", "{number}");
        assert_eq!(
            forge.good(&["gc", "--older-than", "1d", "--keep-runs", "9", "--json"]).out.matches("\"key\"").count(),
            0
        );
    }
}

#[test]
fn a_changed_training_recipe_is_seen_though_the_data_is_gone() {
    let forge = Forge::new();
    forge.write("notes.txt", "hot");
    forge.edit("sword.toml", "source = \"mine\"", "source = \"mine\"\nnotes_file = \"notes.txt\"");
    forge.good(RUN);
    fs_err::remove_dir_all(forge.path("mine")).unwrap();
    assert!(forge.good(RUN).out.contains("nothing to do"));
    forge.write("notes.txt", "cold");
    assert_eq!(forge.run(RUN).code, 4);
}

#[test]
fn a_consulted_file_is_part_of_the_question() {
    let forge = Forge::new();
    forge.write("notes.txt", "hot");
    forge.edit("sword.toml", "amount = 2", "notes_file = \"notes.txt\"");
    forge.good(RUN);
    forge.ran();
    forge.good(RUN);
    assert_eq!(forge.calls(), Vec::<String>::new());
    forge.write("notes.txt", "cold");
    let plan = forge.good(&["plan", "sword.toml"]);
    assert_eq!(
        stage_line(&plan.out, "smelt"),
        "smelt  to run  parameter `notes` changed \"hot\" → \"cold\" (notes.txt:1)"
    );
}

/// The stage reads it when it starts: by then it must be what the key was made of.
#[test]
fn a_consulted_file_that_changes_before_its_stage_starts_makes_nothing_under_the_old_key() {
    let forge = Forge::new();
    forge.write("notes.txt", "hot");
    forge.edit("sword.toml", "amount = 2", "notes_file = \"notes.txt\"");
    let child = forge.start(&["run", "sword.toml", "--set", "dig.seconds=1"]);
    let log = forge.path(".pipeline/runs/sword/1/dig.log");
    forge.wait_for(|| fs_err::read_to_string(&log).is_ok_and(|text| text.contains("hello")));
    forge.write("notes.txt", "cold");
    let said = forge.finish(child);
    assert_eq!((said.code, forge.artifacts("dig"), forge.artifacts("smelt")), (4, 1, 0), "{}", said.err);
    assert!(said.err.contains("notes.txt` changed after this run had read it"), "{}", said.err);
    forge.ran();
    forge.good(RUN);
    assert_eq!(forge.ran(), ["smelt", "forge"]);
    forge.write("notes.txt", "hot");
    assert!(stage_line(&forge.good(&["plan", "sword.toml"]).out, "smelt").contains("to run"));
}

#[test]
fn a_run_that_cannot_be_noted_is_what_it_was() {
    let forge = Forge::new();
    forge.good(RUN);
    let runs = forge.path(".pipeline/runs");
    fs_err::remove_dir_all(&runs).unwrap();
    fs_err::write(&runs, "in the way").unwrap();
    let said = forge.good(RUN);
    assert!(said.err.contains("this run is not on record"), "{}", said.err);
    assert!(said.out.contains("nothing to do"), "{}", said.out);
}

#[test]
fn a_new_program_version_is_a_new_result() {
    let forge = Forge::new();
    forge.good(RUN);
    forge.ran();
    // Another file, the same answers: asked again, nothing rerun.
    forge.edit("bin/pipeline-dig", "\"about\": \"fake\"", "\"about\": \"fake but new\"");
    forge.good(RUN);
    assert_eq!(forge.calls(), ["dig describe", "dig check"]);
    forge.edit("bin/pipeline-dig", "\"FAKE_VERSION\", \"1\"", "\"FAKE_VERSION\", \"2\"");
    let plan = forge.good(&["plan", "sword.toml"]);
    assert_eq!(stage_line(&plan.out, "dig"), "dig    to run  the stage's own version changed 1 → 2");
}

#[test]
fn parts_of_the_graph_can_be_chosen() {
    let forge = Forge::new();
    let refused = forge.run(&["run", "sword.toml", "--from", "smelt"]);
    assert_eq!(refused.code, 2);
    assert!(refused.err.contains("the stage `dig` is not cached (no earlier artifact)"), "{}", refused.err);
    assert_eq!(forge.ran(), Vec::<String>::new());

    forge.good(&["run", "sword.toml", "--until", "smelt"]);
    assert_eq!(forge.ran(), ["dig", "smelt"]);
    forge.good(&["run", "sword.toml", "--only", "smelt", "--force"]);
    assert_eq!(forge.ran(), ["smelt"]);
    forge.good(&["run", "sword.toml", "--force", "dig"]);
    assert_eq!(forge.ran(), ["dig", "forge"], "the forced stage gave the same bytes, so `smelt` stays");
    forge.good(&["run", "sword.toml", "--from", "smelt", "--force"]);
    assert_eq!(forge.ran(), ["smelt", "forge"]);
    forge.good(&["smelt", "sword.toml", "--force"]);
    assert_eq!(forge.ran(), ["smelt"]);
    forge.good(&["dig", "sword.toml", "--dump", "seen", "--text", "iron"]);
    assert_eq!(forge.ran(), ["dig"], "a dump is wanted although the result is cached");
}

#[test]
fn two_runners_do_the_work_once() {
    let forge = Forge::new();
    forge.edit("sword.toml", "amount = 2", "amount = 2\nseconds = 1.0");
    let first = forge.start(RUN);
    let second = forge.start(RUN);
    let (first, second) = (forge.finish(first), forge.finish(second));
    assert_eq!((first.code, second.code), (0, 0), "{}{}", first.err, second.err);
    let mut ran = forge.ran();
    ran.sort();
    assert_eq!(ran, ["dig", "forge", "smelt"]);
    assert!(format!("{}{}", first.err, second.err).contains("waiting  for another runner"));
}

#[test]
fn json_lines_tell_the_whole_story() {
    let forge = Forge::new();
    let said = forge.good(&["run", "sword.toml", "--json"]);
    let lines: Vec<serde_json::Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |stage: &str, event: &str| lines.iter().filter(|l| l["stage"] == stage && l["event"] == event).count();
    assert_eq!((of("dig", "progress"), of("dig", "warning"), of("dig", "rejected"), of("dig", "done")), (2, 1, 1, 1));
    assert_eq!(of("forge", "stage"), 2, "running and made");
    assert_eq!(lines.last().unwrap()["made"], 3);
    let record: serde_json::Value = serde_json::from_str(&forge.read(".pipeline/runs/sword/latest/run.json")).unwrap();
    assert_eq!(record["exit"], 0);
    assert_eq!(record["stages"][1]["status"], "made");
    assert_eq!(record["stages"][1]["warnings"][0], "a bit warm");
    assert_eq!(forge.read(".pipeline/runs/sword/latest/dig.log"), "hello log\nnot an event\n");

    let shown = forge.good(&["show", "sword.toml", "smelt"]);
    for part in
        ["rows      3 in = 2 out + 1 rejected + 0 held", "summary   2 rows smelted", "out.txt", "warning   a bit warm"]
    {
        assert!(shown.out.contains(part), "{part} is not in\n{}", shown.out);
    }
    let shown = forge.good(&["show", "sword.toml", "--json"]);
    let first: serde_json::Value = serde_json::from_str(shown.out.lines().next().unwrap()).unwrap();
    assert_eq!((first["fresh"].as_bool(), first["manifest"]["kind"].as_str()), (Some(true), Some("ore")));
}

#[test]
fn stages_are_a_table_too() {
    let forge = Forge::new();
    let ask =
        ["sql", "sword.toml", "select stage, status, rows_in, rows_rejected, files from stages", "--format", "csv"];
    let header = "stage,status,rows_in,rows_rejected,files\n";
    assert_eq!(forge.good(&ask).out, format!("{header}dig,absent,,,\nsmelt,absent,,,\nforge,absent,,,\n"));
    forge.good(RUN);
    forge.edit("sword.toml", "\"blade\"", "\"axe\"");
    let said = forge.good(&ask);
    assert_eq!(said.out, format!("{header}dig,cached,3,1,1\nsmelt,cached,3,1,1\nforge,stale,3,1,1\n"));
    assert!(said.err.contains("`forge` is of an earlier run"), "{}", said.err);
    // What ran can be asked about when the data is gone.
    fs_err::remove_dir_all(forge.path("mine")).unwrap();
    assert!(forge.good(&ask).out.contains("dig,cached,3"));
    assert_eq!(forge.run(&["sql", "sword.toml", "select stag from stages"]).code, 2);
}

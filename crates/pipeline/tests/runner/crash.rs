//! Law L3: killed at any instant, run again, the same digests. And any number of runners do each piece of work once.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::Forge;

const RUN: &[&str] = &["run", "sword.toml", "--set", "smelt.seconds=0.05"];
/// SIGKILLs that must hit a living process.
const KILLS: usize = 200;

/// Stage → digest of its artifact.
fn digests(forge: &Forge) -> BTreeMap<String, String> {
    let digest = |stage: &str| {
        let text = forge.read(&format!("runs/sword/{stage}/manifest.json"));
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["digest"].as_str().unwrap().to_owned()
    };
    ["dig", "smelt", "forge"].map(|stage| (stage.to_owned(), digest(stage))).into()
}

/// Reproducible draws (Knuth's MMIX generator).
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Processes started by any thread of a process: the runner has one for each stage.
fn children(pid: u32) -> Vec<u32> {
    let threads = fs_err::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.map(|thread| fs_err::read_to_string(thread.path().join("children")).unwrap_or_default());
    lists.flat_map(|list| list.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>()).collect()
}

fn kill(pid: u32) -> bool {
    let mut kill = Command::new("kill");
    kill.args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn ended(child: &mut Child) -> Option<i32> {
    child.try_wait().unwrap().map(|status| status.code().unwrap_or(-1))
}

/// A recipe of its own for each round, so that there is always work for all stages to be killed at.
fn round(number: usize) -> [String; 6] {
    let set = |value: String| ["--set".to_owned(), value];
    let [a, b] = set(format!("dig.text=iron{number}"));
    let [c, d] = set("smelt.seconds=0.05".to_owned());
    ["run".to_owned(), "sword.toml".to_owned(), a, b, c, d]
}

#[test]
fn killed_two_hundred_times_the_result_is_that_of_an_undisturbed_run() {
    let seed = std::env::var("CRASH_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(2026);
    eprintln!("CRASH_SEED={seed}");
    let mut draws = Draws(seed);
    let (undisturbed, killed) = (Forge::new(), Forge::new());
    let (mut kills, mut rounds, mut victims) = (0, 0, [0; 3]);
    while kills < KILLS {
        let args = round(rounds);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let began = Instant::now();
        undisturbed.good(&args);
        // About a stage's share of a run, whatever this machine is doing besides.
        let span = (began.elapsed().as_millis() as u64 / 3).max(1);
        for _ in 0..10 {
            let mut runner = killed.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            thread::sleep(Duration::from_millis(draws.below(span)));
            let stages = children(runner.id());
            // The stage alone, which the runner then reports; or the runner; or both.
            let victim = if stages.is_empty() { 0 } else { draws.below(3) as usize };
            if ended(&mut runner).is_none() {
                let hit = match victim {
                    1 => stages.iter().map(|stage| kill(*stage)).collect::<Vec<_>>().contains(&true),
                    _ => kill(runner.id()),
                };
                if victim == 2 {
                    for stage in stages {
                        kill(stage);
                    }
                }
                kills += usize::from(hit);
                victims[victim] += usize::from(hit);
            }
            runner.wait().unwrap();
        }
        let said = killed.run(&args);
        assert_eq!(said.code, 0, "round {rounds}, seed {seed}\n{}{}", said.out, said.err);
        assert_eq!(digests(&killed), digests(&undisturbed), "round {rounds}, seed {seed}");
        rounds += 1;
        eprintln!(
            "{kills} kills in {rounds} rounds: {} runners, {} stages, {} of both",
            victims[0], victims[1], victims[2]
        );
    }
    killed.good(&["verify"]);
    assert!(victims.iter().all(|count| *count > 0), "{victims:?}");
    // What was made while others were killed is whole, too: every round is still cached.
    killed.ran();
    for number in 0..rounds {
        let args = round(number);
        killed.good(&args.iter().map(String::as_str).collect::<Vec<_>>());
    }
    assert_eq!(killed.ran(), Vec::<String>::new());
}

/// What a stage finished is published by the next run, with nothing beside it, and the stage does not touch it again: its files
/// may be others' by then.
#[test]
fn a_run_that_ends_while_it_publishes_leaves_only_that_to_do() {
    let (undisturbed, forge) = (Forge::new(), Forge::new());
    undisturbed.good(RUN);
    let resumable = |forge: &Forge| {
        let mut command = forge.command(RUN);
        command.env("FAKE_RESUMABLE", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
        forge.finish(command.spawn().unwrap())
    };
    // The last step, the rename, cannot be done.
    let place = forge.path(".pipeline/artifacts/smelt");
    fs_err::create_dir_all(place.parent().unwrap()).unwrap();
    fs_err::write(&place, "in the way").unwrap();
    let said = resumable(&forge);
    assert_ne!(said.code, 0, "{}", said.err);
    assert_eq!(forge.ran(), ["dig", "smelt"]);
    fs_err::remove_file(&place).unwrap();
    let said = resumable(&forge);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(forge.ran(), ["forge"], "smelt was done");
    assert_eq!(digests(&forge), digests(&undisturbed));
    forge.good(&["verify"]);
}

#[test]
fn what_cannot_be_published_is_made_again() {
    let forge = Forge::new();
    let resumable = |more: &[&str]| {
        let mut command = forge.command(&[RUN, more].concat());
        command.env("FAKE_RESUMABLE", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
        forge.finish(command.spawn().unwrap())
    };
    let said = resumable(&["--set", "smelt.end=link"]);
    assert!(said.code != 0 && said.err.contains("a link to a folder"), "{}", said.err);
    forge.ran();
    assert_eq!(resumable(&[]).code, 0);
    assert_eq!(forge.ran(), ["smelt", "forge"]);
}

fn together(runners: usize) {
    let forge = Forge::new();
    let started: Vec<_> = (0..runners).map(|_| forge.start(RUN)).collect();
    for child in started {
        let said = forge.finish(child);
        assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    }
    let mut ran = forge.ran();
    ran.sort();
    assert_eq!(ran, ["dig", "forge", "smelt"], "{runners} runners did one set of work");
    let alone = Forge::new();
    alone.good(RUN);
    assert_eq!(digests(&forge), digests(&alone));
}

#[test]
fn two_and_eight_runners_on_a_cold_cache_do_one_set_of_work() {
    together(2);
    together(8);
}

#[test]
fn a_lock_of_a_killed_runner_is_free_once_its_stage_has_ended() {
    let forge = Forge::new();
    let slow = &["run", "sword.toml", "--set", "smelt.seconds=3"];
    let mut first = forge.start(slow);
    let log = forge.path(".pipeline/runs/sword/1/smelt.log");
    forge.wait_for(|| fs_err::read_to_string(&log).is_ok_and(|text| text.contains("hello")));
    let orphans = children(first.id());
    first.kill().unwrap();
    first.wait().unwrap();
    // The orphan still writes into the work folder: nobody else may begin there.
    let second = forge.start(slow);
    let deadline = Instant::now() + Duration::from_mins(1);
    while Instant::now() < deadline {
        let ran = fs_err::read_to_string(forge.path("calls")).unwrap();
        // Alive after it was read, so alive when it was written.
        if !orphans.iter().any(|pid| alive(*pid)) {
            break;
        }
        assert_eq!(ran.matches("smelt run").count(), 1, "two stages in one work folder");
        thread::sleep(Duration::from_millis(20));
    }
    let said = forge.finish(second);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(forge.read("runs/sword/forge/out.txt"), "blade+default+iron");
}

/// Whether a process runs; one that has ended but that nobody has asked about does not.
fn alive(pid: u32) -> bool {
    fs_err::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

//! Law L3 on the five stages as they are: killed at any instant and run again, they end in the digests of an undisturbed run.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;
use store::Digest;

use crate::project::small;
use crate::support::{Sandbox, children, kill_tree, signal};

/// SIGKILLs that must hit a run under way; `CRASH_KILLS=200` for more.
const KILLS: u64 = 60;
/// Tries of one run that are killed before it may end.
const TRIES: usize = 8;
const STAGES: [&str; 5] = ["ingest", "encode", "bucket", "train", "generate"];

fn digests(sandbox: &Sandbox, runs: &str) -> [Value; 5] {
    STAGES.map(|stage| {
        let path = sandbox.path(runs).join("small").join(stage).join("manifest.json");
        let text = fs_err::read_to_string(path).expect("a manifest");
        serde_json::from_str::<Value>(&text).expect("JSON")["digest"].clone()
    })
}

/// Draw number `n` of those below `end`, the same in every run of the test with one seed.
fn draw(seed: u64, n: usize, end: u64) -> u64 {
    let digest = Digest::of_bytes(format!("{seed} {n}").as_bytes()).to_string();
    u64::from_str_radix(&digest[..15], 16).expect("hexadecimal") % end
}

#[test]
fn killed_at_random_the_real_stages_end_as_if_undisturbed() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (kills, seed) = (number("CRASH_KILLS").unwrap_or(KILLS), number("CRASH_SEED").unwrap_or(2026));
    let sandbox = small();
    let args =
        |cache: &str| ["run", "small.toml", "--threads", "1", "--cache", cache, "--runs", cache].map(str::to_owned);
    let run = |cache: &str| sandbox.pipeline(&args(cache).each_ref().map(String::as_str));
    let began = Instant::now();
    run("undisturbed").expect(0);
    let undisturbed = digests(&sandbox, "undisturbed");
    let span = began.elapsed().as_millis() as u64;

    let (mut hit, mut draws, mut round) = (0, 0, 0);
    let mut next = |end: u64| {
        draws += 1;
        draw(seed, draws, end)
    };
    let mut under_way = [0; 6];
    while hit < kills {
        round += 1;
        let cache = format!("killed-{round}");
        for _ in 0..TRIES {
            let mut command = sandbox.command(&args(&cache).each_ref().map(String::as_str));
            let mut runner = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a runner");
            // A try goes on from the last, so the later stages have their share.
            std::thread::sleep(Duration::from_millis(next(span * 2 / 3)));
            let stages = children(runner.id());
            if runner.try_wait().expect("a child").is_some() {
                break;
            }
            let live = STAGES.iter().position(|stage| !sandbox.path(&cache).join("artifacts").join(stage).exists());
            under_way[live.unwrap_or(STAGES.len())] += 1;
            // The runner, the stage alone, which the runner then reports, or both.
            match next(3) {
                1 if !stages.is_empty() => stages.iter().for_each(|stage| signal(stage, "KILL")),
                2 => kill_tree(runner.id()),
                _ => signal(&runner.id().to_string(), "KILL"),
            }
            hit += 1;
            runner.wait().expect("an ended runner");
        }
        run(&cache).expect(0);
        assert_eq!(digests(&sandbox, &cache), undisturbed, "round {round}, CRASH_SEED={seed}");
        sandbox.pipeline(&["verify", "--cache", &cache]).expect(0);
        eprintln!("{hit} kills in {round} rounds; before the artifact of {STAGES:?}, and after: {under_way:?}");
        fs_err::remove_dir_all(sandbox.path(&cache)).expect("a folder");
    }
}

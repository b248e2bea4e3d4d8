//! One stage as several processes, from outside: the same numbers, the same key, and one report when one of them dies.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fs_err::DirEntry;
use socket2::{Domain, Socket, Type};

use crate::project::{small, tiny_flux};
use crate::support::{Finished, Sandbox, finish, program};

const LOSSES: &str = "select step, sample_id, loss from losses order by 1, 2";

fn losses(sandbox: &Sandbox, cache: &str) -> Vec<(String, f64)> {
    let args = ["sql", "small.toml", "--cache", cache, "--runs", cache, LOSSES, "--format", "csv"];
    let csv = sandbox.pipeline(&args).expect(0).stdout;
    let row = |line: &str| {
        let (name, loss) = line.rsplit_once(',').expect("three columns");
        (name.to_owned(), loss.parse().expect("a number"))
    };
    csv.lines().skip(1).map(row).collect()
}

#[test]
fn two_processes_train_what_one_does_under_the_same_key() {
    let sandbox = small();
    let run = |cache: &str, ranks: &str, block: &str| {
        let args = ["run", "small.toml", "--until", "train", "--ranks", ranks, "--cache", cache, "--runs", cache];
        // In bf16, where the CPU has it, batches of other sizes round otherwise.
        let numbers = ["--set", "train.model.compute_dtype=float32"];
        let spread = ["--threads", "2", "--set", &format!("train.{block}={{}}")];
        sandbox.pipeline(&[&args[..], &numbers, &spread].concat()).expect(0)
    };
    run("one", "1", "ddp");
    let one = losses(&sandbox, "one");
    assert_eq!(one.len(), 4 * 8 - 2 * 4, "12 samples in steps of 8 and 4");
    for block in ["ddp", "fsdp"] {
        run(block, "2", block).says(&["on 2 ranks", "4 steps"]);
        for ((name, one), (other, two)) in one.iter().zip(&losses(&sandbox, block)) {
            assert_eq!(name, other);
            assert!((one - two).abs() < 1e-4 * one, "{block} {name}: {one} {two}");
        }
    }
    let key = |cache: &str| {
        let folder = sandbox.path(cache).join("artifacts/train");
        let mut keys = fs_err::read_dir(folder).expect("artifacts").map(|entry| entry.expect("an entry").file_name());
        keys.next().expect("one artifact")
    };
    assert!(key("one") == key("ddp") && key("one") == key("fsdp"));
}

/// Processes below `parent` that are this rank of a run.
fn ranks_below(parent: u32, rank: &str) -> Vec<u32> {
    let folders = fs_err::read_dir("/proc").expect("a Linux machine").filter_map(|entry| Some(entry.ok()?.path()));
    let is = |folder: &Path| -> Option<u32> {
        let stat = fs_err::read_to_string(folder.join("stat")).ok()?;
        let of: u32 = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
        let environment = fs_err::read(folder.join("environ")).ok()?;
        let wanted = format!("RANK={rank}");
        let found = environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes());
        if of == parent && found { folder.file_name()?.to_str()?.parse().ok() } else { None }
    };
    folders.filter_map(|folder| is(&folder)).collect()
}

/// Waits for `found`; a run that ends before that has failed the test.
fn wait_for<T>(child: &mut Child, mut found: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(child.try_wait().expect("a child").is_none(), "the run ended too early");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A finished checkpoint of a try whose folder is below `work`.
fn checkpoint(work: &Path) -> Option<DirEntry> {
    let tries = fs_err::read_dir(work).ok()?.filter_map(Result::ok);
    tries.map(|entry| entry.path().join("out")).find_map(|out| {
        let mut inside = fs_err::read_dir(out).ok()?.filter_map(Result::ok);
        inside.find(|entry| entry.file_name().to_string_lossy().starts_with("epoch_"))
    })
}

#[test]
fn a_killed_rank_is_started_again_to_the_same_bytes() {
    let sandbox = small();
    let start = |cache: &str| {
        let mut command = sandbox.command(&["run", "small.toml", "--until", "train", "--ranks", "2", "--threads", "2"]);
        command.args(["--cache", cache, "--runs", cache, "--max-restarts", "1", "--set", "train.fsdp={}"]);
        command.args([
            "--set",
            "train.step_scheduler.max_steps=80",
            "--set",
            "train.step_scheduler.ckpt_every_steps=2",
        ]);
        command.args(["--set", "train.checkpoint.is_async=true", "--set", "train.checkpoint.max_recent_checkpoints=2"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the runner starts")
    };
    let digest = |cache: &str| {
        let manifest =
            fs_err::read_to_string(sandbox.path(cache).join("small/train/manifest.json")).expect("a manifest");
        let manifest: serde_json::Value = serde_json::from_str(&manifest).expect("JSON");
        (manifest["key"].clone(), manifest["digest"].clone())
    };
    finish_child(start("undisturbed")).expect(0);
    let mut child = start("disturbed");
    wait_for(&mut child, || checkpoint(&sandbox.path("disturbed/work/train")));
    let runner = child.id();
    let victim = wait_for(&mut child, || ranks_below(runner, "1").first().copied());
    finish(Command::new("kill").args(["-9", &victim.to_string()])).expect(0);
    finish_child(child).expect(0).says(&["rank 1 of 2, crashed: killed by signal 9", "restart 1 of 1 on 2 ranks"]);
    assert_eq!(digest("undisturbed"), digest("disturbed"));
}

fn finish_child(child: Child) -> Finished {
    let output = child.wait_with_output().expect("the runner ends");
    Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn a_killed_rank_ends_the_run_everywhere_with_one_report() {
    let sandbox = small();
    sandbox.pipeline(&["run", "small.toml", "--until", "bucket"]).expect(0);
    let args = ["run", "small.toml", "--only", "train", "--ranks", "2", "--threads", "2", "--set", "train.ddp={}"];
    let mut command = sandbox.command(&args);
    command.args([
        "--set",
        "train.step_scheduler.max_steps=1000000",
        "--set",
        "train.step_scheduler.ckpt_every_steps=2",
    ]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the runner starts");
    // Under way: a checkpoint is there.
    let began = || checkpoint(&sandbox.path(".pipeline/work/train"));
    wait_for(&mut child, began);
    let runner = child.id();
    let victim = wait_for(&mut child, || ranks_below(runner, "1").first().copied());
    let other = ranks_below(runner, "0");
    finish(Command::new("kill").args(["-9", &victim.to_string()])).expect(0);

    let said = finish_child(child);
    let said = said.expect(1).says(&["`pipeline-train`, rank 1 of 2, crashed: killed by signal 9 (SIGKILL)"]);
    assert_eq!(said.text().matches("× ").count(), 1, "one report: {}", said.text());
    for rank in other {
        assert!(!Path::new(&format!("/proc/{rank}/exe")).exists(), "rank 0 lives on");
    }
    // What was reached is kept: the same command goes on from the last checkpoint.
    assert!(began().is_some());
}

/// `torchrun`, `srun` and `mpirun` start the same program with the same request; here its environment, set by hand.
#[test]
fn ranks_may_be_started_by_anyone() {
    let sandbox = small();
    sandbox.pipeline(&["run", "small.toml", "--until", "bucket"]).expect(0);
    let published = |stage: &str| fs_err::canonicalize(sandbox.path("runs/small").join(stage)).expect("an artifact");
    let request = serde_json::json!({
        "contract": 1,
        "parameters": {
            "base_model": tiny_flux(), "seed": 7, "optimizer": {"lr": 1e-3}, "ddp": {},
            "step_scheduler": {"max_steps": 4, "global_batch_size": 8, "local_batch_size": 4, "ckpt_every_steps": 2},
        },
        "base_dir": sandbox.path(""),
        "sources": {"model": {"kind": "path", "location": tiny_flux(), "commit": null, "parts": [], "digest": ""}},
        "inputs": {"shards": published("bucket"), "captions": published("encode")},
        "output": sandbox.path("by-hand"),
        "scratch": sandbox.path("scratch"),
        "previous": [],
        "device": "cpu",
        "threads": 1,
    });
    let request = sandbox.write("request.json", &request.to_string());
    // Held until the ranks have met, so that no other test gets it.
    let held = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    held.set_reuse_address(true).expect("a setting");
    held.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a port");
    let port = held.local_addr().ok().and_then(|address| address.as_socket()).expect("an address").port();
    let start = |rank: usize| {
        let mut command = Command::new(program("pipeline-train"));
        command
            .args(["run", "--request"])
            .arg(&request)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for name in spec::VARIABLES.into_iter().chain(spec::OF_LAUNCHERS) {
            command.env_remove(name);
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        // As `srun` says it.
        command.env("SLURM_PROCID", rank.to_string()).env("SLURM_NTASKS", "2").env("SLURM_LOCALID", rank.to_string());
        command.spawn().expect("the stage starts")
    };
    let running = [start(0), start(1)];
    let outputs = running.map(|child| child.wait_with_output().expect("the stage ends"));
    for output in &outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(String::from_utf8_lossy(&outputs[0].stdout).contains(r#""event":"done""#));
    assert!(outputs[1].stdout.is_empty(), "one rank speaks");
    assert!(sandbox.path("by-hand/epoch_1_step_3/model_index.json").exists());
}

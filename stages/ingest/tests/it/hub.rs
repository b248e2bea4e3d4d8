//! Data sets on a Hub that the test starts; the program runs as a process, since it reads the environment.

use std::io::Write;
use std::process::{Command, Stdio};

use hub::testing::{Faults, Loopback};
use hub::{Hub, Options, Repo};
use serde_json::{Value, json};
use tables::{Reject, Sample};

use crate::support::{World, png, write_parquet};

/// Last event, samples and rejects of a run.
type Ran = (Value, Vec<Sample>, Vec<Reject>);

fn run(world: &World, endpoint: &str, offline: bool, id: &str, commit: &str) -> Ran {
    let output = world.path("artifact");
    let _ = fs_err::remove_dir_all(&output);
    fs_err::create_dir_all(&output).unwrap();
    let source = json!({"kind": "hub_dataset", "location": id, "commit": commit, "parts": [], "digest": ""});
    let request = json!({
        "contract": stage::CONTRACT,
        "parameters": {"dataset": format!("hf://datasets/{id}")},
        "base_dir": world.path(""),
        "sources": {"dataset": source},
        "inputs": {},
        "output": output,
        "scratch": world.path("scratch"),
        "previous": [],
        "device": "cpu",
        "threads": 2,
    });
    let mut child = Command::new(env!("CARGO_BIN_EXE_pipeline-ingest"))
        .args(["run", "--request", "-"])
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", world.path("hf"))
        .env("HF_HUB_OFFLINE", if offline { "1" } else { "0" })
        .env_remove("HF_HUB_CACHE")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(request.to_string().as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let last = out.stdout.split(|b| *b == b'\n').rfind(|line| !line.is_empty()).unwrap();
    let last: Value = serde_json::from_slice(last).unwrap();
    if last["event"] == "failed" {
        return (last, Vec::new(), Vec::new());
    }
    let samples = tables::read(&output.join("samples")).unwrap();
    (last, samples, tables::read(&output.join("rejects.parquet")).unwrap())
}

#[test]
fn hub_data_sets_are_read_as_local_ones_also_offline_and_through_trouble() {
    let world = World::new();
    let rows: Vec<_> = (0..5).map(|i| (Some(png(i)), None, Some("from parquet"))).collect();
    write_parquet(&world.path("one/data/train-00000-of-00002.parquet"), "image", "text", &rows[..3]);
    write_parquet(&world.path("one/data/train-00001-of-00002.parquet"), "image", "text", &rows[3..]);
    world.write("one/README.md", "# card").write("one/.gitattributes", "x");
    for i in 0..3 {
        world.write(&format!("two/im ages/{i}.png"), png(i));
    }
    world.write(
        "two/im ages/metadata.jsonl",
        (0..4)
            .map(|i| json!({"file_name": format!("{i}.png"), "text": format!("n{i}")}).to_string() + "\n")
            .collect::<Vec<_>>()
            .concat(),
    );
    let server = Loopback::start().dataset("o/one", &world.path("one")).dataset("o/two", &world.path("two"));
    let options = Options { endpoint: Some(server.endpoint().to_owned()), cache: world.path("hf/hub"), ..options() };
    let hub = Hub::new(options).unwrap();
    let commit = |id: &str| hub.resolve(&Repo::dataset(id).unwrap(), None).unwrap().to_string();
    let go = |offline: bool, id: &str| run(&world, server.endpoint(), offline, id, &commit(id));
    let told = |samples: &[Sample]| {
        samples.iter().map(|s| (s.sample_id.clone(), s.source.clone(), s.caption.clone())).collect::<Vec<_>>()
    };

    server.misbehave(Faults { cut_after: Some(700), every: Some((5, 500)), ..Faults::default() });
    let (done, one, _) = go(false, "o/one");
    assert_eq!(done["event"], "done", "{done}");
    assert_eq!(told(&one), told(&world.run(json!({"dataset": "one"})).unwrap().samples));
    assert_eq!(one.len(), 5);
    let (_, two, rejects) = go(false, "o/two");
    assert_eq!((two[2].source.as_str(), two[2].caption.as_str()), ("im ages/2.png", "n2"));
    assert_eq!((rejects[0].source.as_str(), rejects[0].reason.as_str()), ("im ages/metadata.jsonl:4", "missing_file"));

    server.misbehave(Faults::default());
    let pinned = commit("o/one");
    server.forget();
    assert_eq!(told(&run(&world, server.endpoint(), true, "o/one", &pinned).1), told(&one));
    assert_eq!(server.requests(), Vec::<String>::new());
    let (failed, ..) = run(&world, server.endpoint(), true, "o/gone", &"0".repeat(40));
    assert_eq!((failed["event"].as_str(), failed["exit"].as_i64()), (Some("failed"), Some(7)));
    assert!(failed["problem"]["message"].as_str().unwrap().contains("HF_HUB_OFFLINE"), "{failed}");
}

/// Runs, and holds each file that was fetched against the files that count: a change of it must be a change of the identity.
fn told_and_counted(world: &World, server: &Loopback, id: &str) -> (Vec<(String, String)>, Vec<(String, String)>) {
    let options = Options { endpoint: Some(server.endpoint().to_owned()), cache: world.path("hf/hub"), ..options() };
    let (hub, repo) = (Hub::new(options).unwrap(), Repo::dataset(id).unwrap());
    let parts = world.check(json!({"dataset": format!("hf://datasets/{id}")})).sources.remove(0).parts;
    let counted = || {
        let files = hub.files(&repo, &hub.resolve(&repo, None).unwrap()).unwrap().into_iter();
        let files = files.filter(|file| spec::glob::matches_any(&parts, &file.path));
        files.map(|file| (file.path, file.identity)).collect::<Vec<_>>()
    };
    let before = counted();
    let commit = hub.resolve(&repo, None).unwrap();
    server.forget();
    let (done, samples, rejects) = run(world, server.endpoint(), false, id, commit.as_str());
    assert_eq!(done["event"], "done", "{done}");
    let marker = format!("/resolve/{commit}/");
    let requests = server.requests();
    let fetched = requests.iter().filter_map(|line| line.split_once(&marker)?.1.split(' ').next());
    let fetched: std::collections::BTreeSet<&str> = fetched.collect();
    assert!(fetched.len() > 2, "{requests:?}");
    for path in fetched {
        let place = world.path("served").join(path);
        let bytes = fs_err::read(&place).unwrap();
        fs_err::write(&place, [bytes.as_slice(), b"!"].concat()).unwrap();
        assert_ne!(counted(), before, "`{path}` was read and does not count");
        fs_err::write(&place, bytes).unwrap();
        assert_eq!(counted(), before);
    }
    for path in ["README.md", ".gitattributes", ".cache/x.png"] {
        world.write(&format!("served/{path}"), "other");
        assert_eq!(counted(), before, "{path}");
    }
    let samples = samples.into_iter().map(|s| (s.source, s.caption)).collect();
    (samples, rejects.into_iter().map(|r| (r.source, r.reason)).collect())
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

#[test]
fn whatever_metadata_names_counts_whatever_its_name() {
    let world = World::new();
    world.write("served/README.md", "# card").write("served/.gitattributes", "x").write("served/archive.zip", "PK");
    let names = ["images/0001", "images/Photo.Png", "images/x.dat", ".hidden/a.png", "README.md", "images/gone"];
    for (seed, name) in names[..4].iter().enumerate() {
        world.write(&format!("served/{name}"), png(seed as u8));
    }
    let rows = names.map(|name| json!({"file_name": name, "text": "of it"}).to_string());
    world.write("served/metadata.jsonl", rows.join("\n"));
    let server = Loopback::start().dataset("o/any", &world.path("served"));
    let (samples, rejects) = told_and_counted(&world, &server, "o/any");
    assert_eq!(samples, pairs(&[("images/0001", "of it"), ("images/Photo.Png", "of it"), ("images/x.dat", "of it")]));
    let missing = ["metadata.jsonl:4", "metadata.jsonl:5", "metadata.jsonl:6"].map(|source| (source, "missing_file"));
    assert_eq!(rejects, pairs(&missing));
}

#[test]
fn loose_files_count_whatever_their_case_and_what_is_no_picture_is_not_fetched() {
    let world = World::new();
    for (seed, (name, caption)) in
        [("a.Jpg", "a.txt"), ("deep/0001", "deep/0001.Txt"), ("c.PNG", "c.caption")].into_iter().enumerate()
    {
        world.write(&format!("served/{name}"), png(seed as u8)).write(&format!("served/{caption}"), "of it");
    }
    world.write("served/README.md", "# card").write("served/all.Zip", "PK").write("served/load.py", "import os");
    let server = Loopback::start().dataset("o/loose", &world.path("served"));
    let (samples, rejects) = told_and_counted(&world, &server, "o/loose");
    assert_eq!(samples, pairs(&[("a.Jpg", "of it"), ("c.PNG", "of it"), ("deep/0001", "of it")]));
    assert_eq!(rejects, pairs(&[("all.Zip", "unsupported"), ("load.py", "unsupported")]));
    let requests = server.requests().concat();
    assert!(requests.contains("deep/0001") && !requests.contains("all.Zip") && !requests.contains("load.py"));
}

fn options() -> Options {
    Options {
        endpoint: None,
        cache: std::path::PathBuf::new(),
        token: None,
        offline: false,
        attempts: 5,
        base_delay: std::time::Duration::from_millis(1),
        silence: std::time::Duration::from_secs(10),
    }
}

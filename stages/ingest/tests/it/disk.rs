//! What is there and cannot be read: the run ends, and nothing is concluded about the data set.

use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use stage::Exit;

use crate::support::{World, png, write_parquet};

/// More rows than are read at once, so that what happens at the first refusal comes before the last row is read.
const ROWS: usize = 70;

fn side_cars(world: &World) {
    for i in 0..ROWS {
        world.write(&format!("set/{i:02}.png"), if i == 0 { b"no picture".to_vec() } else { png(1) });
        world.write(&format!("set/{i:02}.txt"), "a caption");
    }
}

fn metadata(world: &World) {
    side_cars(world);
    let row = |i| json!({"file_name": format!("{i:02}.png"), "text": "a caption"}).to_string();
    world.write("set/metadata.jsonl", (0..ROWS).map(row).collect::<Vec<_>>().join("\n"));
}

fn parquet(world: &World) {
    world.write("set/69.png", png(1));
    let rows: Vec<_> = (0..ROWS).map(|i| ((i > 0).then(|| png(1)), None, Some("a caption"))).collect();
    write_parquet(&world.path("set/a.parquet"), "image", "text", &rows);
    write_parquet(&world.path("set/b.parquet"), "image", "text", &[(None, Some("69.png"), Some("a caption"))]);
}

/// A kind of data set.
type Set = fn(&World);

#[test]
fn what_cannot_be_read_any_more_ends_the_run_and_is_no_reject() {
    let folder = |place: &Path| fs_err::create_dir(place).unwrap();
    let link_to_itself = |place: &Path| symlink(place, place).unwrap();
    // What, in which data set, and what lies in the place of which file before its turn comes.
    let cases: [(&str, Set, &str, fn(&Path)); 5] = [
        ("a picture that is listed", side_cars, "69.png", folder),
        ("a caption beside it", side_cars, "69.txt", folder),
        ("a file that metadata names", metadata, "69.png", link_to_itself),
        ("a Parquet file", parquet, "b.parquet", folder),
        ("a file that a Parquet file names", parquet, "69.png", link_to_itself),
    ];
    for (what, set, file, put) in cases {
        let world = World::new();
        set(&world);
        assert!(world.run(json!({"dataset": "set"})).is_ok(), "{what}");
        let place = world.path("set").join(file);
        let at = place.clone();
        let failure = world.run_while(json!({"dataset": "set"}), move || {
            fs_err::remove_file(&at).unwrap();
            put(&at);
        });
        let failure = failure.expect_err(what);
        assert_eq!(failure.exit, Exit::Io, "{what}: {failure:?}");
        assert!(failure.problem.message.contains(&place.display().to_string()), "{what}: {failure:?}");
        assert!(failure.problem.help.unwrap().contains("run again"), "{what}");
    }
}

/// Last event of the program on `set`, run as somebody who may not read everything, and whether it refused a row; `None`
/// where that cannot be arranged.
fn run_as_somebody(world: &World) -> Option<(Value, bool)> {
    let output = world.path("artifact");
    let _ = fs_err::remove_dir_all(&output);
    fs_err::create_dir_all(&output).unwrap();
    let source = json!({"kind": "path", "location": world.path("set"), "commit": null, "parts": [], "digest": ""});
    let request = json!({
        "contract": stage::CONTRACT, "parameters": {"dataset": "set"}, "base_dir": world.path(""),
        "sources": {"dataset": source}, "inputs": {}, "output": output, "scratch": world.path("scratch"),
        "previous": [], "device": "cpu", "threads": 2,
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_pipeline-ingest"));
    command.args(["run", "--request", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    if fs_err::metadata(&output).unwrap().uid() == 0 {
        // Nothing is closed to root: be nobody.
        chown(&output, Some(65534), Some(65534)).unwrap();
        fs_err::set_permissions(world.path(""), PermissionsExt::from_mode(0o755)).unwrap();
        command.uid(65534).gid(65534);
    }
    let mut child = match command.spawn() {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return None,
        child => child.unwrap(),
    };
    child.stdin.take().unwrap().write_all(request.to_string().as_bytes()).unwrap();
    let out = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    let last = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    Some((last, out.contains("\"rejected\"")))
}

#[test]
fn what_may_not_be_read_ends_the_run_and_is_no_reject() {
    let lay = |world: &World, table: &str| {
        world
            .write("set/deep/a.png", png(1))
            .write("set/deep/a.txt", "a")
            .write("set/b.png", png(2))
            .write("set/b.txt", "b");
        match table {
            "metadata.csv" => drop(world.write("set/metadata.csv", "file_name,text\nb.png,b\ndeep/a.png,a\n")),
            "x.parquet" => {
                let rows = [(None, Some("b.png"), Some("b"))];
                write_parquet(&world.path("set/x.parquet"), "image", "text", &rows);
            }
            _ => {}
        }
    };
    let cases = [
        ("", "b.png"),
        ("", "b.txt"),
        ("", "deep"),
        ("metadata.csv", "metadata.csv"),
        ("metadata.csv", "b.png"),
        ("x.parquet", "x.parquet"),
        ("x.parquet", "b.png"),
    ];
    for (table, closed) in cases {
        let world = World::new();
        lay(&world, table);
        let Some((done, _)) = run_as_somebody(&world) else {
            eprintln!("skipped: root may read anything, and nobody may not run the program");
            return;
        };
        assert_eq!(done["event"], "done", "{done}");
        let place = world.path("set").join(closed);
        fs_err::set_permissions(&place, PermissionsExt::from_mode(0o000)).unwrap();
        let (failed, refused) = run_as_somebody(&world).unwrap();
        assert_eq!(
            (failed["event"].as_str(), failed["exit"].as_i64()),
            (Some("failed"), Some(6)),
            "{closed}: {failed}"
        );
        assert!(failed["problem"]["message"].as_str().unwrap().contains(place.to_str().unwrap()), "{closed}: {failed}");
        assert!(!refused, "{closed}");
        fs_err::set_permissions(&place, PermissionsExt::from_mode(0o755)).unwrap();
    }
}

#[test]
fn links_to_what_is_no_file_are_refused_and_not_waited_for() {
    let world = World::new();
    world.write("set/a.png", png(1)).write("set/a.txt", "a");
    let _listener = std::os::unix::net::UnixListener::bind(world.path("set/pipe")).unwrap();
    symlink("pipe", world.path("set/link.png")).unwrap();
    let ran = world.run(json!({"dataset": "set"})).unwrap();
    assert_eq!(ran.captions(), [("a.png", "a")]);
    assert_eq!(ran.reasons(), [("link.png", "unsupported"), ("pipe", "unsupported")]);
}

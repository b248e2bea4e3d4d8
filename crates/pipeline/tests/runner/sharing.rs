//! Results shared by way of a remote: a folder, and a real S3-compatible server.

use std::path::Path;

use remote::testing::S3;

use crate::support::{Forge, Said, stage_line};

/// A forge with a folder to share by; its address.
fn sharing() -> (Forge, String) {
    let forge = Forge::new();
    fs_err::create_dir(forge.path("shared")).unwrap();
    let address = format!("file://{}", forge.path("shared").display());
    (forge, address)
}

fn files_of(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs_err::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_of(&path) } else { vec![path] }).collect()
}

#[test]
fn what_one_made_others_fetch() {
    let (forge, address) = sharing();
    let first = forge.good(&["run", "sword.toml", "--remote", &address]);
    assert_eq!(forge.ran(), ["dig", "smelt", "forge"]);
    assert!(stage_line(&first.err, "dig    pushed").contains("1 files"), "{}", first.err);

    let plan = forge.good(&["plan", "sword.toml", "--cache", "other", "--remote", &address]).out;
    assert!(stage_line(&plan, "forge").starts_with("forge  remote  2 rows, "), "{plan}");
    assert!(plan.contains("3 to fetch from file://") && !plan.contains("to run"), "{plan}");
    assert!(stage_line(&forge.good(&["plan", "sword.toml", "--cache", "other"]).out, "dig").contains("to run"));

    let second = forge.good(&["run", "sword.toml", "--cache", "other", "--remote", &address]);
    assert_eq!(forge.ran(), Vec::<String>::new(), "{}", second.err);
    assert!(second.out.contains("done: 3 fetched"), "{}", second.out);
    assert_eq!(forge.read("runs/sword/forge/out.txt"), "blade+default+iron");
    forge.good(&["verify", "--cache", "other"]);
    // From now on it is there, and the remote need not be.
    let third = forge.good(&["run", "sword.toml", "--cache", "other"]);
    assert!(third.out.contains("nothing to do: all 3 stages are cached"), "{}", third.out);
    let record: serde_json::Value = serde_json::from_str(&forge.read("other/runs/sword/1/run.json")).unwrap();
    assert!(record["stages"][0]["reason"].as_str().unwrap().starts_with("fetched from file://"), "{record}");

    // A changed value: what comes before it is fetched, the rest is made, and shared.
    let set = ["run", "sword.toml", "--remote", &address, "--set", "forge.text=axe"];
    forge.good(&[&set[..], &["--cache", "third"]].concat());
    assert_eq!(forge.ran(), ["forge"]);
    forge.good(&[&set[..], &["--cache", "fourth", "--only", "forge"]].concat());
    assert_eq!(forge.ran(), Vec::<String>::new(), "what `--only` needs may come from the remote");
    // Forced is made here.
    forge.good(&[&set[..], &["--cache", "fifth", "--force", "smelt"]].concat());
    assert_eq!(forge.ran(), ["smelt"]);
}

#[test]
fn results_of_before_are_shared_by_the_next_run_or_by_push() {
    let (forge, address) = sharing();
    forge.good(&["run", "sword.toml"]);
    let said = forge.run(&["pull", "sword.toml", "--remote", &address, "--cache", "other"]);
    assert_eq!(said.code, 4, "{}", said.err);
    assert!(said.err.contains("3 of 3 artifacts are not in `file://"), "{}", said.err);
    forge.good(&["push", "sword.toml", "--remote", &address]);
    let said = forge.good(&["push", "sword.toml", "--remote", &address]);
    assert!(stage_line(&said.err, "smelt  pushed").contains("0 files"), "{}", said.err);
    let mut by_environment = forge.command(&["pull", "sword.toml", "--cache", "other"]);
    assert!(by_environment.env("PIPELINE_REMOTE", &address).output().unwrap().status.success());
    forge.ran();
    forge.good(&["run", "sword.toml", "--cache", "other"]);
    assert_eq!(forge.ran(), Vec::<String>::new());

    let (forge, address) = sharing();
    forge.good(&["run", "sword.toml"]);
    let said = forge.good(&["run", "sword.toml", "--remote", &address]);
    assert!(said.err.contains("pushed") && said.out.contains("nothing to do"), "{}{}", said.out, said.err);
    assert!(
        !forge.good(&["run", "sword.toml", "--remote", &address]).err.contains("pushed"),
        "it is known to be there"
    );
    forge.good(&["pull", "sword.toml", "--remote", &address, "--cache", "other"]);
}

#[test]
fn a_remote_that_fails_is_said_and_the_run_goes_on() {
    let forge = Forge::new();
    for (n, address) in ["file:///nowhere/at/all", "s3://box/team"].into_iter().enumerate() {
        let run = |args: &[&str]| -> Said {
            let mut command = forge.command(args);
            // A port that nobody listens at.
            let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
            command.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")).env("AWS_ALLOW_HTTP", "true");
            command.env("AWS_ACCESS_KEY_ID", "hush-hush").env("AWS_SECRET_ACCESS_KEY", "hush-hush");
            let output = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            forge.finish(output.spawn().unwrap())
        };
        let cache = format!("cache-{n}");
        let said = run(&["run", "sword.toml", "--remote", address, "--cache", &cache]);
        assert_eq!((said.code, forge.ran().len()), (0, 3), "{}", said.err);
        assert_eq!(said.err.matches("the run goes on without the remote").count(), 1, "said once: {}", said.err);
        let plan = run(&["plan", "sword.toml", "--remote", address, "--cache", "empty"]);
        assert!(plan.out.contains("note: the ") && plan.out.contains("3 to run"), "{}", plan.out);
        for command in ["push", "pull"] {
            let said = run(&[command, "sword.toml", "--remote", address, "--cache", &cache]);
            // A cache that has everything needs nothing from anywhere.
            let expected = if command == "pull" && n == 1 { 0 } else { 7 };
            assert_eq!(said.code, expected, "{command} {address}: {}", said.err);
            let said = run(&[command, "sword.toml", "--remote", address, "--cache", "empty"]);
            assert!([4, 7].contains(&said.code), "{command} {address}: {}", said.err);
        }
    }
    for file in files_of(&forge.path("")) {
        let bytes = fs_err::read(&file).unwrap();
        assert!(!bytes.windows(9).any(|window| window == b"hush-hush"), "a secret lies in {}", file.display());
    }
}

#[test]
fn an_address_that_cannot_work_or_holds_a_secret_is_a_usage_error() {
    let forge = Forge::new();
    for address in ["s3://KEY:hush-hush@box/x", "ftp://hush-hush", "az://box/x?sig=hush-hush"] {
        for command in ["run", "plan", "push", "pull"] {
            let said = forge.run(&[command, "sword.toml", "--remote", address]);
            assert_eq!(said.code, 2, "{command} {address}: {}", said.err);
            assert!(!format!("{}{}", said.out, said.err).contains("hush-hush"), "{}", said.err);
        }
    }
    assert_eq!(forge.run(&["push", "sword.toml"]).code, 2);
    assert_eq!(forge.ran(), Vec::<String>::new());
}

#[test]
fn a_flipped_bit_there_is_named_made_here_and_put_right() {
    let (forge, address) = sharing();
    forge.good(&["run", "sword.toml", "--remote", &address]);
    forge.ran();
    let damaged = "default+iron";
    let objects = files_of(&forge.path("shared/objects"));
    let object = objects.iter().find(|path| fs_err::read(path).unwrap() == damaged.as_bytes()).unwrap();
    fs_err::write(object, "default+iroN").unwrap();

    let said = forge.run(&["pull", "sword.toml", "--cache", "other", "--remote", &address]);
    assert_eq!(said.code, 4, "{}", said.err);
    let name = object.file_name().unwrap().to_string_lossy().into_owned();
    assert!(said.err.contains(&name) && said.err.contains("is damaged"), "{}", said.err);
    assert!(!forge.path("other/artifacts/smelt").exists());

    let said = forge.good(&["run", "sword.toml", "--cache", "third", "--remote", &address]);
    assert_eq!(forge.ran(), ["smelt"], "the same bytes came out, so what follows is fetched");
    assert!(said.err.contains("is damaged") && said.err.contains("it is not used"), "{}", said.err);
    assert_eq!(fs_err::read(object).unwrap(), damaged.as_bytes(), "the run put it right");
    forge.good(&["pull", "sword.toml", "--cache", "other", "--remote", &address]);
    assert_eq!(forge.ran(), Vec::<String>::new());
}

/// A harm to the remote, by the path of an object and of a manifest there.
type Harm = fn(&Path, &Path);

const HARMS: [(&str, Harm); 5] = [
    ("a flipped bit", |object, _| fs_err::write(object, "default+iroN").unwrap()),
    ("a lost end", |object, _| fs_err::write(object, "default").unwrap()),
    ("a lost object", |object, _| fs_err::remove_file(object).unwrap()),
    ("a lost manifest", |_, manifest| fs_err::remove_file(manifest).unwrap()),
    ("half a manifest", |_, manifest| fs_err::write(manifest, "{").unwrap()),
];

/// A forge that made and pushed everything and has nothing of `smelt` left, while the remote was harmed there.
fn harmed(harm: Harm) -> (Forge, String) {
    let (forge, address) = sharing();
    // What is pushed is remembered, and believed by the second.
    for _ in 0..2 {
        forge.good(&["run", "sword.toml", "--remote", &address]);
    }
    let objects = files_of(&forge.path("shared/objects"));
    let object = objects.iter().find(|path| fs_err::read(path).unwrap() == b"default+iron").unwrap();
    harm(object, &files_of(&forge.path("shared/artifacts/smelt"))[0]);
    for lost in [".pipeline/artifacts/smelt", ".pipeline/objects"] {
        fs_err::remove_dir_all(forge.path(lost)).unwrap();
    }
    forge.ran();
    (forge, address)
}

#[track_caller]
fn is_whole_for_others(forge: &Forge, address: &str, what: &str) {
    forge.ran();
    let said = forge.run(&["pull", "sword.toml", "--cache", "other", "--remote", address]);
    assert_eq!((said.code, forge.ran().len()), (0, 0), "{what}: {}", said.err);
}

#[test]
fn who_pushed_what_is_harmed_there_since_makes_it_and_pushes_it_again() {
    for (what, harm) in HARMS {
        let (forge, address) = harmed(harm);
        let said = forge.good(&["run", "sword.toml", "--remote", &address]);
        assert_eq!(forge.ran(), ["smelt"], "{what}: {}", said.err);
        is_whole_for_others(&forge, &address, what);
        let again = forge.good(&["run", "sword.toml", "--remote", &address]).err;
        assert!(!again.contains("pushed"), "{what}: it is known to be there: {again}");
    }
}

#[test]
fn harm_that_one_command_finds_is_put_right_by_a_later_one() {
    for (what, harm) in HARMS {
        for later in ["run", "push"] {
            let (forge, address) = harmed(harm);
            let said = forge.run(&["pull", "sword.toml", "--remote", &address]);
            assert_eq!(said.code, 4, "{what}: {}", said.err);
            forge.good(&["run", "sword.toml"]);
            assert_eq!(forge.ran(), ["smelt"]);
            forge.good(&[later, "sword.toml", "--remote", &address]);
            is_whole_for_others(&forge, &address, &format!("{what}, {later}"));
        }
    }
}

#[test]
fn what_is_damaged_here_comes_from_the_remote() {
    let (forge, address) = sharing();
    forge.good(&["run", "sword.toml", "--remote", &address]);
    forge.ran();
    let path = forge.path("runs/sword/smelt/out.txt");
    fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    fs_err::write(&path, "default+iroN").unwrap();
    let said = forge.good(&["run", "sword.toml", "--remote", &address]);
    assert_eq!(forge.ran(), Vec::<String>::new(), "{}", said.err);
    assert_eq!(forge.read("runs/sword/smelt/out.txt"), "default+iron");
}

#[test]
fn eight_runners_fetch_once() {
    let (forge, address) = sharing();
    forge.good(&["run", "sword.toml", "--remote", &address]);
    forge.ran();
    let args = ["run", "sword.toml", "--cache", "other", "--remote", &address];
    let started: Vec<_> = (0..8).map(|_| forge.start(&args)).collect();
    let said: Vec<Said> = started.into_iter().map(|child| forge.finish(child)).collect();
    assert!(said.iter().all(|said| said.code == 0), "{}", said[0].err);
    let fetched: usize = said.iter().map(|said| said.err.matches("  fetched  ").count()).sum();
    assert_eq!((fetched, forge.ran()), (3, Vec::new()));
}

/// CI has the recipe and the programs, and neither the data nor a cache.
#[test]
fn a_remote_answers_for_sources_that_are_absent() {
    let (forge, address) = sharing();
    forge.good(&["run", "sword.toml", "--remote", &address]);
    forge.ran();
    fs_err::remove_dir_all(forge.path("mine")).unwrap();
    let args = ["run", "sword.toml", "--cache", "other", "--remote", &address];
    let said = forge.good(&args);
    assert!(
        said.out.contains("done: 3 fetched") && said.err.contains("`mine` is not there"),
        "{}{}",
        said.out,
        said.err
    );
    assert_eq!(forge.ran(), Vec::<String>::new());
    // From now on by its own record.
    assert!(forge.good(&args[..4]).out.contains("nothing to do"));
    forge.good(&["pull", "sword.toml", "--cache", "third", "--remote", &address]);
    let said = forge.run(&["run", "sword.toml", "--cache", "fourth"]);
    assert_eq!(said.code, 4, "{}", said.err);
    // Data that is there counts as it is.
    forge.write("mine/a.txt", "gold");
    let plan = forge.good(&["plan", "sword.toml", "--cache", "fifth", "--remote", &address]).out;
    assert!(stage_line(&plan, "dig").contains("to run"), "{plan}");
}

/// Two projects ask the same of other data, which is absent.
#[test]
fn a_project_of_another_name_is_never_given_this_ones_results() {
    let (ours, address) = sharing();
    ours.good(&["run", "sword.toml", "--remote", &address]);
    let theirs = Forge::new();
    theirs.edit("sword.toml", "name = \"sword\"", "name = \"shield\"");
    fs_err::remove_dir_all(theirs.path("mine")).unwrap();
    let cache = ours.path(".pipeline").display().to_string();
    for place in [&["--remote", &address][..], &["--cache", &cache], &["--cache", &cache, "--remote", &address]] {
        for command in ["run", "plan"] {
            let said = theirs.run(&[&[command, "sword.toml"], place].concat());
            assert_eq!(said.code, 4, "{command} {place:?}: {}{}", said.out, said.err);
            assert!(said.err.contains("mine"), "{}", said.err);
        }
    }
    assert_eq!((theirs.ran(), theirs.path("runs").exists()), (Vec::new(), false));

    // With data there, it makes its own; from then on each is known by its own.
    theirs.write("mine/a.txt", "gold");
    theirs.good(&["run", "sword.toml", "--remote", &address]);
    assert_eq!(theirs.ran(), ["dig"], "whose bytes are the same");
    let key = |forge: &Forge, folder: &str| {
        let record: serde_json::Value = serde_json::from_str(&forge.read(&format!("{folder}/1/run.json"))).unwrap();
        record["stages"].as_array().unwrap().iter().find(|stage| stage["stage"] == "dig").unwrap()["key"].clone()
    };
    for (forge, name) in [(&ours, "sword"), (&theirs, "shield")] {
        fs_err::remove_dir_all(forge.path("mine")).unwrap();
        let said = forge.good(&["run", "sword.toml", "--cache", "other", "--remote", &address]);
        assert!(said.out.contains("done: 3 fetched"), "{}", said.out);
        assert_eq!(key(forge, &format!("other/runs/{name}")), key(forge, &format!(".pipeline/runs/{name}")));
    }
    assert_ne!(key(&ours, "other/runs/sword"), key(&theirs, "other/runs/shield"));
}

#[test]
fn a_real_s3_server_holds_what_a_team_shares() {
    let Some(server) = S3::start(Path::new(env!("CARGO_TARGET_TMPDIR"))) else { return };
    server.make_bucket("box");
    let forge = Forge::new();
    let run = |args: &[&str]| {
        let mut command = forge.command(&[args, &["--remote", "s3://box/team"]].concat());
        command.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{}", server.port())).env("AWS_ALLOW_HTTP", "true");
        command
            .env("AWS_ACCESS_KEY_ID", "test")
            .env("AWS_SECRET_ACCESS_KEY", "hush-hush")
            .env("AWS_REGION", "eu-north-1");
        let output = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let said = forge.finish(output.spawn().unwrap());
        assert_eq!(said.code, 0, "{args:?}\n{}{}", said.out, said.err);
        assert!(!format!("{}{}", said.out, said.err).contains("hush-hush"));
        said
    };
    run(&["run", "sword.toml"]);
    assert_eq!(forge.ran().len(), 3);
    assert!(run(&["run", "sword.toml", "--cache", "other"]).out.contains("done: 3 fetched"));
    run(&["push", "sword.toml"]);
    run(&["pull", "sword.toml", "--cache", "third"]);
    assert_eq!(forge.ran(), Vec::<String>::new());
    let there = server.list("box");
    assert_eq!(there.iter().filter(|key| key.starts_with("team/artifacts/")).count(), 3, "{there:?}");
    for key in &there {
        let bytes = server.get(&format!("/box/{key}"));
        assert!(!String::from_utf8_lossy(&bytes).contains("hush-hush"), "{key}");
    }
}

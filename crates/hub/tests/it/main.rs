//! The client against a Hub on the loopback that misbehaves.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hub::testing::{Faults, Loopback};
use hub::{Commit, Error, Hub, Options, Repo, quiet};

struct World {
    folder: tempfile::TempDir,
    server: Loopback,
}

/// A data set with a large and a small file in folders.
fn world() -> World {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("repo");
    fs_err::create_dir_all(root.join("data/deep er")).unwrap();
    fs_err::write(root.join("README.md"), "# small").unwrap();
    fs_err::write(root.join("data/big.bin"), (0..400_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    fs_err::write(root.join("data/deep er/empty #1.txt"), "").unwrap();
    let server = Loopback::start().dataset("o/n", &root).model("o/m", &root);
    World { folder, server }
}

impl World {
    fn options(&self) -> Options {
        Options {
            endpoint: Some(self.server.endpoint().to_owned()),
            cache: self.folder.path().join("cache"),
            token: None,
            offline: false,
            attempts: 4,
            base_delay: Duration::from_millis(1),
            silence: Duration::from_secs(10),
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.options()).unwrap()
    }

    fn offline(&self) -> Hub {
        Hub::new(Options { offline: true, ..self.options() }).unwrap()
    }

    fn source(&self, path: &str) -> PathBuf {
        self.folder.path().join("repo").join(path)
    }
}

fn repo() -> Repo {
    Repo::dataset("o/n").unwrap()
}

fn same(a: &Path, b: &Path) -> bool {
    fs_err::read(a).unwrap() == fs_err::read(b).unwrap()
}

#[test]
fn a_data_set_is_resolved_listed_and_fetched_once() {
    let world = world();
    let hub = world.hub();
    let commit = hub.resolve(&repo(), None).unwrap();
    let files = hub.files(&repo(), &commit).unwrap();
    let names: Vec<_> = files.iter().map(|f| (f.path.as_str(), f.size, f.identity.len())).collect();
    assert_eq!(names, [("README.md", 7, 40), ("data/big.bin", 1_600_000, 64), ("data/deep er/empty #1.txt", 0, 40)]);
    let root = hub.snapshot(&repo(), &commit, &["data/*"], &quiet).unwrap();
    assert!(same(&root.join("data/big.bin"), &world.source("data/big.bin")));
    assert_eq!(fs_err::read(root.join("data/deep er/empty #1.txt")).unwrap(), b"");
    assert!(!root.join("README.md").exists(), "only what was asked for");
    world.server.forget();
    let again = world.hub();
    again.snapshot(&repo(), &commit, &["data/*"], &quiet).unwrap();
    again.files(&repo(), &commit).unwrap();
    assert_eq!(world.server.requests(), Vec::<String>::new(), "a cached commit needs no request");
}

#[test]
fn offline_gives_the_same_answers_from_the_cache_and_says_what_is_missing() {
    let world = world();
    let hub = world.hub();
    let commit = hub.resolve(&repo(), None).unwrap();
    let files = hub.files(&repo(), &commit).unwrap();
    hub.fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap();
    world.server.forget();
    let offline = world.offline();
    assert_eq!(offline.resolve(&repo(), None).unwrap(), commit);
    assert_eq!(offline.files(&repo(), &commit).unwrap(), files);
    offline.fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap();
    let missing = offline.fetch(&repo(), &commit, "README.md", &quiet).unwrap_err();
    assert!(matches!(&missing, Error::Offline { what, .. } if what == "`README.md`"), "{missing}");
    assert!(matches!(offline.resolve(&Repo::model("o/m").unwrap(), None), Err(Error::Offline { .. })));
    assert_eq!(world.server.requests(), Vec::<String>::new());
}

#[test]
fn a_cache_filled_by_python_serves_offline() {
    let world = world();
    let commit: Commit = "0123456789abcdef0123456789abcdef01234567".parse().unwrap();
    let root = world.folder.path().join("cache/datasets--o--n");
    for folder in ["refs", "blobs", &format!("snapshots/{commit}/data")] {
        fs_err::create_dir_all(root.join(folder)).unwrap();
    }
    fs_err::write(root.join("refs/main"), commit.as_str()).unwrap();
    fs_err::write(root.join("blobs/feed"), "12345").unwrap();
    fs_err::os::unix::fs::symlink("../../../blobs/feed", root.join(format!("snapshots/{commit}/data/x.bin"))).unwrap();
    let offline = world.offline();
    assert_eq!(offline.resolve(&repo(), None).unwrap(), commit);
    let files = offline.files(&repo(), &commit).unwrap();
    assert_eq!((files.len(), files[0].path.as_str(), files[0].size), (1, "data/x.bin", 5));
    assert_eq!(files[0].identity, "feed");
    assert_eq!(fs_err::read(offline.fetch(&repo(), &commit, "data/x.bin", &quiet).unwrap()).unwrap(), b"12345");
}

#[test]
fn server_errors_cuts_and_limits_are_ridden_out() {
    let faults = [
        Faults { every: Some((2, 500)), ..Faults::default() },
        Faults { every: Some((3, 429)), retry_after: Some(0), ..Faults::default() },
        Faults { cut_after: Some(300_000), ..Faults::default() },
        Faults { cut_answers: 2, ..Faults::default() },
        Faults { cut_after: Some(700_000), every: Some((3, 503)), ..Faults::default() },
        Faults { flip: 1, ..Faults::default() },
    ];
    for faults in faults {
        let world = world();
        world.server.misbehave(faults.clone());
        let hub = world.hub();
        let commit = hub.resolve(&repo(), None).unwrap();
        let root = hub.snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap_or_else(|e| panic!("{faults:?}: {e}"));
        for path in ["README.md", "data/big.bin", "data/deep er/empty #1.txt"] {
            assert!(same(&root.join(path), &world.source(path)), "{faults:?}: {path}");
        }
    }
}

#[test]
fn a_cut_download_goes_on_where_it_was_cut_also_in_another_process() {
    let world = world();
    let commit = world.hub().resolve(&repo(), None).unwrap();
    world.hub().files(&repo(), &commit).unwrap();
    world.server.misbehave(Faults { cut_after: Some(600_000), ..Faults::default() });
    let once = Hub::new(Options { attempts: 1, ..world.options() }).unwrap();
    let error = once.fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap_err();
    assert!(matches!(error, Error::Network { .. }), "{error}");
    world.server.misbehave(Faults::default());
    world.server.forget();
    let path = world.hub().fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap();
    assert!(same(&path, &world.source("data/big.bin")));
    let gets: Vec<_> = world.server.requests().into_iter().filter(|r| r.starts_with("GET")).collect();
    assert!(matches!(gets.as_slice(), [only] if only.ends_with(" 600000-")), "{gets:?}");
}

#[test]
fn a_server_without_ranges_and_a_wrong_kept_part_both_end_in_the_right_file() {
    let world = world();
    let commit = world.hub().resolve(&repo(), None).unwrap();
    let files = world.hub().files(&repo(), &commit).unwrap();
    let big = files.iter().find(|f| f.path == "data/big.bin").unwrap();
    let partial = world.folder.path().join("cache/datasets--o--n/blobs").join(format!("{}.incomplete", big.identity));
    fs_err::create_dir_all(partial.parent().unwrap()).unwrap();
    for no_ranges in [true, false] {
        fs_err::write(&partial, vec![9; 1000]).unwrap();
        world.server.misbehave(Faults { no_ranges, ..Faults::default() });
        let path = world.hub().fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap();
        assert!(same(&path, &world.source("data/big.bin")));
        fs_err::remove_file(world.folder.path().join("cache/datasets--o--n/blobs").join(&big.identity)).unwrap();
    }
}

#[test]
fn damage_that_stays_is_an_error_and_leaves_nothing_that_looks_good() {
    let world = world();
    world.server.misbehave(Faults { flip: 100, ..Faults::default() });
    let hub = world.hub();
    let commit = hub.resolve(&repo(), None).unwrap();
    let error = hub.fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert!(!world.folder.path().join(format!("cache/datasets--o--n/snapshots/{commit}/data/big.bin")).exists());
    world.server.misbehave(Faults::default());
    assert!(same(&hub.fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap(), &world.source("data/big.bin")));
}

#[test]
fn what_does_not_exist_is_named_and_not_asked_for_again() {
    let world = world();
    let hub = world.hub();
    let gone = hub.resolve(&Repo::model("o/gone").unwrap(), None).unwrap_err();
    assert!(matches!(&gone, Error::NotFound { repo } if repo == "model `o/gone`"), "{gone}");
    let revision = hub.resolve(&repo(), Some("v9")).unwrap_err();
    assert_eq!(revision.to_string(), "data set `o/n` has no revision `v9`");
    assert_eq!(world.server.requests().len(), 2);
    let commit = hub.resolve(&repo(), None).unwrap();
    assert!(matches!(hub.fetch(&repo(), &commit, "nope.txt", &quiet), Err(Error::File { .. })));
    assert!(matches!(hub.snapshot(&repo(), &commit, &["vae/*"], &quiet), Err(Error::Nothing { .. })));
}

#[test]
fn a_dead_server_ends_after_the_stated_tries() {
    let world = world();
    world.server.misbehave(Faults { every: Some((1, 500)), ..Faults::default() });
    let error = world.hub().resolve(&repo(), None).unwrap_err();
    assert!(matches!(error, Error::Network { attempts: 4, .. }), "{error}");
    assert_eq!(world.server.requests().len(), 4);
    let nowhere = Options { endpoint: Some("http://127.0.0.1:9".to_owned()), attempts: 2, ..world.options() };
    assert!(matches!(Hub::new(nowhere).unwrap().resolve(&repo(), None), Err(Error::Network { attempts: 2, .. })));
}

#[test]
fn tokens_open_doors_and_are_never_shown() {
    let world = world();
    world.server.misbehave(Faults { token: Some("hf_right".to_owned()), ..Faults::default() });
    assert!(matches!(world.hub().resolve(&repo(), None), Err(Error::NotFound { .. })));
    let with = |token: &str| Hub::new(Options { token: Some(token.to_owned()), ..world.options() }).unwrap();
    let commit = with("hf_right").resolve(&repo(), None).unwrap();
    with("hf_right").fetch(&repo(), &commit, "data/big.bin", &quiet).unwrap();
    world.server.misbehave(Faults { gated: true, ..Faults::default() });
    let refused = with("hf_secret").fetch(&repo(), &commit, "README.md", &quiet).unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused}");
    let help = miette::Diagnostic::help(&refused).unwrap().to_string();
    assert!(help.contains("accept its license") && help.contains("HF_TOKEN"), "{help}");
    assert!(!format!("{refused:?} {refused} {help}").contains("hf_secret"));
    let broken = Options { token: Some("hf_sec\nret".to_owned()), ..world.options() };
    let error = Hub::new(broken).and_then(|hub| hub.resolve(&repo(), None)).unwrap_err();
    assert!(!format!("{error:?} {error}").contains("hf_sec"), "{error:?}");
}

#[test]
fn a_caller_can_stop_a_transfer_and_sees_its_progress() {
    let world = world();
    let hub = world.hub();
    let commit = hub.resolve(&repo(), None).unwrap();
    let stop = |done: u64, _: u64| if done > 100_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    assert!(matches!(hub.fetch(&repo(), &commit, "data/big.bin", &stop), Err(Error::Stopped { .. })));
    let last = std::sync::Mutex::new((0, 0));
    let watch = |done: u64, total: u64| {
        let mut last = last.lock().unwrap();
        assert!(done >= last.0 && done <= total);
        *last = (done, total);
        ControlFlow::Continue(())
    };
    hub.snapshot::<&str>(&repo(), &commit, &[], &watch).unwrap();
    assert_eq!(*last.lock().unwrap(), (1_600_007, 1_600_007));
}

/// One bit of a file, its size and time kept; `hidden`: as if it had flipped on the disk itself, so that the recorded state is
/// the one that it has now.
fn flip(path: &Path, hidden: bool) {
    let blob = fs_err::canonicalize(path).unwrap();
    let time = fs_err::metadata(&blob).unwrap().modified().unwrap();
    let mut bytes = fs_err::read(&blob).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs_err::write(&blob, bytes).unwrap();
    fs_err::File::options().write(true).open(&blob).unwrap().file().set_modified(time).unwrap();
    if hidden {
        std::thread::sleep(Duration::from_millis(80));
        let record = blob.ancestors().nth(2).unwrap().join("checked").join(blob.file_name().unwrap());
        let mut checked: serde_json::Value = serde_json::from_slice(&fs_err::read(&record).unwrap()).unwrap();
        let meta = fs_err::metadata(&blob).unwrap();
        checked["stamp"]["ctime"] = (meta.ctime() * 1_000_000_000 + meta.ctime_nsec()).into();
        fs_err::write(record, checked.to_string()).unwrap();
    }
}

const FILES: [&str; 2] = ["README.md", "data/big.bin"];

#[test]
fn a_file_of_the_cache_that_is_not_what_the_hub_states_is_fetched_anew() {
    for path in FILES {
        let world = world();
        let commit = world.hub().resolve(&repo(), None).unwrap();
        let root = world.hub().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
        for _ in 0..2 {
            flip(&root.join(path), false);
            world.server.forget();
            let rotten = world.offline().fetch(&repo(), &commit, path, &quiet).unwrap_err();
            let text = rotten.to_string();
            assert!(matches!(rotten, Error::Rotten { .. }) && text.contains(path), "{text}");
            assert!(miette::Diagnostic::help(&rotten).unwrap().to_string().contains("HF_HUB_OFFLINE"));
            assert_eq!(world.server.requests(), Vec::<String>::new());
            let again = world.hub().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
            assert!(FILES.iter().all(|path| same(&again.join(path), &world.source(path))));
            let gets: Vec<_> = world.server.requests().into_iter().filter(|r| r.starts_with("GET")).collect();
            assert!(gets.len() == 1 && gets[0].contains(path), "nothing else is fetched: {gets:?}");
            world.offline().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
        }
        // Without a connection to the Hub the bad one is not taken either.
        flip(&root.join(path), false);
        let nowhere = Options { endpoint: Some("http://127.0.0.1:9".to_owned()), attempts: 1, ..world.options() };
        let error = Hub::new(nowhere).unwrap().fetch(&repo(), &commit, path, &quiet).unwrap_err();
        assert!(matches!(error, Error::Network { .. }), "{error}");
    }
}

/// A cache of Python's, or of a tool of before, has no records.
#[test]
fn a_cache_without_records_is_hashed_once() {
    let world = world();
    let commit = world.hub().resolve(&repo(), None).unwrap();
    let root = world.hub().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
    let checked = root.ancestors().nth(2).unwrap().join("checked");
    fs_err::remove_dir_all(&checked).unwrap();
    std::thread::sleep(Duration::from_millis(80));
    world.offline().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
    let written = || -> Vec<_> {
        let mut files: Vec<_> = fs_err::read_dir(&checked).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.into_iter().map(|path| (fs_err::metadata(&path).unwrap().ino(), path)).collect()
    };
    let (first, none) = (written(), Vec::<String>::new());
    world.server.forget();
    for hub in [world.offline(), world.hub()] {
        hub.snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
    }
    assert_eq!((first.len(), written(), world.server.requests()), (3, first, none), "a hash would be noted anew");
    // A state that was hashed is believed, whatever is in it: nobody looks.
    flip(&root.join("data/big.bin"), true);
    world.offline().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
    fs_err::remove_dir_all(&checked).unwrap();
    fs_err::remove_dir_all(root.ancestors().nth(2).unwrap().join("listings")).unwrap();
    let rotten = world.offline().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap_err();
    assert!(matches!(rotten, Error::Rotten { .. }), "found also where only names of blobs tell: {rotten}");
}

/// A file system without links has the files themselves in the snapshot.
#[test]
fn files_without_links_are_held_against_their_hashes_too() {
    let world = world();
    let commit = world.hub().resolve(&repo(), None).unwrap();
    let root = world.hub().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
    for path in FILES {
        let (place, blob) = (root.join(path), fs_err::canonicalize(root.join(path)).unwrap());
        fs_err::remove_file(&place).unwrap();
        fs_err::rename(blob, &place).unwrap();
    }
    world.offline().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
    flip(&root.join("data/big.bin"), false);
    let rotten = world.offline().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap_err();
    assert!(matches!(&rotten, Error::Rotten { path, .. } if path == "data/big.bin"), "{rotten}");
    let again = world.hub().snapshot::<&str>(&repo(), &commit, &[], &quiet).unwrap();
    assert!(FILES.iter().all(|path| same(&again.join(path), &world.source(path))));
}

/// A mirror that makes up git ids serves bytes that no id is of: that they came twice the same is as good, also later.
#[test]
fn made_up_ids_of_a_mirror_are_no_damage() {
    let world = world();
    let commit = world.hub().resolve(&repo(), None).unwrap();
    world.hub().files(&repo(), &commit).unwrap();
    let listing = world.folder.path().join(format!("cache/datasets--o--n/listings/{commit}.json"));
    let mut files: serde_json::Value = serde_json::from_slice(&fs_err::read(&listing).unwrap()).unwrap();
    files[0]["identity"] = "a1".repeat(20).into();
    fs_err::write(listing, files.to_string()).unwrap();
    let path = world.hub().fetch(&repo(), &commit, "README.md", &quiet).unwrap();
    // Another name changes the file's state, not its contents.
    fs_err::hard_link(fs_err::canonicalize(&path).unwrap(), world.folder.path().join("another")).unwrap();
    world.offline().fetch(&repo(), &commit, "README.md", &quiet).unwrap();
    flip(&path, false);
    assert!(matches!(world.offline().fetch(&repo(), &commit, "README.md", &quiet), Err(Error::Rotten { .. })));
    assert!(same(&world.hub().fetch(&repo(), &commit, "README.md", &quiet).unwrap(), &world.source("README.md")));
}

//! What goes and what stays.

use serde_json::json;

use super::*;
use crate::publish::tests::{cache, make, material};
use crate::{InputRecord, Lookup};

const HOUR: Duration = Duration::from_hours(1);

#[expect(clippy::disallowed_methods, reason = "ages are measured from now")]
fn now() -> SystemTime {
    SystemTime::now()
}

/// Three artifacts of one file each, the first one the oldest.
fn three(cache: &Cache) {
    for n in 1..=3 {
        make(cache, n, |out| fs_err::write(out.join("f"), vec![n as u8; 1000]).unwrap()).unwrap();
        cache.touch("demo", &material(n).key(), now() - HOUR * (10 - n));
    }
}

fn there(cache: &Cache) -> Vec<u32> {
    (1..=3).filter(|n| matches!(cache.artifact("demo", &material(*n).key()), Lookup::Hit(_))).collect()
}

fn objects(cache: &Cache) -> usize {
    let folder = cache.root().join("objects");
    names(&folder).iter().map(|group| names(&folder.join(group)).len()).sum()
}

fn root(n: u32) -> BTreeSet<(String, Digest)> {
    [("demo".to_owned(), material(n).key())].into()
}

#[test]
fn what_no_run_reaches_goes_with_its_objects_and_the_rest_stays_whole() {
    let (_folder, cache) = cache();
    three(&cache);
    let policy = Policy { roots: root(2), ..Policy::default() };
    let dry = cache.collect(&policy, now(), true).unwrap();
    assert_eq!((there(&cache), dry.artifacts.len(), dry.freed, dry.kept), (vec![1, 2, 3], 2, 2000, 1000));
    let done = cache.collect(&policy, now(), false).unwrap();
    assert_eq!((there(&cache), done.artifacts, done.freed), (vec![2], dry.artifacts, 2000));
    assert_eq!(objects(&cache), 1);
    assert!(matches!(cache.artifact("demo", &material(1).key()), Lookup::Absent), "a clean miss");
    make(&cache, 1, |out| fs_err::write(out.join("f"), vec![1; 1000]).unwrap()).unwrap();
    assert_eq!(there(&cache), [1, 2]);
}

#[test]
fn age_and_size_limit_what_goes() {
    let (_folder, cache) = cache();
    three(&cache);
    let old = Policy { younger_than: Some(HOUR * 15 / 2), ..Policy::default() };
    assert_eq!(cache.collect(&old, now(), true).unwrap().artifacts.len(), 2, "9 and 8 hours old");
    let clock_set_back = now() - HOUR * 100;
    assert_eq!(cache.collect(&old, clock_set_back, true).unwrap().artifacts.len(), 0);
    let small = Policy { max_bytes: Some(1500), ..Policy::default() };
    cache.collect(&small, now(), false).unwrap();
    assert_eq!(there(&cache), [3], "the longest unused go first");
    let smaller = Policy { max_bytes: Some(10), roots: root(3), ..Policy::default() };
    assert_eq!(cache.collect(&smaller, now(), false).unwrap().kept, 1000, "a kept run is kept whatever the size");
}

#[test]
fn a_shared_file_is_free_only_when_its_last_holder_goes() {
    let (_folder, cache) = cache();
    for n in 1..=2 {
        make(&cache, n, |out| fs_err::write(out.join("f"), "same").unwrap()).unwrap();
    }
    let done = cache.collect(&Policy { roots: root(1), ..Policy::default() }, now(), false).unwrap();
    assert_eq!((done.artifacts.len(), done.freed, there(&cache), objects(&cache)), (1, 0, vec![1], 1));
}

#[test]
fn what_a_kept_artifact_was_made_of_is_kept() {
    let (_folder, cache) = cache();
    three(&cache);
    let path = cache.artifact_path("demo", &material(3).key()).join(MANIFEST);
    let mut manifest: Manifest = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    manifest.inputs = [("in".to_owned(), InputRecord { stage: "demo".to_owned(), key: material(1).key() })].into();
    fs_err::write(&path, json!(manifest.sealed()).to_string()).unwrap();
    cache.collect(&Policy { roots: root(3), ..Policy::default() }, now(), false).unwrap();
    assert_eq!(there(&cache), [1, 3]);
}

#[test]
fn what_a_running_command_looked_up_or_made_stays() {
    let (_folder, cache) = cache();
    three(&cache);
    let running = Cache::open(cache.root()).unwrap().hold();
    assert!(matches!(running.artifact("demo", &material(1).key()), Lookup::Hit(_)));
    make(&running, 3, |out| fs_err::write(out.join("f"), "new").unwrap()).unwrap();
    cache.collect(&Policy::default(), now(), false).unwrap();
    assert_eq!(there(&cache), [1, 3]);
    drop(running);
    cache.collect(&Policy::default(), now(), false).unwrap();
    assert_eq!(there(&cache), Vec::<u32>::new());
    assert_eq!((objects(&cache), names(&cache.root().join("live"))), (0, Vec::new()));
}

#[test]
fn work_in_progress_is_never_taken_and_old_work_is() {
    let (_folder, cache) = cache();
    let key = material(1).key();
    cache.stage_work("demo", &key, true).unwrap();
    let lock = cache.try_lock("demo", &key).unwrap();
    let all = Policy { younger_than: Some(Duration::ZERO), ..Policy::default() };
    let later = now() + HOUR;
    assert_eq!(cache.collect(&all, later, false).unwrap().leftovers, Vec::<PathBuf>::new());
    drop(lock);
    assert_eq!(cache.collect(&Policy::default(), later, false).unwrap().leftovers, Vec::<PathBuf>::new(), "young");
    assert_eq!(cache.collect(&all, later, false).unwrap().leftovers, [cache.work_path("demo", &key)]);
    assert!(!cache.work_path("demo", &key).exists());
}

/// What a collector that was killed while it removed things left, under any name that one of today may take.
#[test]
fn a_collection_that_was_killed_is_finished_by_the_next() {
    let (_folder, cache) = cache();
    let trash = cache.root().join("trash");
    let left = |name: String| {
        fs_err::create_dir_all(trash.join(&name).join("deep")).unwrap();
        fs_err::write(trash.join(&name).join("deep/f"), "half removed").unwrap();
    };
    for number in 0..8 {
        left(format!("{}-{number}", std::process::id()));
        left(number.to_string());
    }
    left(".tmpKilled/0".to_owned());
    for _ in 0..2 {
        three(&cache);
        let done = cache.collect(&Policy { roots: root(2), ..Policy::default() }, now(), false).unwrap();
        assert_eq!((there(&cache), done.artifacts.len(), names(&trash)), (vec![2], 2, Vec::new()));
    }
}

#[test]
fn collectors_at_the_same_time_do_not_disturb_each_other() {
    let (_folder, cache) = cache();
    three(&cache);
    std::thread::scope(|scope| {
        for n in 10..18 {
            let cache = &cache;
            scope.spawn(move || {
                for _ in 0..8 {
                    make(cache, n, |out| fs_err::write(out.join("f"), n.to_string()).unwrap()).unwrap();
                    cache.collect(&Policy { roots: root(2), ..Policy::default() }, now(), false).unwrap();
                }
            });
        }
    });
    assert_eq!((there(&cache), names(&cache.root().join("trash"))), (vec![2], Vec::new()));
}

#[test]
fn an_answer_that_may_be_another_next_time_stays_whatever_its_age() {
    let (_folder, cache) = cache();
    let question = json!({"location": "o/n", "revision": null});
    for kind in ["hub-commits", "check"] {
        cache.remember(kind, &question, &"0123");
    }
    fs_err::write(cache.root().join("memo/hub-commits/.tmpHalf"), "{").unwrap();
    for age in [None, Some(Duration::ZERO)] {
        cache.collect(&Policy { younger_than: age, ..Policy::default() }, now() + HOUR * 24 * 400, false).unwrap();
        assert_eq!(cache.recall::<String>("hub-commits", &question).as_deref(), Some("0123"));
        assert_eq!(cache.recall::<String>("check", &question), None, "this one is the same when it is asked again");
    }
    assert_eq!(names(&cache.root().join("memo/hub-commits")).len(), 1, "half a file of a killed writer is no answer");
}

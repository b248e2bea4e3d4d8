//! What is pushed is pulled whole by others, in spite of cut lines, flipped bits and lost objects.

use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::atomic::{AtomicUsize, Ordering};

use remote::{Error, Pushed, Remote};
use store::{Digest, Lookup};

use crate::world::{Place, World, bytes, make, object, pull, quiet, s3, whole};

const MB: usize = 1 << 20;

fn eight_files() -> Vec<(&'static str, Vec<u8>)> {
    let sizes = [0, 1, 1000, 3 * MB, 8 * MB, 8 * MB + 1, 20 * MB, 1000];
    let names = ["empty", "one", "a/small", "a/b/middle", "part", "more", "large.bin", "same"];
    // The last holds what the third does.
    let seed = |n: usize| if n == 7 { 2 } else { n as u32 };
    names.into_iter().enumerate().map(|(n, name)| (name, bytes(seed(n), sizes[n]))).collect()
}

#[test]
fn what_is_pushed_is_pulled_whole_by_others() {
    for world in World::all() {
        let remote = world.place.remote();
        let made = make(&world.theirs, 1, &eight_files());
        assert_eq!(remote.manifest("demo", &made.manifest.key).unwrap(), None);
        let sent = remote.push(&world.theirs, &made, false, &quiet).unwrap();
        let total = (39 * MB + 1002) as u64;
        assert_eq!(sent, Pushed { files: 7, bytes: total }, "equal files are sent once");
        assert_eq!(remote.push(&world.theirs, &made, false, &quiet).unwrap(), Pushed::default());

        let came = pull(&remote, &world.ours, &made.manifest.key).unwrap();
        assert_eq!(came.manifest, made.manifest);
        for (name, bytes) in eight_files() {
            assert!(fs_err::read(came.path.join(name)).unwrap() == bytes, "{name}");
        }
        whole(&world.ours, &made.manifest);

        // What another artifact shares with one that is here is not fetched.
        let other = make(&world.theirs, 2, &[("large.bin", bytes(6, 20 * MB)), ("new", bytes(9, 10))]);
        assert_eq!(remote.push(&world.theirs, &other, false, &quiet).unwrap(), Pushed { files: 1, bytes: 10 });
        let fetched = AtomicUsize::new(0);
        let meter = |_: u64, total: u64| {
            fetched.store(total as usize, Ordering::SeqCst);
            ControlFlow::Continue(())
        };
        let manifest = remote.manifest("demo", &other.manifest.key).unwrap().unwrap();
        remote.pull(&world.ours, manifest, &meter).unwrap();
        assert_eq!(fetched.into_inner(), 10);
    }
}

#[test]
fn a_cut_download_goes_on_where_it_was() {
    let Some(world) = World::s3() else { return };
    let Place::S3 { line, .. } = &world.place else { return };
    let made = make(&world.theirs, 1, &[("big", bytes(1, 60 * MB)), ("small", bytes(2, 100))]);
    world.place.remote().push(&world.theirs, &made, false, &quiet).unwrap();

    line.cut_after(40 * MB as u64);
    let cut = pull(&world.place.remote(), &world.ours, &made.manifest.key).unwrap_err();
    assert!(matches!(cut, Error::Unreachable { .. }), "{cut}");
    assert!(matches!(world.ours.artifact("demo", &made.manifest.key), Lookup::Absent));
    line.heal();
    let before = line.came();
    pull(&world.place.remote(), &world.ours, &made.manifest.key).unwrap();
    whole(&world.ours, &made.manifest);
    let again = (line.came() - before) as usize / MB;
    assert!((16..45).contains(&again), "{again} MB came again");

    // A caller that stops keeps what came, too.
    let other = world.another("other");
    let stop =
        |done: u64, _: u64| if done > 30 * MB as u64 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let manifest = world.place.remote().manifest("demo", &made.manifest.key).unwrap().unwrap();
    let stopped = world.place.remote().pull(&other, manifest, &stop).unwrap_err();
    assert!(matches!(stopped, Error::Stopped { .. }), "{stopped}");
    let before = line.came();
    pull(&world.place.remote(), &other, &made.manifest.key).unwrap();
    assert!(((line.came() - before) as usize) < 32 * MB);
}

#[test]
fn what_a_crash_left_damaged_is_fetched_again() {
    let world = World::folder();
    let remote = world.place.remote();
    let made = make(&world.theirs, 1, &[("big", bytes(1, 9 * MB))]);
    remote.push(&world.theirs, &made, false, &quiet).unwrap();
    let digest = made.manifest.files[0].digest;
    for left in [vec![0; MB], vec![0; 9 * MB], vec![0; 10 * MB]] {
        let cache = world.another(&format!("after-{}", left.len()));
        let staging = cache.stage_fetch("demo", &made.manifest.key).unwrap();
        fs_err::write(staging.scratch.join(digest.to_string()), left).unwrap();
        pull(&remote, &cache, &made.manifest.key).unwrap();
        whole(&cache, &made.manifest);
    }
}

/// What came is the artifact's file, not a copy of it: a pull needs the space once. That holds for one that was killed before
/// it published, whose file may be written to no more, and for one file under two names.
#[test]
fn a_pull_needs_the_space_of_an_artifact_once() {
    let world = World::folder();
    let remote = world.place.remote();
    let made =
        make(&world.theirs, 1, &[("big", bytes(1, 9 * MB)), ("same/big", bytes(1, 9 * MB)), ("empty", Vec::new())]);
    remote.push(&world.theirs, &made, false, &quiet).unwrap();
    for (n, mode) in [0o644, 0o444].into_iter().enumerate() {
        let cache = world.another(&format!("space-{n}"));
        let staging = cache.stage_fetch("demo", &made.manifest.key).unwrap();
        let parts: Vec<_> =
            made.manifest.files.iter().map(|f| (staging.scratch.join(f.digest.to_string()), f)).collect();
        for (part, file) in &parts {
            fs_err::copy(made.path.join(&file.path), part).unwrap();
            fs_err::set_permissions(part, PermissionsExt::from_mode(mode)).unwrap();
        }
        let inodes: Vec<_> = parts.iter().map(|(part, _)| fs_err::metadata(part).unwrap().ino()).collect();
        let came = pull(&remote, &cache, &made.manifest.key).unwrap();
        whole(&cache, &made.manifest);
        let now = made.manifest.files.iter().map(|file| fs_err::metadata(came.path.join(&file.path)).unwrap());
        assert_eq!(now.clone().map(|meta| meta.ino()).collect::<Vec<_>>(), inodes);
        assert!(now.clone().all(|meta| meta.permissions().readonly()), "and nobody may write to it");
    }
}

/// A process that found damage and was killed before it put it right tells the next one.
#[test]
fn a_file_that_another_found_damaged_is_sent_again() {
    for world in World::all() {
        let made = make(&world.theirs, 1, &[("a", bytes(3, 1000)), ("b", bytes(4, 100))]);
        let (finder, object) = (world.place.remote(), object(&made.manifest.files[0].digest));
        finder.push(&world.theirs, &made, false, &quiet).unwrap();
        let mut flipped = world.place.get(&object);
        flipped[9] ^= 1;
        world.place.set(&object, Some(&flipped));
        pull(&finder, &world.ours, &made.manifest.key).unwrap_err();
        assert_eq!(finder.doubted(), [made.manifest.files[0].digest].into());
        let next = world.place.remote();
        next.doubt(&finder.doubted());
        let sent = next.push(&world.theirs, &made, false, &quiet).unwrap();
        assert_eq!((sent, next.doubted().len()), (Pushed { files: 1, bytes: 1000 }, 0));
        assert_eq!(next.push(&world.theirs, &made, false, &quiet).unwrap(), Pushed::default());
        pull(&world.place.remote(), &world.ours, &made.manifest.key).unwrap();
    }
}

/// Bit, cut, gone, longer: each is named, nothing is published, and a sound cache heals it.
#[test]
fn damage_there_is_found_named_and_healed() {
    for world in World::all() {
        let made = make(&world.theirs, 1, &[("a/b/middle", bytes(3, 3 * MB)), ("other", bytes(4, 100))]);
        let key = made.manifest.key;
        world.place.remote().push(&world.theirs, &made, false, &quiet).unwrap();
        let file = made.manifest.files.iter().find(|file| file.path == "a/b/middle").unwrap();
        let object = object(&file.digest);
        let good = world.place.get(&object);
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 1;
        let longer = [good.clone(), vec![7]].concat();
        let harms: [(Option<&[u8]>, &str); 5] = [
            (Some(&flipped), "not those of its digest"),
            (Some(&good[..good.len() - 1]), "bytes"),
            (Some(&[]), "bytes"),
            (None, "it is gone"),
            (Some(&longer), "bytes"),
        ];
        for (n, (harm, told)) in harms.into_iter().enumerate() {
            world.place.set(&object, harm);
            let (remote, cache) = (world.place.remote(), world.another(&format!("harm-{n}")));
            match pull(&remote, &cache, &key) {
                // A beginning of the object is what was asked for, and it is whole.
                Ok(_) if n == 4 => drop(whole(&cache, &made.manifest)),
                Ok(_) => panic!("harm {n} was believed"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(matches!(error, Error::Damaged { .. }), "{text}");
                    assert!(text.contains(&object) && text.contains("a/b/middle") && text.contains(told), "{text}");
                    assert!(matches!(cache.artifact("demo", &key), Lookup::Absent));
                }
            }
            // Whoever has a sound one puts it right: who found the damage at once, others when asked to.
            let anew = n % 2 == 1;
            let healer = if anew { world.place.remote() } else { remote };
            healer.push(&world.theirs, &made, anew, &quiet).unwrap();
            pull(&world.place.remote(), &cache, &key).unwrap();
            whole(&cache, &made.manifest);
        }
    }
}

#[test]
fn a_manifest_is_held_against_itself_and_what_was_asked() {
    for world in World::all() {
        let remote = world.place.remote();
        let (one, two) =
            (make(&world.theirs, 1, &[("a", bytes(1, 10))]), make(&world.theirs, 2, &[("a", bytes(2, 10))]));
        for made in [&one, &two] {
            remote.push(&world.theirs, made, false, &quiet).unwrap();
        }
        let path = |key: &Digest| format!("artifacts/demo/{key}.json");
        let good = world.place.get(&path(&one.manifest.key));
        let text = String::from_utf8(good.clone()).unwrap();
        let other_digest =
            text.replace(&one.manifest.files[0].digest.to_string(), &two.manifest.files[0].digest.to_string());
        let wrong =
            [world.place.get(&path(&two.manifest.key)), other_digest.into_bytes(), good[..90].to_vec(), Vec::new()];
        for bytes in wrong {
            world.place.set(&path(&one.manifest.key), Some(&bytes));
            let refused = remote.manifest("demo", &one.manifest.key).unwrap_err();
            assert!(matches!(refused, Error::Damaged { .. }), "{refused}");
        }
        // A push sees that the manifest is not its own.
        remote.push(&world.theirs, &one, false, &quiet).unwrap();
        assert_eq!(remote.manifest("demo", &one.manifest.key).unwrap().unwrap(), one.manifest);
    }
}

#[test]
fn a_push_that_is_cut_shows_nothing() {
    for world in World::all() {
        let remote = world.place.remote();
        let made = make(&world.theirs, 1, &eight_files());
        let stop =
            |done: u64, _: u64| if done > 9 * MB as u64 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let stopped = remote.push(&world.theirs, &made, false, &stop).unwrap_err();
        assert!(matches!(stopped, Error::Stopped { .. }), "{stopped}");
        assert_eq!(remote.manifest("demo", &made.manifest.key).unwrap(), None);
        let rest = remote.push(&world.theirs, &made, false, &quiet).unwrap();
        // Two go at a time, small ones first: nine MB are counted when the sixth has begun, so four of seven are there.
        assert!(rest.files <= 3, "what was sent stays sent: {rest:?}");
        pull(&remote, &world.ours, &made.manifest.key).unwrap();
    }
}

#[test]
fn what_is_damaged_here_is_not_sent() {
    let world = World::folder();
    let made = make(&world.theirs, 1, &[("a", bytes(1, 100))]);
    let path = made.path.join("a");
    let mut permissions = fs_err::metadata(&path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o644);
    fs_err::set_permissions(&path, permissions).unwrap();
    fs_err::write(&path, bytes(2, 100)).unwrap();
    let refused = world.place.remote().push(&world.theirs, &made, false, &quiet).unwrap_err();
    assert!(matches!(refused, Error::Unsound { .. }), "{refused}");
    assert_eq!(world.place.remote().manifest("demo", &made.manifest.key).unwrap(), None);
}

#[test]
fn eight_at_a_time_push_and_pull_the_same() {
    for world in World::all() {
        let made = make(&world.theirs, 1, &[("a", bytes(1, 9 * MB)), ("b", bytes(2, 10))]);
        std::thread::scope(|scope| {
            for n in 0..8 {
                let (world, made) = (&world, &made);
                scope.spawn(move || {
                    let remote = world.place.remote();
                    remote.push(&world.theirs, made, false, &quiet).unwrap();
                    let cache = world.another(&format!("cache-{n}"));
                    pull(&remote, &cache, &made.manifest.key).unwrap();
                    whole(&cache, &made.manifest);
                });
            }
        });
    }
}

#[test]
fn a_remote_that_does_not_answer_is_an_error_soon() {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let began = std::time::Instant::now();
    let key = Digest::of_bytes(b"");
    let error = s3(port, "box").manifest("demo", &key).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(began.elapsed() < std::time::Duration::from_secs(30), "{:?}", began.elapsed());
    let gone = Remote::open("file:///nowhere/at/all").map(|_| ()).unwrap_err();
    assert!(gone.to_string().contains("`/nowhere/at/all` does not exist"), "{gone}");
}

#[test]
fn notes_are_shared_and_damaged_ones_are_none() {
    for world in World::all() {
        let (remote, question) = (world.place.remote(), Digest::of_bytes(b"?"));
        assert_eq!(remote.recall::<u32>("asked", &question).unwrap(), None);
        remote.note("asked", &question, &42).unwrap();
        assert_eq!(remote.recall::<u32>("asked", &question).unwrap(), Some(42));
        let path = format!("notes/asked/{question}.json");
        let mut bytes = world.place.get(&path);
        *bytes.last_mut().unwrap() ^= 1;
        world.place.set(&path, Some(&bytes));
        assert_eq!(remote.recall::<u32>("asked", &question).unwrap(), None);
    }
}

//! Damage of any kind is found before use, named, moved aside, and repaired alone.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::publish::tests::{cache, make, material};
use crate::{Lookup, Result};

fn three_files(out: &Path) {
    fs_err::create_dir(out.join("sub")).unwrap();
    fs_err::write(out.join("a"), vec![7; 5000]).unwrap();
    fs_err::write(out.join("sub/b"), (0..9000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    fs_err::write(out.join("c"), "small").unwrap();
}

fn state(cache: &Cache, n: u32) -> String {
    match cache.artifact("demo", &material(n).key()) {
        Lookup::Hit(_) => "hit".to_owned(),
        Lookup::Absent => "absent".to_owned(),
        Lookup::Broken(why) => why,
    }
}

/// Changes a published file as a careless program or a bad disk would, with its time put back.
fn damage(path: &Path, how: impl FnOnce(&mut Vec<u8>)) {
    let meta = fs_err::metadata(path).unwrap();
    fs_err::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
    let mut bytes = fs_err::read(path).unwrap();
    how(&mut bytes);
    fs_err::write(path, bytes).unwrap();
    fs_err::File::options().write(true).open(path).unwrap().file().set_modified(meta.modified().unwrap()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn eight_flipped_bits_or_a_truncation_are_always_found(
        file in prop::sample::select(vec!["a", "sub/b", "c", "manifest.json"]),
        places in prop::collection::vec((any::<prop::sample::Index>(), 0..8u8), 8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (_folder, cache) = cache();
        let artifact = make(&cache, 1, three_files).unwrap();
        prop_assert_eq!(state(&cache, 1), "hit");
        let path = artifact.path.join(file);
        let before = fs_err::read(&path).unwrap();
        damage(&path, |bytes| match cut {
            Some(at) => bytes.truncate(at.index(bytes.len())),
            None => places.iter().for_each(|(at, bit)| { let at = at.index(bytes.len()); bytes[at] ^= 1 << bit }),
        });
        // Two of the eight may have been the same bit.
        prop_assume!(fs_err::read(&path).unwrap() != before);
        prop_assert_ne!(state(&cache, 1), "hit");
        prop_assert_ne!(state(&cache, 1), "hit", "nor the second time");
        make(&cache, 1, three_files).unwrap();
        prop_assert_eq!(state(&cache, 1), "hit");
    }
}

#[test]
fn a_damaged_file_is_moved_aside_once_and_named() {
    let (_folder, cache) = cache();
    let artifact = make(&cache, 1, three_files).unwrap();
    damage(&artifact.path.join("c"), |bytes| bytes[0] ^= 1);
    let digest = Digest::of_bytes(b"small");
    let place = cache.root().join("quarantine").join(digest.to_string());
    let why = state(&cache, 1);
    assert_eq!(
        why,
        format!("the contents of `c` are not those that were published; it was moved to `{}`", place.display())
    );
    assert_eq!(fs_err::read(&place).unwrap(), b"rmall");
    assert!(!cache.object_path(&digest).exists(), "nobody takes it for an object");
    assert_eq!(state(&cache, 1), format!("`c` was damaged and lies in `{}`", place.display()));
    let note = fs_err::read_to_string(place.with_extension("json")).unwrap();
    for part in ["\"path\": \"c\"", "\"stage\": \"demo\"", &Digest::of_bytes(b"rmall").to_string()] {
        assert!(note.contains(part), "{part} is not in {note}");
    }
}

#[test]
fn all_that_share_a_damaged_file_know_and_one_rebuild_heals_them() -> Result<()> {
    let (_folder, cache) = cache();
    let one = make(&cache, 1, three_files)?;
    make(&cache, 2, three_files)?;
    let other = make(&cache, 3, |out| fs_err::write(out.join("c"), "else").unwrap())?;
    damage(&one.path.join("sub/b"), |bytes| bytes.truncate(8999));
    for n in [1, 2] {
        assert!(state(&cache, n).starts_with("`sub/b` has 8999 bytes instead of 36000"), "{}", state(&cache, n));
    }
    assert_eq!(state(&cache, 3), "hit", "{}", other.path.display());
    make(&cache, 2, three_files)?;
    assert_eq!((state(&cache, 2).as_str(), state(&cache, 1).as_str()), ("hit", "hit"));
    Ok(())
}

#[test]
fn a_removed_file_comes_back_from_its_object() {
    let (_folder, cache) = cache();
    let artifact = make(&cache, 1, three_files).unwrap();
    fs_err::remove_file(artifact.path.join("a")).unwrap();
    assert_eq!(state(&cache, 1), "hit");
    fs_err::remove_file(artifact.path.join("a")).unwrap();
    fs_err::remove_file(cache.object_path(&Digest::of_bytes(&[7; 5000]))).unwrap();
    assert_eq!(state(&cache, 1), "`a` is missing");
}

#[test]
fn damage_below_the_file_system_is_found_by_reading() {
    let (_folder, cache) = cache();
    let artifact = make(&cache, 1, three_files).unwrap();
    damage(&artifact.path.join("c"), |bytes| bytes[0] ^= 1);
    // A disk that forgets a bit leaves no stamp: the state of the file is as remembered.
    let file = artifact.manifest.files.iter().find(|file| file.path == "c").unwrap();
    thread::sleep(RACY + Duration::from_millis(20));
    cache.note_sound(&file.digest, FileStamp::of(&artifact.path.join("c")).unwrap(), Vec::new());
    let another_process = Cache::open(cache.root()).unwrap();
    assert_eq!(state(&another_process, 1), "hit");
    assert!(matches!(another_process.verify("demo", &material(1).key()), Lookup::Broken(why) if why.contains("`c`")));
    assert_ne!(state(&another_process, 1), "hit");
}

#[test]
fn a_known_file_is_not_hashed_again() {
    let (_folder, cache) = cache();
    make(&cache, 1, three_files).unwrap();
    thread::sleep(RACY + Duration::from_millis(20));
    let later = Cache::open(cache.root()).unwrap();
    assert_eq!(state(&later, 1), "hit");
    let even_later = Cache::open(cache.root()).unwrap();
    assert_eq!(state(&even_later, 1), "hit");
    assert!(even_later.hashed.lock().unwrap().is_empty());
    // Another artifact takes a link to the same files: their ctime moves, so they are looked at once more.
    make(&later, 2, three_files).unwrap();
    let last = Cache::open(cache.root()).unwrap();
    assert_eq!((state(&last, 1), state(&last, 2)), ("hit".to_owned(), "hit".to_owned()));
}

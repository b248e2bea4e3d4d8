//! What is published is found whole, stored once, and repaired when damaged.

use serde_json::json;

use super::*;

pub(crate) fn material(n: u32) -> Material {
    Material {
        schema: SCHEMA,
        stage: "demo".to_owned(),
        version: 1,
        parameters: json!({ "n": n }),
        sources: BTreeMap::new(),
        inputs: BTreeMap::new(),
    }
}

pub(crate) fn make(cache: &Cache, n: u32, write: impl FnOnce(&Path)) -> Result<Artifact> {
    let material = material(n);
    let _lock = cache.try_lock("demo", &material.key())?.unwrap();
    let staging = cache.stage_work("demo", &material.key(), false)?;
    write(&staging.out);
    cache.publish(
        &staging,
        Finished {
            kind: "things".to_owned(),
            material,
            sources: BTreeMap::new(),
            inputs: BTreeMap::new(),
            measured: vec!["clock".to_owned()],
            ledger: json!({"in": 0, "out": 0, "rejected": 0, "held": 0}),
            info: Value::Null,
            summary: String::new(),
            warnings: Vec::new(),
            seconds: 0.0,
        },
    )
}

pub(crate) fn cache() -> (tempfile::TempDir, Cache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::open(&folder.path().join("cache")).unwrap();
    (folder, cache)
}

fn two_files(out: &Path) {
    fs_err::create_dir(out.join("sub")).unwrap();
    fs_err::write(out.join("a"), "same").unwrap();
    fs_err::write(out.join("sub/b"), "same").unwrap();
}

#[test]
fn what_is_published_is_found_whole_and_stored_once() {
    let (_folder, cache) = cache();
    let artifact = make(&cache, 1, two_files).unwrap();
    let Lookup::Hit(found) = cache.artifact("demo", &material(1).key()) else { panic!("not found") };
    assert_eq!(found.manifest, artifact.manifest);
    assert_eq!(found.manifest.files.iter().map(|f| f.path.as_str()).collect::<Vec<_>>(), ["a", "sub/b"]);
    let inode = |path: &str| fs_err::metadata(artifact.path.join(path)).unwrap().ino();
    assert_eq!(inode("a"), inode("sub/b"));
    assert!(!cache.work_path("demo", &material(1).key()).exists());
}

#[test]
fn measurements_do_not_count_for_the_digest() {
    let (_folder, cache) = cache();
    let at = |seconds: &'static str| {
        move |out: &Path| {
            two_files(out);
            fs_err::write(out.join("clock"), seconds).unwrap();
        }
    };
    let (one, two) = (make(&cache, 1, at("1.0")).unwrap(), make(&cache, 2, at("2.0")).unwrap());
    assert_eq!(one.manifest.digest, two.manifest.digest);
    assert_ne!(one.manifest.files, two.manifest.files);
}

#[test]
fn names_that_already_are_one_file_leave_nothing_behind() {
    let (_folder, cache) = cache();
    let artifact = make(&cache, 1, |out| {
        two_files(out);
        fs_err::hard_link(out.join("a"), out.join("sub/c")).unwrap();
    })
    .unwrap();
    let (mut there, mut recorded) = (Vec::new(), vec!["a", "sub/b", "sub/c"]);
    list(&artifact.path, "", &mut there).unwrap();
    there.sort();
    recorded.sort_unstable();
    assert_eq!(there, recorded);
}

#[test]
fn equal_results_have_equal_digests_whatever_was_asked() {
    let (_folder, cache) = cache();
    let one = make(&cache, 1, two_files).unwrap();
    let two = make(&cache, 2, two_files).unwrap();
    assert_eq!(one.manifest.digest, two.manifest.digest);
    assert_ne!(one.manifest.key, two.manifest.key);
    let three = make(&cache, 3, |out| fs_err::write(out.join("a"), "other").unwrap()).unwrap();
    assert_ne!(three.manifest.digest, one.manifest.digest);
}

#[test]
fn a_damaged_manifest_is_a_miss_with_a_reason() {
    let (_folder, cache) = cache();
    let artifact = make(&cache, 1, two_files).unwrap();
    let key = material(1).key();
    let manifest = artifact.path.join(MANIFEST);
    let good = fs_err::read_to_string(&manifest).unwrap();
    for (from, to) in
        [("\"n\": 1", "\"n\": 2"), ("\"kind\": \"things\"", "\"kind\": \"thinks\""), ("\"in\": 0", "\"in\": 1")]
    {
        assert!(good.contains(from), "{from}");
        fs_err::write(&manifest, good.replace(from, to)).unwrap();
        assert!(
            matches!(cache.artifact("demo", &key), Lookup::Broken(why) if why == "its manifest contradicts itself"),
            "{from}"
        );
    }
    fs_err::write(&manifest, "{").unwrap();
    assert!(matches!(cache.artifact("demo", &key), Lookup::Broken(_)));
    fs_err::remove_file(&manifest).unwrap();
    assert!(matches!(cache.artifact("demo", &key), Lookup::Broken(why) if why == "its manifest is missing"));
    make(&cache, 1, two_files).unwrap();
    assert!(matches!(cache.artifact("demo", &key), Lookup::Hit(_)));
}

#[test]
fn a_manifest_of_an_earlier_schema_is_read_but_never_hit() {
    let (_folder, cache) = cache();
    let mut old = make(&cache, 1, two_files).unwrap().manifest;
    (old.schema, old.material.schema, old.seal) = (1, 1, None);
    old.key = old.material.key();
    let folder = cache.artifact_path("demo", &old.key);
    fs_err::create_dir_all(&folder).unwrap();
    fs_err::write(folder.join(MANIFEST), serde_json::to_vec(&old).unwrap()).unwrap();
    assert_eq!(cache.manifest("demo", &old.key), Ok(Some(old.clone())), "for saying what changed");
    assert_ne!(old.key, material(1).key(), "the schema is part of the key");
}

#[test]
fn a_damaged_object_is_not_shared() {
    let (_folder, cache) = cache();
    make(&cache, 1, two_files).unwrap();
    let object = cache.object_path(&Digest::of_bytes(b"same"));
    fs_err::remove_file(&object).unwrap();
    fs_err::write(&object, "SAME").unwrap();
    let artifact = make(&cache, 2, two_files).unwrap();
    assert_eq!(fs_err::read_to_string(artifact.path.join("a")).unwrap(), "same");
    assert_eq!(fs_err::read_to_string(&object).unwrap(), "same");
}

#[test]
fn what_is_linked_in_is_our_own_afterwards() {
    let (folder, cache) = cache();
    let outside = folder.path().join("weights");
    fs_err::write(&outside, "weights").unwrap();
    let artifact = make(&cache, 1, |out| {
        std::os::unix::fs::symlink(&outside, out.join("soft")).unwrap();
        fs_err::hard_link(&outside, out.join("hard")).unwrap();
    })
    .unwrap();
    // Overwritten in place, as many programs save.
    fs_err::write(&outside, "other..").unwrap();
    for name in ["soft", "hard"] {
        assert_eq!(fs_err::read_to_string(artifact.path.join(name)).unwrap(), "weights", "{name}");
    }
    assert!(fs_err::metadata(&outside).unwrap().permissions().mode() & 0o200 != 0, "it is still the user's");
}

#[test]
fn a_blob_of_the_hub_is_shared_not_copied() {
    let (folder, cache) = cache();
    let blob = folder.path().join("models--a--b/blobs/0123");
    fs_err::create_dir_all(blob.parent().unwrap()).unwrap();
    fs_err::write(&blob, "weights").unwrap();
    let artifact = make(&cache, 1, |out| std::os::unix::fs::symlink(&blob, out.join("w")).unwrap()).unwrap();
    let inode = |path: &Path| fs_err::metadata(path).unwrap().ino();
    assert_eq!(inode(&artifact.path.join("w")), inode(&blob));
}

#[test]
fn a_link_to_nothing_is_refused_and_nothing_is_visible() {
    let (_folder, cache) = cache();
    let error = make(&cache, 1, |out| std::os::unix::fs::symlink("gone", out.join("w")).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "`w` in the result is a link to nothing, which cannot be published");
    assert!(matches!(cache.artifact("demo", &material(1).key()), Lookup::Absent));
}

#[test]
fn there_is_one_maker_per_key() {
    let (_folder, cache) = cache();
    let first = cache.try_lock("demo", &material(1).key()).unwrap();
    assert!(first.is_some());
    assert!(cache.try_lock("demo", &material(1).key()).unwrap().is_none());
    assert!(cache.try_lock("demo", &material(2).key()).unwrap().is_some());
    drop(first);
    assert!(cache.try_lock("demo", &material(1).key()).unwrap().is_some());
}

#[test]
fn a_cache_of_another_format_is_refused() {
    let (folder, cache) = cache();
    fs_err::write(cache.root().join("format"), "9").unwrap();
    assert!(matches!(Cache::open(&folder.path().join("cache")), Err(Error::Format { found, .. }) if found == "9"));
}

#[test]
fn what_comes_from_elsewhere_is_held_against_its_manifest() {
    let ((_a, theirs), (_b, ours)) = (cache(), cache());
    let made = make(&theirs, 1, two_files).unwrap();
    let key = made.manifest.key;
    let bring = |write: &dyn Fn(&Path)| {
        let staging = ours.stage_fetch("demo", &key).unwrap();
        write(&staging.out);
        ours.adopt(&staging, made.manifest.clone())
    };
    let wrong: [(&dyn Fn(&Path), &str); 3] = [
        (
            &|out: &Path| {
                two_files(out);
                fs_err::write(out.join("sub/b"), "samE").unwrap();
            },
            "sub/b",
        ),
        (
            &|out: &Path| {
                two_files(out);
                fs_err::write(out.join("c"), "more").unwrap();
            },
            "c",
        ),
        (&|out: &Path| fs_err::write(out.join("a"), "same").unwrap(), "sub/b"),
    ];
    for (write, named) in wrong {
        let refused = bring(write).unwrap_err().to_string();
        assert!(refused.contains(&format!("`{named}`")), "{refused}");
        assert!(matches!(ours.artifact("demo", &key), Lookup::Absent));
    }
    let came = bring(&two_files).unwrap();
    assert_eq!(came.manifest, made.manifest);
    assert!(matches!(ours.verify("demo", &key), Lookup::Hit(_)));
    assert!(!ours.work_path("demo", &key).exists());
}

//! Law L1 inside the stage: an item is encoded if and only if something it depends on changed, and no byte of the result
//! depends on what was taken over.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use encode::Settings;
use serde_json::json;
use tables::{Latent, Sample, TableReader};

use crate::support::{Run, World, model, picture, run, run_in_world, sample};

fn cards(ids: impl IntoIterator<Item = u32>) -> Vec<Sample> {
    ids.into_iter().map(|i| sample(&picture(90 + 10 * (i % 4), 100, i), &format!("card {}", i % 5))).collect()
}

fn after(previous: Vec<PathBuf>, samples: Vec<Sample>) -> Run {
    with(&World { previous, ..World::default() }, samples)
}

fn with(world: &World, samples: Vec<Sample>) -> Run {
    run_in_world(world, samples, json!({}), Settings::default(), 1, |_| {})
}

/// Fails unless a run that was offered nothing makes the same bytes.
#[track_caller]
fn same_as_afresh(made: &Run, samples: Vec<Sample>) {
    let afresh = run(samples, json!({}));
    let (ours, theirs) = (made.files(), afresh.files());
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (name, bytes) in &theirs {
        assert!(ours[name] == *bytes, "{name} depends on what was taken over");
    }
    let (ours, theirs) = (made.outcome(), afresh.outcome());
    assert_eq!(ours.ledger, theirs.ledger);
    for fact in ["buckets", "captions", "truncated"] {
        assert_eq!(ours.info[fact], theirs.info[fact]);
    }
}

#[test]
fn nothing_changed_costs_nothing_and_shares_the_files() {
    let first = run(cards(0..6), json!({}));
    assert_eq!(first.made_anew(), (6, 6), "five captions and the empty one");
    let second = after(vec![first.publish()], cards(0..6));
    assert_eq!(second.made_anew(), (0, 0));
    assert!(second.events.iter().all(|event| !matches!(event, stage::Event::Progress { .. })), "{:?}", second.events);
    same_as_afresh(&second, cards(0..6));
    let inode = |run: &Run| {
        let file = run.files().into_keys().find(|name| name.starts_with("latents")).unwrap();
        std::os::unix::fs::MetadataExt::ino(&fs_err::metadata(run.output().join(file)).unwrap())
    };
    assert_eq!(inode(&first), inode(&second), "one file on the disk");
}

#[test]
fn one_added_one_removed_and_one_changed_are_two_to_encode() {
    let first = run(cards(0..6), json!({}));
    // 5 is gone, 6 is new, and 2 has other pixels.
    let now = || cards([0, 1, 12, 3, 4, 6]);
    let second = after(vec![first.publish()], now());
    assert_eq!(second.made_anew(), (2, 0));
    assert!(second.outcome().summary.contains("(2 new, 4 reused)"), "{}", second.outcome().summary);
    same_as_afresh(&second, now());
    let third = after(vec![second.publish(), first.publish()], cards(0..6));
    assert_eq!(third.made_anew(), (0, 0), "back again: what was removed is still in the older artifact");
    same_as_afresh(&third, cards(0..6));
}

#[test]
fn a_changed_caption_encodes_text_only_and_another_size_pictures_only() {
    let first = run(cards(0..4), json!({}));
    let recaptioned = || {
        let mut cards = cards(0..4);
        cards[1].caption = "another".into();
        cards
    };
    let second = after(vec![first.publish()], recaptioned());
    assert_eq!(second.made_anew(), (0, 1));
    same_as_afresh(&second, recaptioned());
    let world = World { previous: vec![first.publish()], ..World::default() };
    let larger = run_in_world(&world, cards(0..4), json!({"max_pixels": 16384}), Settings::default(), 1, |_| {});
    assert_eq!(larger.made_anew(), (4, 0));
}

#[test]
fn equal_pictures_are_encoded_once() {
    let twins = || {
        let mut cards = cards([0, 0, 1]);
        cards[1].sample_id += "-2";
        cards
    };
    let made = run(twins(), json!({}));
    assert_eq!((made.made_anew().0, made.outcome().ledger.out), (2, 3));
    same_as_afresh(&after(vec![made.publish()], twins()), twins());
}

/// Sample id → the bits of its latent.
fn latents(run: &Run) -> BTreeMap<String, Vec<u16>> {
    let table = TableReader::open(&run.output().join("latents")).unwrap();
    let rows: Vec<Latent> = table.rows::<Latent>().map(|row| row.unwrap().1).collect();
    assert_eq!(rows.len() as u64, run.outcome().ledger.out);
    rows.into_iter().map(|row| (row.sample_id, row.latent.iter().map(|value| value.to_bits()).collect())).collect()
}

/// Samples that show one picture share what was made of it, and none gets what is another's: neither from what a run has made
/// itself, nor from earlier artifacts or tries.
#[test]
fn every_sample_has_the_latent_of_its_own_picture_however_often_it_is_there() {
    // All of one bucket, so of one file.
    let card = |n: u32| sample(&picture(64, 64, n), "a card");
    let own: Vec<_> = (0..6).map(|n| latents(&run(vec![card(n)], json!({}))).into_values().next().unwrap()).collect();
    let mut previous = Vec::new();
    let mut kept = Vec::new();
    for round in 0..8u32 {
        // Some pictures once, some two or three times, under ids in their order or in none.
        let shown: Vec<u32> = (0..6).flat_map(|n| vec![n; ((n + round) * 7 % 5 % 4) as usize]).collect();
        let named = |(place, n): (usize, &u32)| {
            let ordered = format!("{place:016}");
            let name = if round % 2 == 0 { ordered } else { store::Digest::of_bytes(ordered.as_bytes()).to_string() };
            ((name.clone(), *n), Sample { sample_id: name, ..card(*n) })
        };
        let (whose, samples): (BTreeMap<_, _>, Vec<_>) = shown.iter().enumerate().map(named).unzip();
        let made = after(previous.clone(), samples.clone());
        let found = latents(&made);
        assert_eq!(found.len(), whose.len());
        for (name, n) in whose {
            assert!(found[&name] == own[n as usize], "round {round}: `{name}` has not the latent of picture {n}");
        }
        same_as_afresh(&made, samples);
        // What is offered next: nothing, an artifact, or what a killed try left.
        previous = match round % 3 {
            0 => vec![made.publish()],
            1 => vec![made.folder.path().join("scratch")],
            _ => Vec::new(),
        };
        kept.push(made);
    }
}

#[test]
fn what_a_killed_try_of_another_key_left_is_taken_over() {
    let killed = run(cards(0..5), json!({}));
    let scratch = killed.folder.path().join("scratch");
    let second = after(vec![scratch.clone()], cards([0, 1, 2, 3, 7]));
    assert_eq!(second.made_anew(), (1, 0));
    same_as_afresh(&second, cards([0, 1, 2, 3, 7]));
    // A half-written file, and one whose bits flipped.
    let part = files_of(&scratch.join("latents")).remove(0);
    flip(&part, 3000);
    fs_err::write(scratch.join("latents/next.parquet.part"), "half").unwrap();
    let third = after(vec![scratch], cards(0..5));
    assert_eq!(third.made_anew(), (5, 0));
    same_as_afresh(&third, cards(0..5));
}

#[test]
fn nothing_is_taken_from_a_damaged_file() {
    let first = run(cards(0..4), json!({}));
    let artifact = first.publish();
    let (captions, latents): (Vec<_>, Vec<_>) = first
        .files()
        .into_keys()
        .filter(|name| name != "rejects.parquet")
        .partition(|name| name.starts_with("captions"));
    // In the middle of the values, where no decoder sees it.
    flip(&artifact.join(&latents[0]), 1000);
    let second = after(vec![artifact.clone()], cards(0..4));
    let lost = second.made_anew().0;
    assert!(lost > 0 && second.made_anew().1 == 0);
    same_as_afresh(&second, cards(0..4));
    flip(&artifact.join(&captions[0]), 1000);
    assert_eq!(after(vec![artifact], cards(0..4)).made_anew(), (lost, 5));
}

#[test]
fn a_swapped_vae_makes_all_latents_stale_and_no_text_and_a_swapped_t5_the_reverse() {
    let first = run(cards(0..3), json!({}));
    let artifact = first.publish();
    let swapped = |component: &str| {
        let folder = tempfile::tempdir().unwrap();
        copy(&model(), folder.path());
        // The last byte is the high half of the last weight: another number, as valid.
        let weights = files_of(&folder.path().join(component))
            .into_iter()
            .find(|p| p.extension().is_some_and(|e| e == "safetensors"));
        let weights = weights.unwrap();
        let last = fs_err::metadata(&weights).unwrap().len() as usize - 2;
        flip(&weights, last);
        let made = with(&World { model: folder.path().into(), previous: vec![artifact.clone()] }, cards(0..3));
        made.made_anew()
    };
    assert_eq!(swapped("vae"), (3, 0));
    assert_eq!(swapped("text_encoder_2"), (0, 4));
    assert_eq!(swapped("transformer"), (0, 0), "no latent and no text depends on it");
}

fn files_of(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs_err::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs_err::read(path).unwrap();
    bytes[at] ^= 1;
    // Not in place: an earlier file may share it.
    fs_err::remove_file(path).unwrap();
    fs_err::write(path, bytes).unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs_err::create_dir_all(to).unwrap();
    for path in files_of(from) {
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs_err::copy(&path, &target).unwrap();
        }
    }
}

//! What `check` finds before anything is loaded.

use std::path::Path;

use encode::{Encode, Settings};
use serde_json::{Value, json};
use stage::{CheckRequest, Checked, SourceKind, Stage};

use crate::support::{World, model, picture, run_in_world, sample};

fn check(extra: Value) -> Checked {
    let mut parameters = json!({"model": model()});
    parameters.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let request = CheckRequest::new(parameters.clone(), "/nowhere");
    Encode::check(&serde_json::from_value(parameters).unwrap(), &Settings::default(), &request)
}

/// A copy of some of a model's files.
fn some_of(model: &Path, wanted: impl Fn(&str) -> bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in store::files_matching(model, &[]).unwrap().into_iter().filter(|file| wanted(file)) {
        let target = folder.path().join(&file);
        fs_err::create_dir_all(target.parent().unwrap()).unwrap();
        fs_err::copy(model.join(&file), target).unwrap();
    }
    folder
}

/// A copy of the model without some of its files.
fn model_without(part: &str) -> tempfile::TempDir {
    some_of(&model(), |file| !file.starts_with(part))
}

/// What counts as the model is all that is read of it: of one on the Hub, nothing else is there.
#[test]
fn a_model_of_any_family_is_encoded_with_from_the_parts_that_count() {
    for name in ["flux-tiny", "wan-tiny", "wan22-tiny"] {
        let model = model().with_file_name(name);
        let parts = check(json!({"model": model})).sources.remove(0).parts;
        let counted = store::files_matching(&model, &parts).unwrap();
        let counted = some_of(&model, |file| counted.iter().any(|other| other == file));
        let world = World { model: counted.path().into(), ..World::default() };
        let samples = vec![sample(&picture(64, 64, 1), "a card")];
        let made = run_in_world(&world, samples, json!({}), Settings::default(), 1, |_| {});
        assert_eq!(made.outcome().ledger.out, 1, "{name}");
    }
}

#[test]
fn a_good_folder_is_one_source_with_the_parts_that_count() {
    let checked = check(json!({}));
    assert_eq!(checked.problems, []);
    let source = &checked.sources[0];
    assert_eq!((source.name.as_str(), source.kind), ("model", SourceKind::Path));
    assert!(
        source.parts.iter().any(|part| part == "vae/**")
            && !source.parts.iter().any(|part| part.contains("transformer") && !part.ends_with("config.json"))
    );
    assert!(!checked.key.to_string().contains("flux-tiny"), "locations are no part of the key");
}

#[test]
fn a_folder_without_a_needed_piece_is_named_with_the_piece() {
    for part in ["vae", "text_encoder_2", "tokenizer", "model_index.json"] {
        let folder = model_without(part);
        let checked = check(json!({"model": folder.path()}));
        let problem = checked.problems.first().unwrap_or_else(|| panic!("no problem without {part}"));
        assert!(problem.message.contains(&folder.path().display().to_string()), "{}", problem.message);
        assert!(problem.message.contains(part), "{}", problem.message);
        assert_eq!((problem.field.as_deref(), problem.help.is_some()), (Some("model"), true));
    }
}

#[test]
fn impossible_sizes_are_problems_of_their_field() {
    for (extra, field) in [
        (json!({"max_pixels": 100}), "max_pixels"),
        (json!({"buckets": ["384x641"]}), "buckets"),
        (json!({"buckets": ["384"]}), "buckets"),
        (json!({"buckets": ["64x64x5"]}), "buckets"),
        (json!({"quantum": 0}), "quantum"),
        (json!({"quantum": 12}), "quantum"),
        (json!({"max_sequence_length": 0}), "max_sequence_length"),
        (json!({"max_sequence_length": 513}), "max_sequence_length"),
    ] {
        let checked = check(extra.clone());
        let fields: Vec<_> = checked.problems.iter().filter_map(|problem| problem.field.as_deref()).collect();
        assert_eq!(fields, [field], "{extra}");
    }
}

#[test]
fn what_has_no_effect_is_noted() {
    let notes = check(json!({"buckets": ["384x640"], "max_pixels": 5, "seed": 4})).notes;
    assert_eq!(notes.len(), 2, "{notes:?}");
}

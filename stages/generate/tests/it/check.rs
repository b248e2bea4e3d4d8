//! What `check` finds before anything is loaded.

use std::collections::BTreeSet;
use std::path::Path;

use generate::{Generate, Settings};
use serde_json::{Value, json};
use stage::{CheckRequest, Checked, Exit, Stage};

use crate::support::{Setup, copy, fixture};

fn check_in(base: &Path, extra: Value) -> Checked {
    let mut parameters = json!({"model": fixture("flux-tiny"), "prompts": ["x"]});
    parameters.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let inputs = BTreeSet::from(["checkpoint".to_owned()]);
    let request = CheckRequest { inputs, ..CheckRequest::new(parameters.clone(), base) };
    Generate::check(&serde_json::from_value(parameters).unwrap(), &Settings::default(), &request)
}

fn check(extra: Value) -> Checked {
    check_in(Path::new("/nowhere"), extra)
}

#[test]
fn a_good_table_has_no_problem_and_no_location_in_its_key() {
    let checked = check(json!({"lora": fixture("flux-tiny/lora_peft")}));
    assert_eq!(checked.problems, []);
    assert_eq!(checked.sources.iter().map(|source| source.name.as_str()).collect::<Vec<_>>(), ["model", "lora"]);
    assert!(!checked.key.to_string().contains("flux-tiny"), "{}", checked.key);
}

#[test]
fn impossible_values_are_problems_of_their_field() {
    for (extra, field) in [
        (json!({"prompts": []}), "prompts"),
        (json!({"width": 100}), "width"),
        (json!({"height": 0}), "height"),
        (json!({"steps": 0}), "steps"),
        (json!({"images_per_prompt": 0}), "images_per_prompt"),
        (json!({"max_sequence_length": 600}), "max_sequence_length"),
        (json!({"true_cfg_scale": 4.0}), "true_cfg_scale"),
        (json!({"true_cfg_scale": 1.0, "negative_prompt": ""}), "true_cfg_scale"),
        (json!({"seed": u64::MAX}), "seed"),
        (json!({"prompts": ["a\u{0}b"]}), "prompts"),
        (json!({"negative_prompt": "a\u{0}b"}), "prompts"),
        (json!({"lora": "gone.safetensors"}), "lora"),
        (json!({"lora": fixture("flux-tiny/scheduler")}), "lora"),
        (json!({"model": "gone"}), "model"),
        (json!({"guidance_2": 3.0, "model": fixture("flux-tiny")}), "guidance_2"),
        (json!({"guidance_2": 3.0, "guidance": 1.0, "model": fixture("wan22-tiny"), "frames": 5}), "guidance_2"),
    ] {
        let checked = check(extra.clone());
        let fields: Vec<_> = checked.problems.iter().filter_map(|problem| problem.field.as_deref()).collect();
        assert_eq!(fields, [field], "{extra}: {:?}", checked.problems);
    }
}

#[test]
fn the_guidance_of_a_second_denoiser_is_part_of_the_key() {
    let key = |extra: Value| {
        let mut parameters = json!({"model": fixture("wan22-tiny"), "frames": 5, "width": 32, "height": 32});
        parameters.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let checked = check(parameters);
        assert_eq!(checked.problems, []);
        checked.key
    };
    assert_ne!(key(json!({})), key(json!({"guidance_2": 2.0})));
    assert!(key(json!({})).get("guidance_2").is_none(), "keys of other models stay what they are");
}

#[test]
fn a_lora_that_is_not_there_is_told_what_may_be_named() {
    let problem = check(json!({"lora": "gone"})).problems.remove(0);
    assert!(problem.message.contains("neither an existing file or folder nor a Hub id"), "{problem:?}");
    assert!(problem.help.unwrap().contains("`.safetensors` file, or of a folder with one"));
}

#[test]
fn a_prompt_in_the_wrong_encoding_is_noted() {
    let notes = |extra: Value| check(extra).notes.into_iter().filter(|note| note.contains("wrong encoding")).count();
    assert_eq!(notes(json!({"prompts": ["un café", "un cafÃ©"]})), 1);
    assert_eq!(notes(json!({"prompts": ["un café"], "negative_prompt": "flouÃ©"})), 1);
    assert_eq!(notes(json!({"prompts": ["un café"]})), 0);
}

#[test]
fn a_recipe_that_trains_nothing_draws_with_the_base_model_or_a_lora_on_it() {
    let check = |extra: Value| {
        let mut parameters = json!({"model": fixture("flux-tiny"), "prompts": ["x"]});
        parameters.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let request = CheckRequest::new(parameters.clone(), "/nowhere");
        let checked = Generate::check(&serde_json::from_value(parameters).unwrap(), &Settings::default(), &request);
        checked.problems.into_iter().filter_map(|problem| problem.field).collect::<Vec<_>>()
    };
    let lora = fixture("flux-tiny/lora_peft");
    assert_eq!(check(json!({})), [""; 0]);
    assert_eq!(check(json!({"lora": lora, "with_base": true})), [""; 0]);
    assert_eq!(check(json!({"checkpoint": "epoch_0_step_3"})), ["checkpoint"]);
    assert_eq!(check(json!({"with_base": true})), ["with_base"]);
}

#[test]
fn a_prompt_file_is_consulted_and_its_contents_are_in_the_key() {
    let base = tempfile::tempdir().unwrap();
    fs_err::write(base.path().join("a.txt"), "one\ntwo\n").unwrap();
    fs_err::write(base.path().join("b.txt"), "one\nthree\n").unwrap();
    let key = |file: &str| check_in(base.path(), json!({"prompts": [], "prompts_file": file}));
    assert_eq!(key("a.txt").consulted, [base.path().join("a.txt")]);
    assert_ne!(key("a.txt").key, key("b.txt").key);
    fs_err::copy(base.path().join("a.txt"), base.path().join("c.txt")).unwrap();
    assert_eq!(key("a.txt").key, key("c.txt").key);
}

#[test]
fn a_prompt_file_in_another_encoding_names_file_line_and_offset() {
    let base = tempfile::tempdir().unwrap();
    fs_err::write(base.path().join("p.txt"), b"ok\nna\xefve\n").unwrap();
    let problem = check_in(base.path(), json!({"prompts_file": "p.txt"})).problems.remove(0);
    assert_eq!((problem.line, problem.file), (Some(2), Some(base.path().join("p.txt"))));
    assert!(problem.message.contains("offset 5"), "{}", problem.message);
}

#[test]
fn what_follows_from_a_parameter_is_noted() {
    let steered = |model: Value| {
        let notes = check(json!({"negative_prompt": "blur", "model": model})).notes;
        notes.into_iter().find(|note| note.contains("true classifier-free guidance"))
    };
    let flux = steered(json!(fixture("flux-tiny"))).unwrap();
    assert!(flux.ends_with("with scale 4"), "{flux}");
    // Its `guidance` is that, with a negative prompt and without.
    assert_eq!(steered(json!(fixture("wan-tiny"))), None);
    let unseen = steered(json!("owner/name@0123456789012345678901234567890123456789")).unwrap();
    assert!(unseen.contains("scale 4, unless"), "{unseen}");
    let odd = check(json!({"model": fixture("flux-odd")}));
    assert!(odd.notes.iter().any(|note| note.starts_with("`guidance` has no effect")), "{:?}", odd.notes);
}

/// A model of the Hub is not looked at before it was fetched: the run says what `check` says of a folder, and as a mistake in the
/// recipe.
#[test]
fn a_run_refuses_what_check_refuses_of_a_folder() {
    let clips = json!({"width": 32, "height": 32, "frames": 5});
    for (model, extra) in [
        ("flux-tiny", json!({"width": 100})),
        ("flux-tiny", json!({"height": 0})),
        ("flux-tiny", json!({"max_sequence_length": 600})),
        ("flux-tiny", json!({"frames": 5})),
        ("flux-tiny", json!({"fps": 8})),
        ("flux-tiny", json!({"guidance_2": 3.0})),
        ("wan-tiny", json!({"frames": 6})),
        ("wan-tiny", json!({"fps": 0})),
        ("wan-tiny", json!({"true_cfg_scale": 4.0})),
        ("wan-tiny", json!({"true_cfg_scale": 4.0, "negative_prompt": "rain"})),
        ("wan22-tiny", json!({"guidance_2": 3.0, "guidance": 1.0})),
        ("wan22-tiny", json!({"true_cfg_scale": 4.0, "negative_prompt": ""})),
    ] {
        let mut parameters = json!({"model": fixture(model), "prompts": ["x"]});
        let fields = parameters.as_object_mut().unwrap();
        fields.extend(clips.as_object().unwrap().clone().into_iter().filter(|_| model.starts_with("wan")));
        fields.extend(extra.as_object().unwrap().clone());
        let checked = check(parameters.clone());
        let [problem] = checked.problems.as_slice() else { panic!("{model} {extra}: {:?}", checked.problems) };
        let failure = Setup::new(fixture(model), parameters).run().result.unwrap_err();
        assert_eq!(failure.exit, Exit::Recipe, "{model} {extra}: {failure:?}");
        assert_eq!(failure.problem, *problem, "{model} {extra}");
    }
}

#[test]
fn a_folder_without_a_needed_piece_is_named_with_the_piece() {
    for part in ["transformer", "scheduler"] {
        let folder = tempfile::tempdir().unwrap();
        copy(&fixture("flux-tiny"), folder.path());
        fs_err::remove_dir_all(folder.path().join(part)).unwrap();
        let problem = check(json!({"model": folder.path()})).problems.remove(0);
        assert!(problem.message.contains(part) && problem.message.contains(&folder.path().display().to_string()));
    }
}

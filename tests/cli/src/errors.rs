//! A user's mistakes: each gets its place, the rule and what to do, a documented exit code, and no partial artifact.

use crate::project::{recipe, small, tiny_flux};
use crate::support::{Sandbox, copy_folder};

/// Runs the small recipe after `edit` changed its text.
fn with_recipe(sandbox: &Sandbox, edit: impl Fn(String) -> String) {
    sandbox.write("small.toml", &edit(recipe("pictures", &tiny_flux().to_string_lossy())));
}

fn nothing_published(sandbox: &Sandbox, stage: &str) {
    let folder = sandbox.path(".pipeline/artifacts").join(stage);
    let count = fs_err::read_dir(folder).map_or(0, Iterator::count);
    assert_eq!(count, 0, "a failed `{stage}` published something");
}

#[test]
fn a_missing_recipe_is_named() {
    Sandbox::new().pipeline(&["run", "nowhere.toml"]).expect(3).says(&["nowhere.toml"]);
}

#[test]
fn broken_toml_shows_its_line() {
    let sandbox = small();
    sandbox.write("small.toml", "name = \"small\"\n[ingest\n");
    sandbox.pipeline(&["run", "small.toml"]).expect(3).says(&["small.toml:2"]);
}

#[test]
fn an_unknown_key_gets_its_place_and_a_suggestion() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text.replace("max_pixels", "max_pixls"));
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&[
        "max_pixls",
        "small.toml",
        "did you mean `max_pixels`?",
    ]);
}

#[test]
fn an_unknown_training_key_gets_its_place_and_a_suggestion() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text.replace("ckpt_every_steps", "ckpt_evry_steps"));
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["ckpt_evry_steps", "did you mean `ckpt_every_steps`?"]);
}

#[test]
fn an_unknown_stage_gets_a_suggestion() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text.replace("[generate]", "[generat]"));
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["generat", "did you mean `generate`?"]);
}

#[test]
fn a_wrong_type_says_what_was_expected() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text.replace("max_pixels = 8192", "max_pixels = \"big\""));
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["max_pixels", "small.toml", "big"]);
}

#[test]
fn a_set_override_is_checked_like_the_file() {
    small().pipeline(&["plan", "small.toml", "--set", "encode.max_pixls=1"]).expect(3).says(&[
        "--set",
        "max_pixls",
        "did you mean",
    ]);
}

#[test]
fn a_missing_data_set_is_named() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text.replace("\"pictures\"", "\"picturez\""));
    sandbox.pipeline(&["run", "small.toml"]).expect(4).says(&["picturez"]);
}

#[test]
fn a_missing_column_lists_those_there_are() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text.replace("caption_column = \"text\"", "caption_column = \"txt\""));
    sandbox.pipeline(&["run", "small.toml"]).expect(3).says(&["txt", "text", "file_name"]);
    nothing_published(&sandbox, "ingest");
}

#[test]
fn an_empty_data_set_is_an_error() {
    let sandbox = small();
    fs_err::create_dir_all(sandbox.path("empty")).expect("a folder");
    with_recipe(&sandbox, |text| text.replace("\"pictures\"", "\"empty\""));
    sandbox.pipeline(&["run", "small.toml"]).expect(4).says(&["empty"]);
    nothing_published(&sandbox, "ingest");
}

#[test]
fn a_model_folder_without_a_vae_says_so_before_anything_runs() {
    let sandbox = small();
    copy_folder(&tiny_flux(), &sandbox.path("model"));
    fs_err::remove_dir_all(sandbox.path("model/vae")).expect("a VAE to remove");
    sandbox.write("small.toml", &recipe("pictures", "model"));
    sandbox.pipeline(&["plan", "small.toml"]).expect(4).says(&["vae", "model"]);
    nothing_published(&sandbox, "ingest");
}

#[test]
fn a_lora_pattern_that_matches_nothing_is_found_at_plan_time() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text + "\n[train.peft]\ndim = 2\nalpha = 4\ntarget_modules = [\"*.attn.to_qq\"]\n");
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["to_qq", "did you mean", "*.attn.to_q"]);
}

#[test]
fn a_prompt_file_that_is_not_utf8_names_its_place() {
    let sandbox = small();
    fs_err::write(sandbox.path("prompts.txt"), b"a disc\na caf\xe9\n").expect("a file");
    with_recipe(&sandbox, |text| {
        text.replace("prompts = [\"a trtcrd of a disc\", \"a disc\"]", "prompts_file = \"prompts.txt\"")
    });
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["prompts.txt", "UTF-8"]);
}

#[test]
fn batch_sizes_that_do_not_divide_show_the_arithmetic() {
    let sandbox = small();
    with_recipe(&sandbox, |text| text.replace("global_batch_size = 8", "global_batch_size = 7"));
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["global_batch_size", "7", "4"]);
}

#[test]
fn a_bad_picture_becomes_a_reject_and_the_rest_goes_on() {
    let sandbox = small();
    fs_err::write(sandbox.path("pictures/03.png"), b"not a picture").expect("a file");
    sandbox.pipeline(&["run", "small.toml", "--until", "encode"]).expect(0);
    sandbox
        .pipeline(&["sql", "small.toml", "select source, reason from rejects", "--format", "csv"])
        .expect(0)
        .says(&["03.png"]);
    sandbox
        .pipeline(&["sql", "small.toml", "select count(*) as n from samples", "--format", "csv"])
        .expect(0)
        .says(&["11"]);
}

#[test]
fn sql_mistakes_name_what_there_is() {
    let sandbox = small();
    sandbox.pipeline(&["run", "small.toml", "--until", "ingest"]).expect(0);
    sandbox.pipeline(&["sql", "small.toml", "select capton from samples"]).says(&["capton", "caption"]);
    sandbox.pipeline(&["sql", "small.toml", "select * from sample"]).says(&["sample", "samples"]);
}

#[test]
fn an_unknown_command_is_a_usage_error() {
    small().pipeline(&["rnu", "small.toml"]).expect(2).says(&["rnu", "did you mean `run`?"]);
}

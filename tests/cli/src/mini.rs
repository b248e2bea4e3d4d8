//! The small model that comes with the project learns from cards what the trigger means.

use std::process::Command;

use crate::support::{Sandbox, program, workspace};

/// Mean of `style` with the trigger less that without it, of the pictures whose names fit.
fn margin(sandbox: &Sandbox, names: &str) -> f64 {
    let query = format!(
        "select avg(w.style - o.style) from images w join images o on w.seed = o.seed and \
         w.prompt = 'a trtcrd of ' || o.prompt where w.file {names} and o.file {names}"
    );
    let answer = sandbox.pipeline(&["sql", "mini.toml", &query, "--format", "csv"]).expect(0).stdout;
    answer.lines().nth(1).and_then(|line| line.parse().ok()).unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn the_trigger_calls_the_cards_after_training_and_not_before() {
    let sandbox = Sandbox::new();
    let size = ["--width", "96", "--height", "144", "--scenes", "78"];
    let drawn = Command::new(program("draw-deck")).arg(sandbox.path("deck")).args(size).status();
    let drawn = drawn.expect("draw-deck starts");
    assert!(drawn.success());
    let recipes = workspace().join("recipes");
    let recipe = fs_err::read_to_string(recipes.join("tarot-mini.toml")).expect("the recipe");
    let recipe = recipe
        .replace("../runs/deck-with-scenes", "deck")
        .replace("\"..", &format!("\"{}", workspace().display()))
        .replace("tarot_mini.yaml", &recipes.join("tarot_mini.yaml").display().to_string());
    sandbox.write("mini.toml", &recipe);
    let run = ["run", "mini.toml", "--set", "train.step_scheduler.max_steps=60", "--set", "generate.steps=8"];
    let rest = ["--set", "train.step_scheduler.ckpt_every_steps=60", "--set", "train.samples.every_steps=60"];
    sandbox.pipeline(&[run.as_slice(), rest.as_slice()].concat()).expect(0);
    let (before, after) = (margin(&sandbox, "like '%_base.png'"), margin(&sandbox, "not like '%_base.png'"));
    assert!(before.abs() < 0.05, "the base model does not know the trigger: {before}");
    assert!(after > 0.1, "the trigger calls the style: {after}, {before} before");
}

//! Patterns, and what an adapter adds.

use super::*;

fn linears() -> Vec<String> {
    [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.11.attn.to_q",
        "single_transformer_blocks.0.attn.to_out",
        "single_transformer_blocks.0.proj_mlp",
        "x_embedder",
    ]
    .map(str::to_owned)
    .to_vec()
}

fn selected(patterns: &[&str]) -> Vec<String> {
    let spec = Spec::new(4, 4.0, patterns.iter().copied());
    linears().into_iter().filter(|name| spec.selects(name)).collect()
}

#[test]
fn patterns_follow_automodel_and_peft() {
    assert_eq!(selected(&["to_q"]), ["transformer_blocks.0.attn.to_q", "transformer_blocks.11.attn.to_q"]);
    assert_eq!(selected(&["attn.to_q"]).len(), 2);
    assert_eq!(selected(&["0.attn.to_q"]), ["transformer_blocks.0.attn.to_q"]);
    assert_eq!(selected(&["o_q", "embedder", "transformer_blocks"]), [""; 0]); // whole segments at the end only
    assert_eq!(selected(&["to_out.0"]), ["transformer_blocks.0.attn.to_out.0"]);
    assert_eq!(selected(&["*.to_q", "x_embedder"]).len(), 3);
    assert_eq!(selected(&["transformer_blocks.*"]).len(), 3); // anchored: not the single blocks
    assert_eq!(selected(&["*"]).len(), 6);
}

#[test]
fn exclusions_win() {
    let spec = Spec { exclude: vec!["*.11.*".to_owned()], ..Spec::new(4, 4.0, ["to_q"]) };
    assert!(spec.selects("transformer_blocks.0.attn.to_q") && !spec.selects("transformer_blocks.11.attn.to_q"));
}

#[test]
fn a_pattern_for_nothing_is_an_error_with_the_nearest_names() {
    let help = |pattern: &str| match Spec::new(4, 4.0, ["to_q", pattern]).check(&linears()).unwrap_err() {
        Error::UnmatchedAdapter { what: "target", pattern: named, help } => {
            assert_eq!(named, pattern);
            help.unwrap_or_default()
        }
        other => panic!("{other}"),
    };
    assert_eq!(help("to_p"), "did you mean `to_q`?");
    // The pattern of the peer's FLUX.2 recipe that silently adapts nothing.
    let help = help("*.single_transformer_blocks.*.attn.to_out");
    assert!(help.starts_with("did you mean `single_transformer_blocks.*.attn.to_out`"), "{help}");
}

#[test]
fn settings_without_meaning_are_errors() {
    let message = |change: fn(&mut Spec)| {
        let mut spec = Spec::new(4, 4.0, ["to_q"]);
        change(&mut spec);
        spec.check(&linears()).unwrap_err().to_string()
    };
    assert_eq!(message(|spec| spec.rank = 0), "LoRA rank must be at least 1, not 0");
    assert_eq!(message(|spec| spec.dropout = 1.0), "LoRA dropout must be at least 0 and below 1, not 1");
    assert_eq!(message(|spec| spec.alpha = f64::NAN), "LoRA alpha must be a number, not NaN");
    assert_eq!(message(|spec| spec.targets.clear()), "LoRA has no targets");
    assert_eq!(message(|spec| spec.exclude = vec!["*".to_owned()]), "LoRA excludes every layer that it targets");
}

#[test]
fn scale_follows_the_layers_own_rank_and_alpha() {
    let mut spec = Spec::new(16, 32.0, ["to_q"]);
    spec.rank_pattern.insert("transformer_blocks.11.attn.to_q".to_owned(), 4);
    spec.alpha_pattern.insert("*.11.*".to_owned(), 1.0);
    assert_eq!(spec.scale_of("transformer_blocks.0.attn.to_q"), 2.0);
    assert_eq!(spec.scale_of("transformer_blocks.11.attn.to_q"), 0.25);
    spec.rslora = true;
    assert_eq!(spec.scale_of("transformer_blocks.0.attn.to_q"), 8.0);
}

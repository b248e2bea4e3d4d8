//! Which pictures to draw: prompts times copies, with seeds and file names. Knows no model.

use models::Sampling;

use crate::parameters::Parameters;
use crate::prompts::Prompt;

/// Scale of true classifier-free guidance when a negative prompt comes without one.
pub(crate) const DEFAULT_TRUE_CFG: f64 = 4.0;

/// One picture.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shot {
    /// Position in the run, from 0: the number in the file name.
    pub(crate) index: usize,
    /// What to draw.
    pub(crate) prompt: String,
    /// The prompt without the trigger, if this shot has it.
    pub(crate) plain: Option<String>,
    /// What to steer away from, and how strongly.
    pub(crate) negative: Option<(String, f64)>,
    /// Seed of the initial noise.
    pub(crate) seed: u64,
}

impl Shot {
    /// `000_first_words_of_the_prompt.png`; with `_base` for the untrained model, and `.mp4` for a clip.
    pub(crate) fn file_name(&self, base: bool, extension: &str) -> String {
        format!("{:03}{}{}.{extension}", self.index, slug(&self.prompt), if base { "_base" } else { "" })
    }
}

/// All pictures, in order: every prompt starts at its own seed or the recipe's, and its copies count up from there. A copy
/// with the trigger follows its plain one.
pub(crate) fn shots(parameters: &Parameters, prompts: &[Prompt], rules: Sampling) -> Vec<Shot> {
    let copies = u64::from(parameters.images_per_prompt);
    let triggers: Vec<Option<&str>> = std::iter::once(None).chain(parameters.trigger.as_deref().map(Some)).collect();
    let one = |prompt: &Prompt, copy: u64, trigger: Option<&str>| {
        let negative = prompt.negative_prompt.as_ref().or(parameters.negative_prompt.as_ref());
        let steered = if rules.classifier_free {
            let text = negative.cloned().unwrap_or_default();
            (parameters.guidance > 1.0).then_some((text, parameters.guidance))
        } else {
            negative.map(|text| (text.clone(), parameters.true_cfg_scale.unwrap_or(DEFAULT_TRUE_CFG)))
        };
        Shot {
            index: 0,
            prompt: trigger.map_or_else(|| prompt.prompt.clone(), |trigger| format!("{trigger} {}", prompt.prompt)),
            plain: trigger.map(|_| prompt.prompt.clone()),
            negative: steered,
            seed: prompt.seed.unwrap_or(parameters.seed) + copy,
        }
    };
    prompts
        .iter()
        .flat_map(|prompt| (0..copies).map(move |copy| (prompt, copy)))
        .flat_map(|(prompt, copy)| triggers.iter().map(move |trigger| one(prompt, copy, *trigger)))
        .enumerate()
        .map(|(index, shot)| Shot { index, ..shot })
        .collect()
}

/// `_` and up to 50 characters of letters and digits, runs of anything else as one `_`; empty if there are none.
fn slug(prompt: &str) -> String {
    let mut slug = String::new();
    for c in prompt.chars().flat_map(char::to_lowercase) {
        if slug.chars().count() > 50 {
            break;
        }
        match c {
            c if c.is_alphanumeric() => {
                if slug.is_empty() {
                    slug.push('_');
                }
                slug.push(c);
            }
            _ if !slug.is_empty() && !slug.ends_with('_') => slug.push('_'),
            _ => {}
        }
    }
    slug.trim_end_matches('_').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLUX: Sampling = Sampling { wide_latents: false, even_levels: true, classifier_free: false };

    fn parameters(extra: &str) -> Parameters {
        serde_json::from_str(&format!(r#"{{"model": "a/b"{extra}}}"#)).unwrap()
    }

    #[test]
    fn every_prompt_starts_at_the_same_seed_and_copies_count_up() {
        let own = Prompt { seed: Some(7), ..Prompt::from("c") };
        let prompts = [Prompt::from("a"), Prompt::from("b"), own];
        let shots = shots(&parameters(r#", "seed": 2026, "images_per_prompt": 2"#), &prompts, FLUX);
        let seen: Vec<_> = shots.iter().map(|shot| (shot.index, shot.prompt.as_str(), shot.seed)).collect();
        assert_eq!(seen, [(0, "a", 2026), (1, "a", 2027), (2, "b", 2026), (3, "b", 2027), (4, "c", 7), (5, "c", 8)]);
    }

    #[test]
    fn the_trigger_doubles_every_picture_from_the_same_noise() {
        let shots =
            shots(&parameters(r#", "images_per_prompt": 2, "trigger": "a trtcrd of""#), &[Prompt::from("a cup")], FLUX);
        let seen: Vec<_> = shots.iter().map(|shot| (shot.prompt.as_str(), shot.plain.as_deref(), shot.seed)).collect();
        let with = ("a trtcrd of a cup", Some("a cup"));
        assert_eq!(seen, [("a cup", None, 0), (with.0, with.1, 0), ("a cup", None, 1), (with.0, with.1, 1)]);
    }

    #[test]
    fn a_negative_prompt_turns_guidance_on_and_the_prompts_own_wins() {
        let own = Prompt { negative_prompt: Some("blur".into()), ..Prompt::from("b") };
        let prompts = [Prompt::from("a"), own];
        let of = |rules: Sampling, extra: &str| {
            shots(&parameters(extra), &prompts, rules).into_iter().map(|shot| shot.negative).collect::<Vec<_>>()
        };
        let negatives = |extra: &str| of(FLUX, extra);
        assert_eq!(negatives(""), [None, Some(("blur".into(), DEFAULT_TRUE_CFG))]);
        assert_eq!(
            negatives(r#", "negative_prompt": "", "true_cfg_scale": 2.5"#),
            [Some((String::new(), 2.5)), Some(("blur".into(), 2.5))]
        );
        let wan = Sampling { classifier_free: true, ..FLUX };
        assert_eq!(of(wan, r#", "guidance": 5.0"#), [Some((String::new(), 5.0)), Some(("blur".into(), 5.0))]);
        assert_eq!(of(wan, r#", "guidance": 1.0"#), [None, None]);
    }

    #[test]
    fn file_names_are_safe_short_and_sort_like_the_run() {
        let name = |prompt: &str, index, base| {
            Shot { index, prompt: prompt.into(), plain: None, negative: None, seed: 0 }.file_name(base, "png")
        };
        assert_eq!(
            name("a trtcrd of an astronaut tending a rose garden on Mars, \"the gardener\"", 0, false),
            "000_a_trtcrd_of_an_astronaut_tending_a_rose_garden_on.png"
        );
        assert_eq!(name("../../etc/passwd", 12, true), "012_etc_passwd_base.png");
        assert_eq!(name("日本の庭", 1, false), "001_日本の庭.png");
        assert_eq!(name("!?", 2, false), "002.png");
        assert!(name(&"字".repeat(500), 3, true).len() <= 255);
    }
}

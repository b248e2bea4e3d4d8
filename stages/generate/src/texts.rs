//! Every distinct text of a run, encoded once, before the denoiser is loaded.

use std::collections::BTreeMap;

use models::{Text, TextEncoders};
use spec::counted;
use stage::{Events, Failure};
use tch::no_grad;

use crate::plan::Shot;
use crate::unusable;

/// Texts at once.
const BATCH: usize = 4;

/// Text → what the encoders make of it.
pub(crate) struct Texts(BTreeMap<String, Text>);

impl Texts {
    /// Encodes prompts and negative prompts.
    pub(crate) fn encode(
        shots: &[Shot],
        encoders: &(dyn TextEncoders + Send + Sync),
        max_tokens: usize,
        events: &Events,
    ) -> Result<Self, Failure> {
        let negatives = shots.iter().filter_map(|shot| shot.negative.as_ref()).map(|(text, _)| text);
        let mut distinct: Vec<String> = shots.iter().map(|shot| &shot.prompt).chain(negatives).cloned().collect();
        distinct.sort();
        distinct.dedup();
        let mut encoded = BTreeMap::new();
        for texts in distinct.chunks(BATCH) {
            for text in texts {
                warn_if_cut(text, encoders, max_tokens, events)?;
            }
            let made = no_grad(|| encoders.encode(texts, max_tokens)).map_err(Failure::from_diagnostic)?;
            encoded.extend(texts.iter().cloned().zip(made));
            events.progress("encoding prompts", encoded.len() as u64, Some(distinct.len() as u64), "prompts", None);
            events.check_interrupted(crate::KEPT)?;
        }
        Ok(Self(encoded))
    }

    /// What the encoders made of `text`.
    pub(crate) fn get(&self, text: &str) -> Option<&Text> {
        self.0.get(text)
    }
}

fn warn_if_cut(
    text: &str,
    encoders: &(dyn TextEncoders + Send + Sync),
    max_tokens: usize,
    events: &Events,
) -> Result<(), Failure> {
    for (encoder, length) in encoders.lengths(text, max_tokens).map_err(unusable)? {
        if length.tokens > length.limit {
            let start: String = text.chars().take(60).collect();
            events.warning(format!(
                "text encoder `{encoder}` reads {} of {} of {start:?}…; the rest is cut off",
                length.limit,
                counted(length.tokens, "token")
            ));
        }
    }
    Ok(())
}

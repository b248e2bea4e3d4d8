//! Looks the parameters over before anything is loaded: bad sizes, and a local model folder without a needed piece.

use std::path::Path;

use models::ModelFolder;
use spec::Problem;
use stage::{Checked, Source, SourceKind};

use crate::parameters::{Parameters, Posterior, Settings};
use crate::plan::{Grid, layout};

/// Files of a model that decide its latents and embeddings; of the denoiser, the size of its patches.
const PARTS: &[&str] = &["model_index.json", "transformer/config.json", "vae/**", "text_encoder*/**", "tokenizer*/**"];

/// What is wrong, what the result depends on, and what has no effect.
pub(crate) fn check(parameters: &Parameters, settings: &Settings, base_dir: &Path) -> Checked {
    let mut checked = Checked { key: parameters.key(), ..Checked::default() };
    let mut grid = Grid::UNKNOWN;
    match Source::model("model", &parameters.model, None, base_dir, PARTS) {
        Ok(source) => {
            if source.kind == SourceKind::Path {
                match look_at(Path::new(&source.location), parameters) {
                    Ok((found, problems)) => {
                        grid = found;
                        checked.problems.extend(problems);
                    }
                    Err(problem) => checked.problems.push(problem.field("model")),
                }
            }
            checked.sources.push(source);
        }
        Err(problem) => checked.problems.push(problem),
    }
    // A model on the Hub says its sizes only when it is there; then `run` looks again.
    if let Err(problems) = layout(parameters, grid) {
        checked.problems.extend(problems);
    }
    for (name, value) in [("batch_size", settings.batch_size), ("text_batch_size", settings.text_batch_size)] {
        if value == Some(0) {
            checked.problems.push(Problem::new(format!("`{name}` is 0, expected 1 or more")).field(name));
        }
    }
    if parameters.max_sequence_length == 0 {
        let problem =
            Problem::new("`max_sequence_length` is 0, expected 1 or more").help("FLUX.1-dev is used with 512");
        checked.problems.push(problem.field("max_sequence_length"));
    }
    checked.notes.extend(notes(parameters));
    checked
}

/// Parameters that are accepted but change nothing.
fn notes(parameters: &Parameters) -> Vec<String> {
    let mut notes = Vec::new();
    if !parameters.buckets.is_empty() && parameters.max_pixels.is_some() {
        notes.push("`max_pixels` has no effect beside `buckets`".to_owned());
    }
    if parameters.posterior == Posterior::Mean && parameters.seed != 0 {
        notes.push("`seed` has no effect with `posterior = \"mean\"`".to_owned());
    }
    notes
}

/// Sizes of a local model whose VAE and text encoders are all there, and what of the parameters does not fit it.
fn look_at(path: &Path, parameters: &Parameters) -> Result<(Grid, Vec<Problem>), Problem> {
    let problem = |error: models::Error| {
        let help = miette::Diagnostic::help(&error).map(|help| help.to_string());
        Problem { help, ..Problem::new(error.to_string()) }
    };
    let folder = ModelFolder::open(path).map_err(problem)?;
    let family = models::family_of(&folder).map_err(problem)?;
    for part in family.vae_parts().iter().chain(family.text_parts()) {
        // A pattern's fixed beginning is a component folder or a file.
        let fixed = part.split(['*', '?', '[']).next().unwrap_or_default().trim_end_matches('/');
        if !fixed.is_empty() && !path.join(fixed).exists() {
            return Err(Problem::new(format!("model folder `{}` has no `{fixed}`", path.display())).help(
                "`encode` needs the VAE, the text encoders and the tokenizers; give a complete diffusers folder",
            ));
        }
    }
    let tokens = parameters.max_sequence_length as usize;
    let too_long = (tokens > family.max_tokens()).then(|| {
        let limit = family.max_tokens();
        Problem::new(format!("`max_sequence_length` is {tokens}, expected at most {limit}"))
            .field("max_sequence_length")
    });
    Ok((Grid::of(family, &folder).map_err(problem)?, too_long.into_iter().collect()))
}

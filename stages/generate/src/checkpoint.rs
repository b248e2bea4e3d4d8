//! What training left: the newest or the named `epoch_E_step_S`, and whether it is a pipeline or an adapter.

use std::path::{Path, PathBuf};

use serde_json::Value;
use spec::{Problem, suggest};

/// Files of an adapter, in the dialects of diffusers and PEFT.
pub(crate) const ADAPTER_FILES: [&str; 2] = ["pytorch_lora_weights.safetensors", "adapter_model.safetensors"];

/// Stands for the checkpoint that training found the best.
const BEST: &str = "best";

/// Where in a folder an adapter may lie: that of the first denoiser, that of another.
pub(crate) const ADAPTER_PLACES: [&str; 2] = ["", "transformer_2"];

/// Whether there is an adapter in a folder, not in one inside it, in whatever dialect.
pub(crate) fn holds_adapter(folder: &Path) -> bool {
    let names = fs_err::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    names.into_iter().any(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
}

/// A checkpoint of the `train` artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// Such as `epoch_66_step_199`.
    pub(crate) name: String,
    /// Its folder.
    pub(crate) path: PathBuf,
    /// What it holds.
    pub(crate) kind: Kind,
}

/// What a checkpoint holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A complete diffusers folder.
    Pipeline,
    /// Adapter files for the base model.
    Lora,
}

/// The checkpoint called `named`, the `best`, or the one with the most steps.
pub(crate) fn find(artifact: &Path, named: Option<&str>) -> Result<Checkpoint, Problem> {
    let mut found = list(artifact)?;
    let best = if named == Some(BEST) { Some(best(artifact)?) } else { None };
    let named = best.as_deref().or(named);
    let (_, name) = match named {
        Some(named) => {
            found.iter().position(|(_, name)| name == named).map(|at| found.swap_remove(at)).ok_or_else(|| {
                Problem::new(format!("training left no checkpoint `{named}`"))
                    .help(suggest::help(named, found.iter().map(|(_, name)| name.as_str())))
                    .field("checkpoint")
            })?
        }
        None => found.pop().ok_or_else(|| {
            Problem::new(format!("there is no checkpoint `epoch_E_step_S` in `{}`", artifact.display()))
                .help("run `train` again: its artifact is incomplete")
        })?,
    };
    let path = artifact.join(&name);
    let kind = if path.join("model_index.json").is_file() {
        Kind::Pipeline
    } else if ADAPTER_PLACES.iter().any(|place| holds_adapter(&path.join(place))) {
        Kind::Lora
    } else {
        let message = format!("checkpoint `{}` holds neither a `model_index.json` nor adapter files", path.display());
        return Err(Problem::new(message).help("run `train` again: its artifact is damaged"));
    };
    Ok(Checkpoint { name, path, kind })
}

/// The name in `best.json`.
fn best(artifact: &Path) -> Result<String, Problem> {
    let text = fs_err::read(artifact.join("best.json")).ok();
    let best: Option<Value> = text.and_then(|text| serde_json::from_slice(&text).ok());
    best.and_then(|best| Some(best["checkpoint"].as_str()?.to_owned())).ok_or_else(|| {
        Problem::new("training singled out no best checkpoint")
            .help("set `checkpoint.best_metric_key: validation_loss` in the training recipe, with a block `validation`")
            .field("checkpoint")
    })
}

/// `((step, epoch), name)` of all checkpoints, by ascending step.
fn list(artifact: &Path) -> Result<Vec<((u64, u64), String)>, Problem> {
    let unreadable = |error: std::io::Error| Problem::new(format!("cannot list the checkpoints: {error}"));
    let mut found = Vec::new();
    for entry in fs_err::read_dir(artifact).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
        if let Some(order) = order(&name) {
            found.push((order, name));
        }
    }
    found.sort();
    Ok(found)
}

/// (step, epoch) of `epoch_E_step_S`.
fn order(name: &str) -> Option<(u64, u64)> {
    let (epoch, step) = name.strip_prefix("epoch_")?.split_once("_step_")?;
    Some((step.parse().ok()?, epoch.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(folders: &[(&str, &str)]) -> tempfile::TempDir {
        let artifact = tempfile::tempdir().unwrap();
        for (folder, file) in folders {
            fs_err::create_dir_all(artifact.path().join(folder)).unwrap();
            fs_err::write(artifact.path().join(folder).join(file), "{}").unwrap();
        }
        artifact
    }

    #[test]
    fn the_most_steps_win_and_not_the_last_name() {
        let artifact = artifact(&[
            ("epoch_9_step_99", "model_index.json"),
            ("epoch_66_step_199", "pytorch_lora_weights.safetensors"),
            ("epoch_7_step_20", "model_index.json"),
            ("samples", "x.png"),
        ]);
        let newest = find(artifact.path(), None).unwrap();
        assert_eq!((newest.name.as_str(), newest.kind), ("epoch_66_step_199", Kind::Lora));
        let named = find(artifact.path(), Some("epoch_9_step_99")).unwrap();
        assert_eq!((named.name.as_str(), named.kind), ("epoch_9_step_99", Kind::Pipeline));
    }

    #[test]
    fn the_best_is_the_one_that_training_named() {
        let artifact = artifact(&[("epoch_9_step_99", "model_index.json"), ("epoch_0_step_4", "model_index.json")]);
        let problem = find(artifact.path(), Some("best")).unwrap_err();
        assert!(problem.help.unwrap().contains("best_metric_key"), "{}", problem.message);
        fs_err::write(artifact.path().join("best.json"), r#"{"checkpoint": "epoch_0_step_4"}"#).unwrap();
        assert_eq!(find(artifact.path(), Some("best")).unwrap().name, "epoch_0_step_4");
    }

    #[test]
    fn a_wrong_name_gets_the_nearest_one_and_no_way_out_of_the_artifact() {
        let artifact = artifact(&[("epoch_9_step_99", "model_index.json")]);
        let problem = find(artifact.path(), Some("epoch_9_step_98")).unwrap_err();
        assert!(problem.help.unwrap().contains("`epoch_9_step_99`"));
        assert!(find(artifact.path(), Some("../epoch_9_step_99")).is_err());
    }

    #[test]
    fn an_artifact_without_or_with_an_empty_checkpoint_is_refused() {
        assert!(find(artifact(&[]).path(), None).unwrap_err().message.contains("no checkpoint"));
        let empty = artifact(&[("epoch_0_step_0", "notes.txt")]);
        assert!(find(empty.path(), None).unwrap_err().message.contains("neither"));
    }
}

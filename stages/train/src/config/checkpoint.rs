//! `checkpoint`: how many are kept, and what a run starts from.

use serde::Serialize;
use serde_json::json;
use spec::Problem;

use super::reader::Block;

/// What of the block has an effect.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Checkpoint {
    /// False: only the last checkpoint is written, since it is the result.
    pub(crate) enabled: bool,
    /// Newest checkpoints to keep; `None` keeps all.
    pub(crate) max_recent: Option<u64>,
    /// The checkpoint with the lowest validation loss is kept, however old it is. Absent from keys of runs without it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) keep_best: bool,
    /// Training goes on while checkpoints are written, from a copy in host memory.
    #[serde(skip)]
    pub(crate) beside_training: bool,
    /// Folder of a checkpoint whose training state the run starts from. Not part of the key: its contents are.
    #[serde(skip)]
    pub(crate) restore_from: Option<String>,
}

impl Checkpoint {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let restore_from = block.text("restore_from").filter(|from| !from.is_empty());
        if restore_from.as_deref() == Some("LATEST") {
            block.note("restore_from", "`LATEST`: an unfinished run always goes on from its newest checkpoint");
        }
        let keep_best = match block.text("best_metric_key").as_deref() {
            // The peer's default, which this stage of the peer does not act on either.
            None | Some("default") => false,
            Some("validation_loss") => true,
            Some(other) => {
                let message = format!("`checkpoint.best_metric_key` is `{other}`");
                let help = "`validation_loss` keeps the checkpoint with the lowest one; `default` singles out none";
                block.problem("best_metric_key", Problem::new(message).help(help));
                false
            }
        };
        let checkpoint = Self {
            keep_best,
            enabled: block.flag("enabled").unwrap_or(true),
            max_recent: block.positive("max_recent_checkpoints"),
            beside_training: block.flag("is_async").unwrap_or(false),
            restore_from: restore_from.filter(|from| from != "LATEST"),
        };
        if !checkpoint.enabled {
            block.note("enabled", "false: the last checkpoint is written all the same, since it is the result");
        }
        block.without_effect("checkpoint_dir", &[], "checkpoints lie in the stage's artifact, `runs/RECIPE/train`");
        block.without_effect("model_save_format", &[json!("safetensors")], "weights are always safetensors");
        block.without_effect(
            "save_consolidated",
            &[json!("every"), json!(true)],
            "every checkpoint is written whole: a diffusers folder, or the files of the adapter",
        );
        block.without_effect("diffusers_compatible", &[json!(true)], "every checkpoint is a diffusers folder");
        for key in ["model_repo_id", "model_cache_dir", "original_model_root_dir", "staging_dir"] {
            block.without_effect(key, &[], "files are made in place, under a temporary name");
        }
        for key in [
            "wait_for_staging",
            "cpu_offload",
            "single_rank_consolidation",
            "consolidation_timeout_minutes",
            "allow_legacy_pickle_restore",
            "dequantize_base_checkpoint",
            "skip_task_head_prefixes_for_base_model",
            "v4_compatible",
            "legacy_paramwrapper_layout",
            "is_peft",
        ] {
            block.without_effect(key, &[json!(false), json!(30)], "one process writes one folder");
        }
        block.finish();
        checkpoint
    }
}

//! The recipe's `[train]` table: the name of a training recipe, and blocks laid over it.
//!
//! Blocks are read by [`crate::config`], which knows every key; here they are only sorted into those that may move a
//! number and those that may not.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A block of the training recipe.
type Block = Option<Map<String, Value>>;

/// What may change the result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Parameters {
    /// Training recipe (YAML, NeMo Automodel's schema), relative to the recipe. Absent: the published FLUX.1 full fine-tune.
    pub config: Option<String>,
    /// Model to train unless `model` names one: a diffusers folder or a Hub id.
    pub base_model: Option<String>,
    /// A diffusers folder or a Hub id; or the block `model` of the training recipe.
    pub model: Option<ModelBlock>,
    /// Seed of order, noise, noise levels and caption dropout.
    pub seed: Option<u64>,
    /// AdamW.
    pub optimizer: Block,
    /// Old name of `optimizer`.
    pub optim: Block,
    /// Learning-rate schedule.
    pub lr_scheduler: Block,
    /// Largest gradient norm.
    pub clip_grad_norm: Block,
    /// Noise levels, loss weights, guidance, caption dropout.
    pub flow_matching: Block,
    /// Batch sizes, length of the run, checkpoints.
    pub step_scheduler: Block,
    /// Order of samples.
    pub data: Block,
    /// Which checkpoints are kept, and what the run starts from.
    pub checkpoint: Block,
    /// LoRA.
    pub peft: Block,
    /// Moving average of the weights.
    pub ema: Block,
    /// Loss at fixed noise levels.
    pub validation: Block,
    /// Pictures while training.
    pub samples: Block,
}

/// A model by name, or the block that also says how it is used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ModelBlock {
    /// Folder or Hub id.
    Name(String),
    /// `model` of the training recipe.
    Block(Map<String, Value>),
}

/// What never changes the result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Parameters in parts on several ranks; `activation_checkpointing` has an effect on one, too.
    pub fsdp: Block,
    /// Copies on several ranks; as `fsdp`.
    pub ddp: Block,
    /// Time-out between ranks.
    pub dist_env: Block,
    /// Checks and kernels.
    pub performance: Block,
    /// Logging of the peer's.
    pub wandb: Block,
    /// Logging of the peer's.
    pub mlflow: Block,
    /// Logging of the peer's.
    pub comet: Block,
    /// Profiling of the peer's.
    pub profiling: Block,
}

/// Key of the model's name in the block.
const NAME: &str = "pretrained_model_name_or_path";

impl Parameters {
    /// All blocks as one table, in the training recipe's own schema.
    pub(crate) fn table(&self, settings: &Settings) -> Map<String, Value> {
        let object = |value: serde_json::Result<Value>| match value {
            Ok(Value::Object(object)) => object,
            _ => Map::new(),
        };
        let mut table = object(serde_json::to_value(self));
        table.extend(object(serde_json::to_value(settings)));
        table.retain(|key, value| !value.is_null() && key != "config" && key != "base_model");
        let mut model = match &self.model {
            Some(ModelBlock::Name(name)) => Map::from_iter([(NAME.to_owned(), name.clone().into())]),
            Some(ModelBlock::Block(block)) => block.clone(),
            None => Map::new(),
        };
        if let Some(base) = &self.base_model {
            model.entry(NAME).or_insert_with(|| base.clone().into());
        }
        if !model.is_empty() {
            table.insert("model".to_owned(), Value::Object(model));
        }
        table
    }
}

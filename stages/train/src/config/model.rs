//! `model`: which weights, and in which number formats they are kept and used.

use nn::Dtype;
use serde::Serialize;
use serde_json::json;
use spec::Problem;

use super::reader::Block;

/// Which model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Model {
    /// Folder or Hub id. Not part of the key: the runner finds the identity of the weights.
    #[serde(skip)]
    pub(crate) name: String,
    #[serde(skip)]
    pub(crate) revision: Option<String>,
    pub(crate) mode: Mode,
    /// Number format of checkpoints, and of the frozen weights under a LoRA.
    pub(crate) torch_dtype: Dtype,
    /// Number format of activations; `None`: bfloat16 where the device has it natively, else float32.
    pub(crate) compute_dtype: Option<Dtype>,
    /// `model_type`, when given: must be the family's name.
    #[serde(skip)]
    pub(crate) family: Option<String>,
    /// Which of a model's two denoisers is trained; all that there are, if none is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stage: Option<Stage>,
    /// Noise level at which the first of two gives way to the second; what the model's folder says, if it is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) boundary_ratio: Option<f64>,
    /// Class of the denoiser that `pipeline_spec` asks for.
    #[serde(skip)]
    pub(crate) transformer_class: Option<String>,
}

/// Where training starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// From the weights of the folder.
    Finetune,
    /// From random weights; the folder gives the configuration and the other components.
    Pretrain,
}

/// One of two denoisers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stage {
    /// Of the levels from the border on.
    HighNoise,
    /// Of those below it.
    LowNoise,
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::HighNoise => "high_noise",
            Self::LowNoise => "low_noise",
        })
    }
}

/// A number format by any of its names; `auto` is none.
/// A number format by its name; `auto` is the default.
pub(super) fn dtype(block: &mut Block<'_>, key: &'static str) -> Option<Dtype> {
    const NAMES: [&str; 7] = ["bfloat16", "bf16", "torch.bfloat16", "float32", "fp32", "torch.float32", "auto"];
    match block.name(key, &NAMES)? {
        "auto" => None,
        name if name.ends_with("32") => Some(Dtype::Float32),
        _ => Some(Dtype::Bfloat16),
    }
}

impl Model {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let name = block.text("pretrained_model_name_or_path").unwrap_or_default();
        if name.is_empty() {
            block.problem("pretrained_model_name_or_path", Problem::new("no model is named").help(
                "set `encode.model`, or `train.model.pretrained_model_name_or_path`, to a diffusers folder or a Hub id",
            ));
        }
        let mode = match block.name("mode", &["finetune", "pretrain"]) {
            Some("pretrain") => Mode::Pretrain,
            _ => Mode::Finetune,
        };
        let torch_dtype = dtype(&mut block, "torch_dtype").unwrap_or(Dtype::Bfloat16);
        let compute_dtype = dtype(&mut block, "compute_dtype");
        let stage = match block.name("stage", &["high_noise", "low_noise", "both"]) {
            Some("high_noise") => Some(Stage::HighNoise),
            Some("low_noise") => Some(Stage::LowNoise),
            _ => None,
        };
        let boundary_ratio = block.number("boundary_ratio");
        if let Some(boundary) = boundary_ratio.filter(|boundary| !(*boundary > 0.0 && *boundary < 1.0)) {
            let message = format!("`model.boundary_ratio` is {boundary}, expected a number between 0 and 1");
            block.problem("boundary_ratio", Problem::new(message));
        }
        let transformer_class = block.block("pipeline_spec").and_then(pipeline_spec);
        let model = Self {
            name,
            revision: block.text("revision"),
            mode,
            torch_dtype,
            compute_dtype,
            family: block.text("model_type"),
            stage,
            boundary_ratio,
            transformer_class,
        };
        block.without_effect("cache_dir", &[], "downloads go to the Hub's cache folder (`HF_HOME`)");
        block.without_effect(
            "attention_backend",
            &[json!("native"), json!("default"), json!("sdpa")],
            "libtorch's scaled_dot_product_attention chooses the kernel",
        );
        for key in ["transformer_engine_fp8", "transformer_engine_linear"] {
            block.without_effect(
                key,
                &[json!(false)],
                "this build computes in bfloat16 or float32, without Transformer Engine",
            );
        }
        for key in [
            "transformer_engine_fp8_recipe",
            "transformer_engine_fp8_amax_history_len",
            "transformer_engine_fp8_amax_compute_algo",
        ] {
            block.without_effect(key, &[], "belongs to Transformer Engine, which this build does not use");
        }
        for key in ["fuse_qkv_projections", "compact_fused_qkv_projections"] {
            block.without_effect(key, &[json!(false)], "projections stay separate: checkpoint keys are field paths");
        }
        block.without_effect(
            "optimize_hunyuan_flash_varlen_mask",
            &[json!(false)],
            "a patch of the peer's, not needed here",
        );
        block.without_effect("backend", &[], "kernels are libtorch's");
        block.refused("config_overrides", &[], "the model's own configuration is used as it is");
        block.finish();
        model
    }
}

fn pipeline_spec(mut block: Block<'_>) -> Option<String> {
    let class = block.text("transformer_cls");
    block.refused("subfolder", &[json!("transformer")], "the denoiser lies in `transformer/`");
    for key in ["load_full_pipeline", "low_cpu_mem_usage"] {
        block.without_effect(key, &[json!(false), json!(true)], "only the denoiser is loaded, mapped from its file");
    }
    block.without_effect("pipeline_cls", &[], "`model_index.json` says which pipeline it is");
    block.without_effect(
        "enable_gradient_checkpointing",
        &[json!(false)],
        "set `fsdp.activation_checkpointing` instead",
    );
    block.finish();
    class
}

//! `peft`: which layers get a LoRA, and its size.

use serde::Serialize;
use serde_json::json;
use spec::Problem;

use super::reader::Block;

/// The adapter; defaults are the peer's class defaults.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Peft {
    pub(crate) dim: u64,
    pub(crate) alpha: f64,
    pub(crate) dropout: f64,
    /// Layer names, or patterns with `*` over the whole dotted name; empty: the family's usual ones.
    pub(crate) target_modules: Vec<String>,
    pub(crate) exclude_modules: Vec<String>,
}

impl Peft {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        if let Some(target) = block.text("_target_")
            && !target.ends_with("PeftConfig")
        {
            let message = format!("`peft._target_` is `{target}`; this build has LoRA");
            block.problem(
                "_target_",
                Problem::new(message).help("use `nemo_automodel.components._peft.lora.PeftConfig`"),
            );
        }
        let match_all = block.flag("match_all_linear").unwrap_or(false);
        let targets = block.texts("target_modules").unwrap_or_default();
        if match_all && !targets.is_empty() {
            block.problem(
                "match_all_linear",
                Problem::new("`match_all_linear` and `target_modules` exclude each other"),
            );
        }
        let peft = Self {
            dim: block.positive("dim").unwrap_or(8),
            alpha: block.number("alpha").unwrap_or(32.0),
            dropout: block.number("dropout").unwrap_or(0.0),
            target_modules: if match_all { vec!["*".to_owned()] } else { targets },
            exclude_modules: block.texts("exclude_modules").unwrap_or_default(),
        };
        if !(0.0..1.0).contains(&peft.dropout) {
            block.problem(
                "dropout",
                Problem::new(format!("`peft.dropout` is {}, expected 0 or more and below 1", peft.dropout)),
            );
        }
        block.without_effect("dropout_position", &[json!("pre")], "dropout is applied to the adapter's input");
        block.without_effect(
            "lora_A_init",
            &[json!("kaiming")],
            "A starts as in PEFT and diffusers (Kaiming uniform), B at 0",
        );
        block.without_effect(
            "lora_dtype",
            &[json!("float32"), json!("torch.float32")],
            "adapters are trained in float32",
        );
        block.refused("use_dora", &[json!(false)], "adapters are plain LoRA");
        block.refused("moe_rank_scaling", &[json!(false)], "the models have no experts");
        block.refused("expert_weight_format", &[json!("unquantized")], "the models have no experts");
        for key in ["use_memory_efficient_lora", "use_triton"] {
            block.without_effect(key, &[json!(true), json!(false)], "kernels are libtorch's");
        }
        block.finish();
        peft
    }
}

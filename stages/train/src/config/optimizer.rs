//! `optimizer` and `clip_grad_norm`: AdamW, and the largest gradient norm.

use serde::Serialize;
use serde_json::json;
use spec::{Problem, suggest};

use super::reader::Block;

/// AdamW's numbers; defaults are the peer's class defaults.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Optimizer {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
}

/// Last segments of `_target_` that mean AdamW.
const ADAMW: [&str; 5] = ["AdamW", "AdamWConfig", "FusedAdam", "FusedAdamConfig", "FlashAdamW"];
/// Optimizers that the peer has and this build has not.
const OTHERS: [&str; 7] = ["Adam", "AdamConfig", "Muon", "NorMuon", "Dion", "Dion2", "SGD"];

impl Optimizer {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        if let Some(target) = block.text("_target_") {
            let class = target.rsplit('.').next().unwrap_or(&target).to_owned();
            match class.as_str() {
                "AdamW" | "AdamWConfig" => {}
                known if ADAMW.contains(&known) => {
                    block.note(
                        "_target_",
                        format_args!("`{target}`: read as AdamW with float32 masters, which has the same update"),
                    );
                }
                other if OTHERS.contains(&other) => {
                    let message = format!("`optimizer._target_` is `{target}`; this build has AdamW");
                    block.problem("_target_", Problem::new(message).help("use `torch.optim.AdamW`"));
                }
                other => {
                    let message = format!("`optimizer._target_` is `{target}`, which is no known optimizer");
                    let known = ADAMW.iter().chain(&OTHERS).copied();
                    block.problem("_target_", Problem::new(message).help(suggest::help(other, known)));
                }
            }
        }
        let betas = match block.numbers("betas").as_deref() {
            None => (0.9, 0.999),
            Some([a, b]) if (0.0..1.0).contains(a) && (0.0..1.0).contains(b) => (*a, *b),
            Some(other) => {
                let message = format!("`optimizer.betas` is {other:?}, expected two numbers in [0, 1)");
                block.problem("betas", Problem::new(message));
                (0.9, 0.999)
            }
        };
        let mut at_least_zero = |key: &'static str, default: f64| {
            let value = block.number(key).unwrap_or(default);
            if value < 0.0 {
                block.problem(key, Problem::new(format!("`optimizer.{key}` is {value}, expected 0 or more")));
            }
            value.max(0.0)
        };
        let optimizer = Self {
            lr: at_least_zero("lr", 1e-4),
            weight_decay: at_least_zero("weight_decay", 0.01),
            eps: at_least_zero("eps", 1e-8),
            betas,
        };
        for key in ["fused", "foreach", "capturable"] {
            block.without_effect(
                key,
                &[json!(true), json!(false)],
                "the update is always one fused kernel a tensor list",
            );
        }
        let masters = "masters and optimizer state are always float32";
        block.without_effect("master_weights", &[json!(true)], masters);
        for key in ["master_weight_dtype", "master_weight_bits", "exp_avg_dtype", "exp_avg_sq_dtype"] {
            block.without_effect(key, &[json!("float32"), json!("torch.float32"), json!(32)], masters);
        }
        block.without_effect("store_param_remainders", &[json!(false)], masters);
        block.refused("adam_w_mode", &[json!(true)], "weight decay is decoupled (AdamW)");
        block.refused("bias_correction", &[json!(true)], "moments are always corrected");
        block.refused("amsgrad", &[json!(false)], "AdamW here keeps no maximum of the second moment");
        block.refused("maximize", &[json!(false)], "a loss is minimised");
        block.refused("param_group_overrides", &[json!([])], "all parameters share one rate");
        block.finish();
        optimizer
    }
}

/// `clip_grad_norm.max_norm`, 1 unless given; `None` (0 or less) leaves gradients as they are.
pub(crate) fn clip(mut block: Block<'_>) -> Option<f64> {
    let max = block.number("max_norm").unwrap_or(1.0);
    block.without_effect("foreach", &[json!(true), json!(false)], "the norm is taken over all tensors at once");
    block.refused("norm_type", &[json!(2)], "the norm is Euclidean");
    block.finish();
    (max > 0.0).then_some(max)
}

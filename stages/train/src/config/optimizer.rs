//! `optimizer` and `clip_grad_norm`: AdamW, and the largest gradient norm.

use nn::optim::Keeping;
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
    #[serde(skip_serializing_if = "State::is_default")]
    pub(crate) state: State,
}

/// What the moments are kept in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct State {
    pub(crate) exp_avg: Keeping,
    pub(crate) exp_avg_sq: Keeping,
}

impl State {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// `state_dtype`, or one moment's own key (those of Transformer Engine's FusedAdam); else what the class stands for.
    fn read(block: &mut Block<'_>, class: Keeping) -> Self {
        let bits = match block.positive("optim_bits") {
            None => class,
            Some(8) => Keeping::EightBit,
            Some(32) => Keeping::Float32,
            Some(bits) => {
                let message = format!("`{}` is {bits}", block.path("optim_bits"));
                block.problem("optim_bits", Problem::new(message).help("8 or 32"));
                class
            }
        };
        let both = keeping(block, "state_dtype").unwrap_or(bits);
        let [exp_avg, exp_avg_sq] =
            ["exp_avg_dtype", "exp_avg_sq_dtype"].map(|key| keeping(block, key).unwrap_or(both));
        Self { exp_avg, exp_avg_sq }
    }
}

fn keeping(block: &mut Block<'_>, key: &'static str) -> Option<Keeping> {
    let value = block.take(key)?;
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_lowercase);
    match text.strip_prefix("torch.").unwrap_or(&text) {
        "float32" | "fp32" | "float" | "32" => Some(Keeping::Float32),
        "bfloat16" | "bf16" => Some(Keeping::BFloat16),
        "8bit" | "8-bit" | "int8" | "uint8" | "8" => Some(Keeping::EightBit),
        "float16" | "fp16" | "half" | "16" => {
            block.note(key, "float16 does not reach as far down as squares of gradients do; kept in float32");
            Some(Keeping::Float32)
        }
        _ => {
            let message = format!("`{}` is {value}, which no state is kept in", block.path(key));
            block.problem(key, Problem::new(message).help("`float32`, `bfloat16` or `8bit`"));
            None
        }
    }
}

/// Last segments of `_target_` that mean AdamW.
const ADAMW: [&str; 5] = ["AdamW", "AdamWConfig", "FusedAdam", "FusedAdamConfig", "FlashAdamW"];
/// Those of bitsandbytes and torchao that mean AdamW with state in eight bits.
const EIGHT_BIT: [&str; 2] = ["AdamW8bit", "PagedAdamW8bit"];
/// Optimizers that the peer has and this build has not.
const OTHERS: [&str; 7] = ["Adam", "AdamConfig", "Muon", "NorMuon", "Dion", "Dion2", "SGD"];

impl Optimizer {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let mut state = Keeping::Float32;
        if let Some(target) = block.text("_target_") {
            let class = target.rsplit('.').next().unwrap_or(&target).to_owned();
            match class.as_str() {
                "AdamW" | "AdamWConfig" => {}
                eight if EIGHT_BIT.contains(&eight) => state = Keeping::EightBit,
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
                    let known = ADAMW.iter().chain(&EIGHT_BIT).chain(&OTHERS).copied();
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
            state: State::read(&mut block, state),
        };
        for key in ["fused", "foreach", "capturable"] {
            block.without_effect(
                key,
                &[json!(true), json!(false)],
                "the update is always one fused kernel a tensor list",
            );
        }
        let masters = "masters are always float32";
        block.without_effect("master_weights", &[json!(true)], masters);
        for key in ["master_weight_dtype", "master_weight_bits"] {
            block.without_effect(key, &[json!("float32"), json!("torch.float32"), json!(32)], masters);
        }
        let blocks = "blocks of 256; tensors of fewer than 4096 elements are kept in float32";
        block.without_effect("block_wise", &[json!(true)], blocks);
        block.without_effect("min_8bit_size", &[json!(4096)], blocks);
        block.without_effect("percentile_clipping", &[json!(100)], "gradients are clipped by `clip_grad_norm` alone");
        block.without_effect("is_paged", &[json!(false)], "`fsdp.cpu_offload` keeps state in host memory");
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

//! `flow_matching`: noise levels, loss weights, guidance and caption dropout.

use diffusion::flow::Weighting;
use diffusion::timestep::{Levels, Sampling, Window};
use serde::Serialize;
use serde_json::json;
use spec::Problem;

use super::reader::Block;

/// The block, with the peer's defaults for what it leaves out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct FlowMatching {
    pub(crate) timestep_sampling: &'static str,
    pub(crate) logit_mean: f64,
    pub(crate) logit_std: f64,
    pub(crate) beta_alpha: f64,
    pub(crate) beta_beta: f64,
    pub(crate) flow_shift: f64,
    pub(crate) mix_uniform_ratio: f64,
    pub(crate) sigma_min: f64,
    pub(crate) sigma_max: f64,
    pub(crate) use_sigma_noise: bool,
    /// `None`: every sample counts alike.
    pub(crate) loss_weighting: Option<&'static str>,
    pub(crate) cfg_dropout_prob: f64,
    /// Given to the guidance embedding of models that have one.
    pub(crate) guidance_scale: f64,
    /// `adapter_type`, when given and not the generic `simple`: must be the family's name.
    #[serde(skip)]
    pub(crate) family: Option<&'static str>,
}

/// Adapters of the peer: one a family, and `simple`.
const ADAPTERS: [&str; 7] = ["simple", "flux", "flux2", "qwen_image", "qwen_image_edit", "hunyuan", "ltx2"];

impl FlowMatching {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let weighting = block.name("loss_weighting_scheme", &Weighting::NAMES).unwrap_or("linear");
        let weighted = block.flag("use_loss_weighting").unwrap_or(true);
        let adapter_type = block.name("adapter_type", &ADAPTERS);
        let family = adapter_type.filter(|name| *name != "simple");
        // The peer's `simple` adapter, its default, drops no captions, whatever is set; here what is set counts.
        let dropout = if adapter_type.is_none_or(|name| name == "simple") { 0.0 } else { 0.1 };
        let adapter = block.block_or_empty("adapter_kwargs");
        let flow = Self {
            timestep_sampling: block.name("timestep_sampling", &Sampling::NAMES).unwrap_or("logit_normal"),
            logit_mean: block.number("logit_mean").unwrap_or(0.0),
            logit_std: block.number("logit_std").unwrap_or(1.0),
            beta_alpha: block.number("beta_alpha").unwrap_or(2.5),
            beta_beta: block.number("beta_beta").unwrap_or(1.5),
            flow_shift: block.number("flow_shift").unwrap_or(3.0),
            mix_uniform_ratio: block.number("mix_uniform_ratio").unwrap_or(0.1),
            sigma_min: block.number("sigma_min").unwrap_or(0.0),
            sigma_max: block.number("sigma_max").unwrap_or(1.0),
            use_sigma_noise: block.flag("use_sigma_noise").unwrap_or(true),
            loss_weighting: weighted.then_some(weighting),
            cfg_dropout_prob: block.number("cfg_dropout_prob").unwrap_or(dropout),
            guidance_scale: guidance(adapter),
            family,
        };
        if let Err(error) = flow.levels() {
            let key = match &error {
                diffusion::Error::OutOfRange { name, .. } => *name,
                _ => "timestep_sampling",
            };
            block.problem(key, Problem::new(error.to_string()));
        }
        if !(0.0..=1.0).contains(&flow.cfg_dropout_prob) {
            let message = format!("`flow_matching.cfg_dropout_prob` is {}, expected 0 to 1", flow.cfg_dropout_prob);
            block.problem("cfg_dropout_prob", Problem::new(message));
        }
        block.refused("num_train_timesteps", &[json!(1000)], "models of this build count time in thousandths");
        block.without_effect("i2v_prob", &[json!(0)], "no model of this build is conditioned on a first frame");
        for key in ["log_interval", "summary_log_interval"] {
            block.without_effect(key, &[json!(100), json!(10)], "every sample's loss goes to the `losses` table");
        }
        block.without_effect("audio_loss_weight", &[], "no model of this build makes audio");
        block.finish();
        flow
    }

    /// How sigma is drawn.
    pub(crate) fn levels(&self) -> diffusion::Result<Levels> {
        let Self { logit_mean, logit_std, beta_alpha, beta_beta, .. } = *self;
        Levels {
            sampling: Sampling::from_name(self.timestep_sampling, logit_mean, logit_std, beta_alpha, beta_beta)?,
            shift: self.flow_shift,
            mix_uniform_ratio: self.mix_uniform_ratio,
            window: (self.sigma_min, self.sigma_max),
            use_sigma_noise: self.use_sigma_noise,
            within: Window::ALL,
        }
        .validated()
    }

    /// How much a sample counts.
    pub(crate) fn weighting(&self) -> diffusion::Result<Weighting> {
        self.loss_weighting.map_or(Ok(Weighting::None), |name| Weighting::from_name(name, self.flow_shift))
    }
}

fn guidance(mut block: Block<'_>) -> f64 {
    let scale = block.number("guidance_scale").unwrap_or(3.5);
    block.without_effect(
        "use_guidance_embeds",
        &[json!(true), json!(false)],
        "the model's own configuration says whether it embeds guidance",
    );
    for key in ["use_condition_latents", "default_image_embed_shape", "image_embed_shape", "audio_loss_weight", "fps"] {
        block.without_effect(key, &[], "belongs to models that this build has not");
    }
    block.finish();
    scale
}

//! What can go wrong in an objective, a schedule or a sampler.

use miette::Diagnostic;
use thiserror::Error;

/// Result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, Error, Diagnostic)]
pub enum Error {
    /// A name that no sampler of noise levels has.
    #[error("unknown timestep sampling `{name}`")]
    #[diagnostic(code(diffusion::unknown_sampling), help("known names: {}", crate::timestep::Sampling::NAMES.join(", ")))]
    UnknownSampling {
        /// As given.
        name: String,
    },
    /// A name that no weighting has.
    #[error("unknown loss weighting scheme `{name}`")]
    #[diagnostic(code(diffusion::unknown_weighting), help("known names: {}", crate::flow::Weighting::NAMES.join(", ")))]
    UnknownWeighting {
        /// As given.
        name: String,
    },
    /// A number outside its range.
    #[error("`{name}` is {value}, expected {expected}")]
    #[diagnostic(code(diffusion::out_of_range))]
    OutOfRange {
        /// Parameter.
        name: &'static str,
        /// As given.
        value: f64,
        /// Such as `a value above 0`.
        expected: &'static str,
    },
    /// Noise levels that the distribution does not give.
    #[error("fewer than one noise level in a thousand is drawn from {from} and below {below}")]
    #[diagnostic(code(diffusion::empty_window), help("change `timestep_sampling` or `flow_shift`, or the window"))]
    EmptyWindow {
        /// The lowest.
        from: f64,
        /// Above the highest.
        below: f64,
    },
    /// A scheduler that this crate has no formula for.
    #[error("scheduler class `{class}` is not supported")]
    #[diagnostic(
        code(diffusion::scheduler_class),
        help("supported: `FlowMatchEulerDiscreteScheduler`, `UniPCMultistepScheduler`")
    )]
    SchedulerClass {
        /// `_class_name` of the file.
        class: String,
    },
    /// A scheduler option that would change the numbers and is not implemented.
    #[error("scheduler option `{option}` is not supported")]
    #[diagnostic(code(diffusion::scheduler_option), help("set it to its default in `scheduler_config.json`"))]
    SchedulerOption {
        /// Key of the file.
        option: &'static str,
    },
    /// A `scheduler_config.json` of the wrong shape.
    #[error("scheduler configuration: {detail}")]
    #[diagnostic(code(diffusion::scheduler_config))]
    SchedulerConfig {
        /// What is wrong.
        detail: String,
    },
    /// The denoiser refused its input.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Model(#[from] nn::Error),
}

//! The mathematics, compared with what diffusers, transformers and PEFT computed from the same weights.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the errors measured, and what was skipped")]

mod denoiser;
mod sampling;
mod support;
mod text;
mod text_wan;
mod training;
mod vae;

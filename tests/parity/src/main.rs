//! The mathematics, compared with what diffusers, transformers and PEFT computed from the same weights.

mod denoiser;
mod sampling;
mod support;
mod text;
mod training;
mod vae;

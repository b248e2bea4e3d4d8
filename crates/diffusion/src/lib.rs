//! objectives, noise levels, samplers, guidance.

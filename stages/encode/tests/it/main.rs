//! Claims about the stage `encode`, made from outside.

mod captions;
mod check;
mod latents;
mod support;

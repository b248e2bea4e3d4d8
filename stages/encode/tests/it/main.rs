//! Claims about the stage `encode`, made from outside.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::needless_pass_by_value, reason = "calls with `json!` read better")]

mod captions;
mod check;
mod clips;
mod latents;
mod reuse;
mod support;

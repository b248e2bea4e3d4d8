//! Claims about the stage `generate`, made from outside.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::needless_pass_by_value, reason = "calls with `json!` read better")]

mod check;
mod clips;
mod pictures;
mod support;

//! Claims about the stage `generate`, made from outside.

mod check;
mod pictures;
mod support;

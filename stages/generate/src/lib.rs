//! checkpoint and prompts to pictures.

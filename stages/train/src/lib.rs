//! flow-matching training, full or LoRA.

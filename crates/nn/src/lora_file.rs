//! Adapter files of diffusers and of PEFT.

//! layers, parameters, weight files, LoRA, seeded noise.

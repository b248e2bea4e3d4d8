//! samples to latents and text embeddings.

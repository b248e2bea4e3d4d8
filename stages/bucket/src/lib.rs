//! latents to equal-shape shards.

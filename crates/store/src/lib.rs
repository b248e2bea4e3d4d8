//! artifacts on disk: digests, keys, manifests, atomic publish.

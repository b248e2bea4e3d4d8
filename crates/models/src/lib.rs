//! architectures and their registry.

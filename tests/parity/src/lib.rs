//! the mathematics, compared with diffusers.

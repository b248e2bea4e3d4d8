//! drives the real programs from outside.

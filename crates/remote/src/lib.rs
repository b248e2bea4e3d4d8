//! Artifacts in an object store.

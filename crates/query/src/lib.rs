//! SQL over a run's tables.

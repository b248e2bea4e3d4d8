//! files and captions to a table of samples.

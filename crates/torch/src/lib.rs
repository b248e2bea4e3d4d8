//! what tch lacks, made safe.

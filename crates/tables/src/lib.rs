//! Arrow schemas and Parquet tables of the cache.

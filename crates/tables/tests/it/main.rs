//! The tables from outside: what is written is what is read, by us and by any Parquet reader.

mod captions;
mod latents;
mod rows;

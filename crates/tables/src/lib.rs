//! Arrow schemas and Parquet tables of the cache: typed rows in, typed rows out, streaming and random access.
//!
//! Equal rows give equal bytes: no times, no host, no hash order. Tensor columns carry dtype, layout, normalisation and
//! encoder in their field metadata, so that a cache explains itself to any Parquet reader. Knows nothing of stages, nor
//! of how a latent was made.

mod captions;
mod cell;
mod cuts;
mod error;
mod latents;
mod meta;
mod reader;
mod row;
pub mod schema;
mod shard;
mod writer;

pub use captions::{CaptionReader, CaptionsWriter, caption_digest};
pub use cuts::cuts;
pub use error::{Error, Result};
pub use latents::{LatentReader, LatentsWriter};
pub use meta::{LatentMeta, Normalisation, TextMeta};
pub use reader::{Location, Rows, Selected, TableReader, read};
pub use row::{
    Caption, CaptionInfo, Held, ImageRow, ItemKey, Latent, LatentInfo, Loss, Reject, Row, Sample, SampleInfo, ShardRow,
    Step, Validation,
};
pub use shard::{ShardReader, ShardWriter};
pub use writer::{RowWriter, TableWriter, Written, write};

/// Version of the tables' layout; in the schema metadata of every file, under `schema_version`.
pub const SCHEMA_VERSION: u32 = 1;

/// Writer of `samples`.
pub type SamplesWriter = RowWriter<Sample>;
/// Writer of `rejects`.
pub type RejectsWriter = RowWriter<Reject>;
/// Writer of `held`.
pub type HeldWriter = RowWriter<Held>;
/// Writer of `shards`.
pub type ShardsWriter = RowWriter<ShardRow>;
/// Writer of `steps`.
pub type StepsWriter = RowWriter<Step>;
/// Writer of `losses`.
pub type LossesWriter = RowWriter<Loss>;
/// Writer of `validation`.
pub type ValidationWriter = RowWriter<Validation>;
/// Writer of `images`.
pub type ImagesWriter = RowWriter<ImageRow>;

//! The Arrow schema of every table. Columns come from the row types; tensor columns get their description.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use spec::Bucket;

use crate::SCHEMA_VERSION;
use crate::cell::tensor_item;
use crate::meta::{LatentMeta, TextMeta, annotate};
use crate::row::{Caption, Held, ImageRow, Latent, Loss, Reject, Row, Sample, ShardRow, Step, Validation};

fn table(name: &str, fields: Vec<Field>) -> SchemaRef {
    let metadata = [("table".into(), name.into()), ("schema_version".into(), SCHEMA_VERSION.to_string())];
    Arc::new(Schema::new_with_metadata(fields, HashMap::from(metadata)))
}

/// Schema of the table of `R`, without descriptions of tensors.
pub fn of<R: Row>() -> SchemaRef {
    table(R::TABLE, R::fields())
}

/// Accepted source rows.
pub fn samples() -> SchemaRef {
    of::<Sample>()
}

/// Refused rows.
pub fn rejects() -> SchemaRef {
    of::<Reject>()
}

/// Rows held back by a policy.
pub fn held() -> SchemaRef {
    of::<Held>()
}

/// Latents, one row per sample.
pub fn latents(meta: &LatentMeta) -> SchemaRef {
    table("latents", annotate(Latent::fields(), &["latent"], &meta.to_metadata()))
}

/// Embeddings, one row per caption and text encoder.
pub fn captions(meta: &TextMeta) -> SchemaRef {
    table("captions", annotate(Caption::fields(), &["embedding", "pooled"], &meta.to_metadata()))
}

/// Shard files.
pub fn shards() -> SchemaRef {
    of::<ShardRow>()
}

/// Optimizer steps.
pub fn steps() -> SchemaRef {
    of::<Step>()
}

/// Per-sample losses.
pub fn losses() -> SchemaRef {
    of::<Loss>()
}

/// Validation losses.
pub fn validation() -> SchemaRef {
    of::<Validation>()
}

/// Generated pictures.
pub fn images() -> SchemaRef {
    of::<ImageRow>()
}

/// Schema of a table by its name, tensors undescribed; `None` for a table this crate does not know.
pub fn by_name(table: &str) -> Option<SchemaRef> {
    let all: [fn() -> SchemaRef; 10] =
        [samples, rejects, held, of::<Latent>, of::<Caption>, shards, steps, losses, validation, images];
    all.iter().map(|schema| schema()).find(|schema| schema.metadata().get("table").is_some_and(|name| name == table))
}

/// Rows of one shard file; all latents have the shape of `bucket`.
pub fn shard(meta: &LatentMeta, bucket: Bucket) -> SchemaRef {
    let shape = meta.shape(bucket);
    let values = shape.iter().product::<usize>() as i32;
    let mut metadata = meta.to_metadata();
    metadata.insert("bucket".into(), bucket.to_string());
    metadata.insert("shape".into(), format!("{shape:?}").replace(' ', ""));
    let fields = vec![
        Field::new("sample_id", DataType::Utf8, false),
        Field::new("caption_digest", DataType::Utf8, false),
        Field::new("repeated", DataType::Boolean, false),
        Field::new("latent", DataType::FixedSizeList(tensor_item(), values), false),
    ];
    table("shard", annotate(fields, &["latent"], &metadata))
}

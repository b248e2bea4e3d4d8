//! What a tensor column says about itself, as Arrow field metadata: `dtype`, `layout`, and the rest as JSON values.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use arrow::datatypes::{Field, Schema};
use serde::{Deserialize, Serialize};
use spec::Bucket;

use crate::error::{Error, Result};
use crate::reader::TableReader;

/// How latents were made from pixels; metadata of `latents.latent` and of every shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LatentMeta {
    /// Identity of the VAE: digest of its weights and configuration.
    pub encoder: String,
    /// Channels.
    pub channels: u32,
    /// Pixels per latent position, across and down.
    pub spatial_stride: u32,
    /// Frames per latent position after the first; none for a picture VAE, whose latents have no time dim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temporal_stride: Option<u32>,
    /// From the VAE's output to the stored value.
    pub normalisation: Normalisation,
}

/// From the VAE's output `z` to the stored value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Normalisation {
    /// `(z - shift) * scaling`.
    ScaleShift {
        /// `scaling_factor` of the VAE's configuration.
        scaling: f64,
        /// `shift_factor`, 0 if it has none.
        shift: f64,
    },
    /// `(z - mean) / std`, per channel.
    MeanStd {
        /// Per channel.
        mean: Vec<f64>,
        /// Per channel.
        std: Vec<f64>,
    },
}

impl LatentMeta {
    /// `CHW`, or `CTHW` for a video VAE.
    pub fn layout(&self) -> &'static str {
        if self.temporal_stride.is_some() { "CTHW" } else { "CHW" }
    }

    /// Shape of the latent of a bucket, in [`LatentMeta::layout`].
    pub fn shape(&self, bucket: Bucket) -> Vec<usize> {
        let side = |pixels: u32| (pixels / self.spatial_stride.max(1)) as usize;
        let time = self.temporal_stride.map(|stride| (bucket.frames.saturating_sub(1) / stride.max(1) + 1) as usize);
        [Some(self.channels as usize), time, Some(side(bucket.height)), Some(side(bucket.width))]
            .into_iter()
            .flatten()
            .collect()
    }

    pub(crate) fn to_metadata(&self) -> HashMap<String, String> {
        let mut metadata = to_metadata(self);
        metadata.insert("dtype".into(), "f16".into());
        metadata.insert("layout".into(), self.layout().into());
        metadata
    }

    pub(crate) fn of(schema: &Schema, path: &Path) -> Result<Self> {
        from_metadata(schema, "latent", path)
    }

    /// Of the file at `path`.
    pub fn read(path: &Path) -> Result<Self> {
        Self::of(first_schema(&TableReader::open(path)?, path)?, path)
    }
}

/// How embeddings were made from text; metadata of `captions.embedding` and `captions.pooled`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TextMeta {
    /// Text encoder → identity: digest of its weights, configuration and tokenizer.
    pub encoders: BTreeMap<String, String>,
    /// Longest prompt, in tokens, padding included.
    pub max_tokens: u32,
}

impl TextMeta {
    pub(crate) fn to_metadata(&self) -> HashMap<String, String> {
        let mut metadata = to_metadata(self);
        metadata.insert("dtype".into(), "bf16".into());
        metadata
    }

    pub(crate) fn of(schema: &Schema, path: &Path) -> Result<Self> {
        from_metadata(schema, "embedding", path)
    }

    /// Of the file at `path`.
    pub fn read(path: &Path) -> Result<Self> {
        Self::of(first_schema(&TableReader::open(path)?, path)?, path)
    }
}

fn first_schema<'t>(table: &'t TableReader, path: &Path) -> Result<&'t Schema> {
    let (_, schema) = table.schemas().next().ok_or_else(|| Error::NoFiles { path: path.into() })?;
    Ok(schema)
}

/// Each field of `meta` as one entry: text as it is, anything else as JSON.
fn to_metadata(meta: &impl Serialize) -> HashMap<String, String> {
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(meta) else { return HashMap::new() };
    let text = |value| match value {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    fields.into_iter().map(|(key, value)| (key, text(value))).collect()
}

fn from_metadata<T: for<'de> Deserialize<'de>>(schema: &Schema, column: &str, path: &Path) -> Result<T> {
    let field = schema.field_with_name(column).map_err(|_| crate::row::missing(schema, column, path))?;
    let fields = field.metadata().iter().map(|(key, value)| {
        let text = || serde_json::Value::String(value.clone());
        let is_text = matches!(key.as_str(), "encoder" | "dtype" | "layout");
        (key.clone(), if is_text { text() } else { serde_json::from_str(value).unwrap_or_else(|_| text()) })
    });
    serde_json::from_value(serde_json::Value::Object(fields.collect())).map_err(|error| {
        let detail = format!("its metadata does not say how it was made: {error}");
        Error::Metadata { path: path.into(), column: column.into(), detail }
    })
}

pub(crate) fn annotate(fields: Vec<Field>, columns: &[&str], metadata: &HashMap<String, String>) -> Vec<Field> {
    let annotated = |field: Field| {
        if columns.contains(&field.name().as_str()) { field.with_metadata(metadata.clone()) } else { field }
    };
    fields.into_iter().map(annotated).collect()
}

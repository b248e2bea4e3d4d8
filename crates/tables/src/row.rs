//! The tables, as row types: a struct's fields are its table's columns, in order.

use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::datatypes::Field;
use half::f16;
use spec::Bucket;

use crate::cell::Cell;
use crate::error::{Error, Result};
use std::path::Path;

/// A row of a table. Reading asks for these columns only; the file may have more.
pub trait Row: Sized {
    /// Table.
    const TABLE: &'static str;
    /// Rows to decode at once.
    const BATCH: usize;
    /// Columns.
    fn fields() -> Vec<Field>;
    /// Columns of these rows.
    fn columns(rows: &[Self]) -> Vec<ArrayRef>;
    /// Rows of a batch that was read from `path`.
    fn rows(batch: &RecordBatch, path: &Path) -> Result<Vec<Self>>;
    /// Bytes of memory.
    fn size(&self) -> usize;
}

/// Column `name` as typed values, or why not.
fn take<C: Cell>(batch: &RecordBatch, name: &str, path: &Path) -> Result<Vec<C>> {
    let column = batch.column_by_name(name).ok_or_else(|| missing(&batch.schema(), name, path))?;
    let (found, expected) = (column.data_type(), C::data_type());
    if !found.equals_datatype(&expected) {
        let (found, expected) = (found.to_string(), expected.to_string());
        return Err(Error::ColumnType { path: path.into(), column: name.into(), found, expected });
    }
    if !C::NULLABLE
        && let Some(row) = (0..column.len()).find(|&i| column.null_count() > 0 && column.is_null(i))
    {
        return Err(Error::Null { path: path.into(), column: name.into(), row });
    }
    Ok((0..column.len()).map(|i| C::cell(column, i)).collect())
}

pub(crate) fn missing(schema: &arrow::datatypes::Schema, name: &str, path: &Path) -> Error {
    let help = spec::suggest::help(name, schema.fields().iter().map(|f| f.name().as_str()));
    Error::MissingColumn { path: path.into(), column: name.into(), help }
}

/// A row type; with `+ Light`, also the row without its heavy last columns, for passes that do not need them.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident in $table:literal, batch $batch:literal { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: $type,)*
        }

        impl Row for $name {
            const TABLE: &'static str = $table;
            const BATCH: usize = $batch;
            fn fields() -> Vec<Field> {
                vec![$(Field::new(stringify!($field), <$type as Cell>::data_type(), <$type as Cell>::NULLABLE)),*]
            }
            fn columns(rows: &[Self]) -> Vec<ArrayRef> {
                vec![$(<$type as Cell>::column(rows.iter().map(|row| &row.$field))),*]
            }
            fn rows(batch: &RecordBatch, path: &Path) -> Result<Vec<Self>> {
                $(let mut $field = take::<$type>(batch, stringify!($field), path)?.into_iter();)*
                let row = || Some(Self { $($field: $field.next()?),* });
                Ok(std::iter::from_fn(row).collect())
            }
            fn size(&self) -> usize {
                size_of::<Self>() $(+ self.$field.heap())*
            }
        }
    };
    ($(#[$doc:meta])* $name:ident + $(#[$ldoc:meta])* $light:ident in $table:literal, batch $batch:literal
     { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* ; $($(#[$hdoc:meta])* $heavy:ident: $htype:ty,)* }) => {
        table! { $(#[$ldoc])* $light in $table, batch 8192 { $($(#[$fdoc])* $field: $type,)* } }
        table! { $(#[$doc])* $name in $table, batch $batch { $($(#[$fdoc])* $field: $type,)* $($(#[$hdoc])* $heavy: $htype,)* } }

        impl $name {
            /// The row without its heavy columns.
            pub fn info(&self) -> $light {
                $light { $($field: self.$field.clone()),* }
            }
        }
        impl $light {
            /// The whole row.
            pub fn with(self, $($heavy: $htype),*) -> $name {
                $name { $($field: self.$field,)* $($heavy),* }
            }
        }
    };
}

table! {
    /// An accepted source row.
    Sample +
    /// A [`Sample`] without its media bytes.
    SampleInfo in "samples", batch 16 {
        /// First 16 hex digits of the BLAKE3 of the media bytes; a further row with equal bytes gets `-2`, `-3`, …
        sample_id: String,
        /// Where it came from, relative to the data set: a file, or a file and row.
        source: String,
        /// Media format: `jpeg`, `png`, ….
        media: String,
        /// Pixels across, after orientation.
        width: i32,
        /// Pixels down, after orientation.
        height: i32,
        /// Frames; 1 for a picture.
        frames: i32,
        /// Frames per second of a clip.
        fps: Option<f32>,
        /// Caption.
        caption: String,
        /// BLAKE3 of `bytes`, hex.
        digest: String,;
        /// The encoded media file.
        bytes: Vec<u8>,
    }
}

table! {
    /// A refused row.
    Reject in "rejects", batch 8192 {
        /// Sample id, when it got one.
        sample_id: Option<String>,
        /// Where it came from.
        source: String,
        /// Stage that refused it.
        stage: String,
        /// Reason code.
        reason: String,
        /// Detail for a person.
        detail: String,
    }
}

table! {
    /// A row held back by a policy.
    Held in "held", batch 8192 {
        /// Sample id.
        sample_id: String,
        /// Bucket, as `384x640`.
        bucket: String,
        /// Policy that held it.
        reason: String,
    }
}

table! {
    /// The latent of a sample.
    Latent +
    /// A [`Latent`] without its values.
    LatentInfo in "latents", batch 16 {
        /// Sample id.
        sample_id: String,
        /// Pixels across of the bucket.
        bucket_width: i32,
        /// Pixels down of the bucket.
        bucket_height: i32,
        /// Frames of the bucket.
        bucket_frames: i32,
        /// Pixels across of the source picture.
        width: i32,
        /// Pixels down of the source picture.
        height: i32,
        /// Factor of the resize, bucket pixels per source pixel; above 1 the picture was enlarged.
        scale: f32,
        /// Pixels cut off on the left, after the resize.
        crop_left: i32,
        /// Pixels cut off on top, after the resize.
        crop_top: i32,
        /// Digest of the caption, a key of `captions`.
        caption_digest: String,
        /// Key of this item: what was encoded, and how.
        item_key: String,;
        /// Normalised latent, flat, in the layout the column's metadata names.
        latent: Vec<f16>,
    }
}

impl LatentInfo {
    /// Bucket of the row.
    pub fn bucket(&self) -> Bucket {
        let side = |n: i32| u32::try_from(n).unwrap_or(0);
        Bucket { width: side(self.bucket_width), height: side(self.bucket_height), frames: side(self.bucket_frames) }
    }
}

table! {
    /// The embedding of a caption by one text encoder.
    Caption +
    /// A [`Caption`] without its tensors.
    CaptionInfo in "captions", batch 4 {
        /// Digest of the text, see [`crate::caption_digest`].
        caption_digest: String,
        /// The caption.
        text: String,
        /// Text encoder, such as `t5`.
        encoder: String,
        /// Tokens of the embedding, padding included where the model attends to it.
        tokens: i32,
        /// Values per token.
        width: i32,
        /// Tokens of the whole text, with the special ones; more than `max_tokens` if its end was cut off.
        text_tokens: i32,
        /// Tokens that the encoder reads at most.
        max_tokens: i32,
        /// Key of this item.
        item_key: String,;
        /// `[tokens, width]` bf16, little endian.
        embedding: Option<Vec<u8>>,
        /// `[width]` bf16, little endian.
        pooled: Option<Vec<u8>>,
    }
}

table! {
    /// The key of an item of `latents` or `captions`, alone.
    ItemKey in "items", batch 8192 {
        /// What was encoded, and how.
        item_key: String,
    }
}

table! {
    /// A file of equal-shape rows.
    ShardRow in "shards", batch 8192 {
        /// Path of the file inside the artifact.
        shard: String,
        /// Pixels across.
        bucket_width: i32,
        /// Pixels down.
        bucket_height: i32,
        /// Frames.
        bucket_frames: i32,
        /// Rows, repeats included.
        rows: i64,
        /// Rows that repeat another to fill a batch.
        repeated: i64,
        /// Size of the file.
        bytes: i64,
        /// BLAKE3 of the file, hex.
        digest: String,
    }
}

table! {
    /// An optimizer step.
    Step in "steps", batch 8192 {
        /// Step, from 0.
        step: i64,
        /// Epoch, from 0.
        epoch: i64,
        /// Mean loss of the global batch.
        loss: f64,
        /// Learning rate.
        lr: f64,
        /// Norm of the gradient before clipping.
        grad_norm: f64,
        /// Samples in the global batch.
        samples: i64,
        /// Wall time of the step.
        seconds: f64,
        /// Peak memory so far.
        memory_bytes: i64,
    }
}

table! {
    /// The loss of one sample at one step.
    Loss in "losses", batch 8192 {
        /// Step, from 0.
        step: i64,
        /// Epoch, from 0.
        epoch: i64,
        /// Sample id.
        sample_id: String,
        /// Noise level, in [0, 1].
        sigma: f32,
        /// Weight of the sample's loss.
        weight: f32,
        /// Weighted mean squared error of the sample.
        loss: f32,
        /// Whether its caption was dropped.
        dropped: bool,
    }
}

table! {
    /// Validation loss at a step and noise level.
    Validation in "validation", batch 8192 {
        /// Step, from 0.
        step: i64,
        /// Noise level, in [0, 1].
        sigma: f32,
        /// Mean loss.
        loss: f64,
    }
}

table! {
    /// A generated picture or clip.
    ImageRow in "images", batch 8192 {
        /// File inside the artifact.
        file: String,
        /// Prompt.
        prompt: String,
        /// Negative prompt, when there was one.
        negative_prompt: Option<String>,
        /// Seed of the initial noise.
        seed: i64,
        /// Pixels across.
        width: i32,
        /// Pixels down.
        height: i32,
        /// Frames, 1 for a picture.
        frames: i32,
        /// Frames in a second of a clip.
        fps: Option<i32>,
        /// Sampling steps.
        steps: i32,
        /// Distilled guidance, or classifier-free where the pipeline calls that so.
        guidance: f32,
        /// That of the second denoiser, where there are two.
        guidance_2: Option<f32>,
        /// Classifier-free guidance beside it, when on.
        true_cfg: Option<f32>,
        /// Adapter, when there was one.
        lora: Option<String>,
        /// Its scale.
        lora_scale: Option<f32>,
        /// Digest of the weights.
        checkpoint: String,
        /// How much it looks like prints in the recipe's palette, in [0, 1]; null without a palette.
        style: Option<f32>,
    }
}

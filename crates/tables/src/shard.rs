//! Shards: Arrow IPC files of equal-shape latents, mapped into memory and read without copying.

use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float16Array, RecordBatch, StringArray};
use arrow::buffer::Buffer;
use arrow::datatypes::{DataType, Field, Float16Type, Schema, SchemaRef};
use arrow::ipc::reader::{FileDecoder, read_footer_length};
use arrow::ipc::writer::FileWriter;
use arrow::ipc::{self as fb, Block, MetadataVersion, root_as_footer, root_as_message};
use fs_err::File;
use half::f16;
use spec::Bucket;

use crate::cell::tensor_item;
use crate::error::{Error, Result};
use crate::meta::LatentMeta;
use crate::schema;
use crate::writer::{Written, complete, part_of};

/// Bytes of latents per record batch.
const BATCH_BYTES: usize = 4 << 20;

/// Writes one shard. A file that was not finished is removed.
pub struct ShardWriter {
    path: PathBuf,
    part: PathBuf,
    writer: Option<FileWriter<BufWriter<File>>>,
    schema: SchemaRef,
    width: usize,
    rows: u64,
    pending: Pending,
}

#[derive(Default)]
struct Pending {
    sample_ids: Vec<String>,
    caption_digests: Vec<String>,
    repeated: Vec<bool>,
    latents: Vec<f16>,
}

impl ShardWriter {
    /// Starts a shard of a bucket; it appears at `path` when finished.
    pub fn create(path: &Path, meta: &LatentMeta, bucket: Bucket) -> Result<Self> {
        let schema = schema::shard(meta, bucket);
        let part = part_of(path)?;
        let file = BufWriter::new(File::create(&part).map_err(|e| Error::io("write", path, e))?);
        let writer = FileWriter::try_new(file, &schema).map_err(|e| Error::arrow("write", path, e))?;
        let width = meta.shape(bucket).iter().product();
        Ok(Self { path: path.into(), part, writer: Some(writer), schema, width, rows: 0, pending: Pending::default() })
    }

    /// Appends a row; `repeated` marks one that only fills up a batch.
    pub fn push(&mut self, sample_id: &str, caption_digest: &str, repeated: bool, latent: &[f16]) -> Result<()> {
        if latent.len() != self.width {
            let detail = format!("its latent has {} values, but the shard's rows have {}", latent.len(), self.width);
            return Err(Error::BadRow { table: "shards", item: sample_id.into(), detail });
        }
        self.rows += 1;
        self.pending.sample_ids.push(sample_id.into());
        self.pending.caption_digests.push(caption_digest.into());
        self.pending.repeated.push(repeated);
        self.pending.latents.extend_from_slice(latent);
        if 2 * self.pending.latents.len() >= BATCH_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let Some(writer) = self.writer.as_mut().filter(|_| !self.pending.sample_ids.is_empty()) else { return Ok(()) };
        let Pending { sample_ids, caption_digests, repeated, latents } = std::mem::take(&mut self.pending);
        let values = Arc::new(Float16Array::from(latents));
        let error = |e| Error::arrow("write", &self.path, e);
        let latents = FixedSizeListArray::try_new(tensor_item(), self.width as i32, values, None).map_err(error)?;
        let columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from(sample_ids)),
            Arc::new(StringArray::from(caption_digests)),
            Arc::new(BooleanArray::from(repeated)),
            Arc::new(latents),
        ];
        let batch = RecordBatch::try_new(self.schema.clone(), columns).map_err(error)?;
        writer.write(&batch).map_err(error)
    }

    /// Completes the file.
    pub fn finish(mut self) -> Result<Written> {
        self.flush()?;
        if let Some(writer) = self.writer.take() {
            let file = writer.into_inner().map_err(|e| Error::arrow("write", &self.path, e))?;
            file.into_inner().map_err(|e| Error::io("write", &self.path, e.into_error()))?;
        }
        complete(&self.part, &self.path).map(|bytes| Written { rows: self.rows, bytes })
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if self.writer.take().is_some() {
            let _ = fs_err::remove_file(&self.part);
        }
    }
}

/// A mapped shard. Published shards never change; truncating one that is mapped would stop the process (SIGBUS).
pub struct ShardReader {
    batches: Vec<(usize, RecordBatch)>,
    rows: usize,
    bucket: Bucket,
    meta: LatentMeta,
}

impl ShardReader {
    /// Maps a shard and checks its structure. Latents are not touched.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("read", path, e))?;
        Self::decode(&map(&file).map_err(|e| Error::io("read", path, e))?, path)
    }

    fn decode(buffer: &Buffer, path: &Path) -> Result<Self> {
        let (found, blocks) = footer(buffer).map_err(|detail| Error::damaged(path, detail))?;
        let meta = LatentMeta::of(&found, path)?;
        let latent = found.field_with_name("latent").map_err(|e| Error::arrow("read", path, e))?;
        let bucket = latent.metadata().get("bucket").and_then(|bucket| bucket.parse().ok());
        let bucket: Bucket = bucket.ok_or_else(|| Error::damaged(path, "its metadata names no bucket"))?;
        let schema = schema::shard(&meta, bucket);
        let column = |field: &Arc<Field>| (field.name().clone(), field.metadata().clone());
        if !found.fields().iter().map(column).eq(schema.fields().iter().map(column)) {
            return Err(Error::damaged(path, "its columns are not those of a shard"));
        }
        let (mut batches, mut rows, width) = (Vec::new(), 0, meta.shape(bucket).iter().product());
        for block in &blocks {
            let batch = batch(buffer, block, &schema, width).map_err(|detail| Error::damaged(path, detail))?;
            let first = rows;
            rows += batch.num_rows();
            batches.push((first, batch));
        }
        Ok(Self { batches, rows, bucket, meta })
    }

    /// Rows, repeats included.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bucket of all rows.
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// How the latents were made.
    pub fn meta(&self) -> &LatentMeta {
        &self.meta
    }

    /// Shape of every latent, in the layout of [`LatentMeta::layout`].
    pub fn shape(&self) -> Vec<usize> {
        self.meta.shape(self.bucket)
    }

    /// Sample id of row `i`.
    ///
    /// # Panics
    /// This and the following panic if `i` is not below [`ShardReader::rows`].
    pub fn sample_id(&self, i: usize) -> &str {
        let (batch, i) = self.at(i);
        batch.column(0).as_string::<i32>().value(i)
    }

    /// Caption digest of row `i`.
    pub fn caption_digest(&self, i: usize) -> &str {
        let (batch, i) = self.at(i);
        batch.column(1).as_string::<i32>().value(i)
    }

    /// Whether row `i` only fills up a batch.
    pub fn repeated(&self, i: usize) -> bool {
        let (batch, i) = self.at(i);
        batch.column(2).as_boolean().value(i)
    }

    /// Latent of row `i`, flat, inside the mapping.
    pub fn latent(&self, i: usize) -> &[f16] {
        let (batch, i) = self.at(i);
        let latents = batch.column(3).as_fixed_size_list();
        let width = latents.value_length() as usize;
        let values: &[f16] = latents.values().as_primitive::<Float16Type>().values();
        &values[i * width..(i + 1) * width]
    }

    fn at(&self, i: usize) -> (&RecordBatch, usize) {
        assert!(i < self.rows, "row {i} of {} in a shard", self.rows);
        let (first, batch) = &self.batches[self.batches.partition_point(|(first, _)| *first <= i) - 1];
        (batch, i - first)
    }
}

#[expect(unsafe_code, reason = "mapping a file has no safe form")]
fn map(file: &File) -> std::io::Result<Buffer> {
    // SAFETY: files of a published artifact are never written to again; a shard under construction has another name.
    let map = unsafe { memmap2::Mmap::map(file.file()) }?;
    Ok(Buffer::from(bytes::Bytes::from_owner(map)))
}

/// Names and metadata of the columns, and places of the record batches, of an Arrow IPC file. Types are left out: the
/// library's conversion of a damaged schema panics, and the sizes of the buffers tell the same.
fn footer(file: &Buffer) -> Result<(Schema, Vec<Block>), String> {
    if !file.starts_with(b"ARROW1\0\0") {
        return Err("it is not an Arrow IPC file".into());
    }
    let (body, trailer) = file.split_last_chunk::<10>().ok_or("it is too short")?;
    let length = read_footer_length(*trailer).map_err(|e| e.to_string())?;
    let start = body.len().checked_sub(length).ok_or("its footer is longer than the file")?;
    let footer = root_as_footer(&body[start..]).map_err(|e| e.to_string())?;
    if footer.version() != MetadataVersion::V5 {
        return Err("it is of another version of Arrow IPC".into());
    }
    let fields = footer.schema().and_then(|schema| schema.fields()).ok_or("it has no schema")?;
    let field = |field: fb::Field<'_>| {
        let metadata = field.custom_metadata().into_iter().flatten();
        let metadata = metadata.filter_map(|pair| Some((pair.key()?.to_owned(), pair.value()?.to_owned())));
        Field::new(field.name().unwrap_or_default(), DataType::Null, false).with_metadata(metadata.collect())
    };
    let schema = Schema::new(fields.iter().map(field).collect::<Vec<_>>());
    Ok((schema, footer.recordBatches().iter().flatten().copied().collect()))
}

fn batch(file: &Buffer, block: &Block, schema: &SchemaRef, width: usize) -> Result<RecordBatch, String> {
    let data = block_of(file, block, width).ok_or("a record batch lies outside the file, or contradicts itself")?;
    let batch = FileDecoder::new(schema.clone(), MetadataVersion::V5).read_record_batch(block, &data);
    batch.map_err(|e| e.to_string())?.ok_or_else(|| "a block is not a record batch".into())
}

/// The bytes of a block of shard rows. The decoder panics on offsets and counts that cannot be, so these are checked
/// first: everything lies inside the file and is aligned, the counts are those of `rows` latents of `width` values, and
/// nothing claims to hold nulls.
fn block_of(file: &Buffer, block: &Block, width: usize) -> Option<Buffer> {
    let size = |n: i64| usize::try_from(n).ok();
    let (offset, meta, body) = (size(block.offset())?, size(block.metaDataLength().into())?, size(block.bodyLength())?);
    let length = meta.checked_add(body)?;
    if offset.checked_add(length)? > file.len() || meta < 8 || (offset + meta) % 8 != 0 {
        return None;
    }
    let data = file.slice_with_length(offset, length);
    let message = root_as_message(data.get(8..meta)?).ok()?;
    let batch = message.header_as_record_batch()?;
    let rows = size(batch.length()).filter(|&rows| rows <= body)?;
    let values = rows.checked_mul(width)?;
    let nodes: Vec<_> = batch.nodes()?.iter().map(|node| (size(node.length()), node.null_count())).collect();
    let buffers: Vec<_> =
        batch.buffers()?.iter().map(|b| Some((size(b.offset())?, size(b.length())?))).collect::<Option<_>>()?;
    let inside = |&(at, length): &(usize, usize)| at % 8 == 0 && at.checked_add(length).is_some_and(|end| end <= body);
    // Buffers: validity, offsets and text of two text columns; validity and bits; validity; validity and values.
    let [_, (_, ids), _, _, (_, captions), _, _, (_, repeated), _, _, (_, latents)] = buffers.as_slice() else {
        return None;
    };
    let sized = *ids == 4 * (rows + 1) && captions == ids && *repeated == rows.div_ceil(8) && *latents == 2 * values;
    let counted = nodes == [rows, rows, rows, rows, values].map(|n| (Some(n), 0));
    (sized && counted && buffers.iter().all(inside)).then_some(data)
}

#[cfg(test)]
mod tests;

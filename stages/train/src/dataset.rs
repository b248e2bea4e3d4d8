//! The samples of a run: mapped shards, captions by digest, and the few facts the plan needs. Draws nothing, knows no model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use models::{Encoded, Text};
use spec::Problem;
use stage::{Exit, Failure};
use tables::{CaptionReader, ShardReader, ShardRow, caption_digest};
use tch::{Kind, Tensor};

use crate::plan::Item;
use crate::unusable;

/// Where a sample lies.
struct Row {
    shard: usize,
    row: usize,
}

/// Samples by index; rows that only fill up a shard are left out.
pub(crate) struct Dataset {
    shards: Vec<ShardReader>,
    rows: Vec<Row>,
    items: Vec<Item>,
    captions: CaptionReader,
    encoders: Vec<String>,
    /// Digest of the caption that stands for "no text".
    empty: String,
    kept: Mutex<Kept>,
}

/// Texts that were read once, until they fill [`Kept::BYTES`]: of a small data set all of them.
#[derive(Default)]
struct Kept {
    texts: BTreeMap<String, Text>,
    bytes: usize,
}

impl Kept {
    const BYTES: usize = 512 << 20;

    fn get(&self, digest: &str) -> Option<Text> {
        self.texts.get(digest).map(copy)
    }

    fn keep(&mut self, digest: &str, text: &Text) {
        let tensors = text.values().flat_map(|encoded| [&encoded.embedding, &encoded.pooled]).flatten();
        let bytes: usize = tensors.map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum();
        if self.bytes + bytes <= Self::BYTES && !self.texts.contains_key(digest) {
            self.bytes += bytes;
            self.texts.insert(digest.to_owned(), copy(text));
        }
    }
}

/// As many as tell how long the others are.
const SOME_TEXTS: usize = 32;

/// The same tensors once more.
fn copy(text: &Text) -> Text {
    let tensor = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
    let encoded =
        |e: &Encoded| Encoded { tokens: e.tokens, embedding: tensor(&e.embedding), pooled: tensor(&e.pooled) };
    text.iter().map(|(name, e)| (name.clone(), encoded(e))).collect()
}

impl Dataset {
    /// Opens the artifacts of `bucket` (shards) and `encode` (captions), and checks that they belong together.
    pub(crate) fn open(shards_dir: &Path, captions_dir: &Path) -> Result<Self, Failure> {
        let index: Vec<ShardRow> = tables::read(&shards_dir.join("shards.parquet")).map_err(unusable)?;
        let captions = CaptionReader::open(&captions_dir.join("captions")).map_err(unusable)?;
        let mut dataset = Self {
            shards: Vec::with_capacity(index.len()),
            rows: Vec::new(),
            items: Vec::new(),
            encoders: captions.encoders().into_iter().map(str::to_owned).collect(),
            captions,
            empty: caption_digest(""),
            kept: Mutex::default(),
        };
        for (number, row) in index.iter().enumerate() {
            let reader = ShardReader::open(&shards_dir.join(&row.shard)).map_err(unusable)?;
            for at in (0..reader.rows()).filter(|at| !reader.repeated(*at)) {
                dataset.items.push(Item { sample_id: reader.sample_id(at).to_owned(), bucket: reader.bucket() });
                dataset.rows.push(Row { shard: number, row: at });
            }
            dataset.shards.push(reader);
        }
        dataset.check()?;
        Ok(dataset)
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |message: String, help: &str| Err(Failure::new(Exit::Input, Problem::new(message).help(help)));
        if self.items.is_empty() {
            return refuse("there are no samples to train on".to_owned(), "see the `rejects` and `held` tables");
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.items.iter().find(|item| !seen.insert(&item.sample_id)) {
            return refuse(format!("the shards hold sample `{}` twice", twice.sample_id), "run `bucket` again");
        }
        let digests: BTreeSet<&str> =
            self.rows.iter().map(|row| self.shards[row.shard].caption_digest(row.row)).collect();
        for encoder in &self.encoders {
            let mut wanted = digests.iter().copied().chain([self.empty.as_str()]);
            if let Some(missing) = wanted.find(|digest| !self.captions.contains(digest, encoder)) {
                return refuse(format!("the captions lack `{missing}` by `{encoder}`"), "run `encode` again");
            }
        }
        Ok(())
    }

    pub(crate) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Frames for which one of a latent stands, after its first.
    pub(crate) fn stride(&self) -> u32 {
        self.shards.first().and_then(|shard| shard.meta().temporal_stride).unwrap_or(1)
    }

    /// Shape of the latents of a bucket, without the batch.
    pub(crate) fn shape(&self, bucket: spec::Bucket) -> Vec<i64> {
        let shard = self.shards.iter().find(|shard| shard.bucket() == bucket);
        shard.map_or(Vec::new(), |shard| shard.shape().into_iter().map(|n| n as i64).collect())
    }

    /// Longest prompt in tokens, padding included.
    pub(crate) fn max_tokens(&self) -> usize {
        self.captions.meta().max_tokens as usize
    }

    /// Clean latents of samples of one bucket: f32 [B, ...] on the CPU.
    pub(crate) fn latents(&self, samples: &[usize]) -> Tensor {
        let rows: Vec<Tensor> = samples
            .iter()
            .map(|sample| {
                let Row { shard, row } = self.rows[*sample];
                let reader = &self.shards[shard];
                let shape: Vec<i64> = reader.shape().into_iter().map(|n| n as i64).collect();
                Tensor::from_slice(reader.latent(row)).to_kind(Kind::Float).view(shape.as_slice())
            })
            .collect();
        Tensor::stack(&rows, 0)
    }

    /// Bytes of the texts that a run comes to keep, by some of them.
    pub(crate) fn text_bytes(&self) -> Result<u64, Failure> {
        let samples: BTreeMap<&str, usize> = self
            .rows
            .iter()
            .enumerate()
            .map(|(sample, row)| (self.shards[row.shard].caption_digest(row.row), sample))
            .collect();
        let looked_at = samples.len().min(SOME_TEXTS);
        for sample in samples.values().take(looked_at) {
            self.text(*sample, false)?;
        }
        let mean = self.kept.lock().unwrap_or_else(PoisonError::into_inner).bytes / looked_at.max(1);
        Ok((mean * samples.len()).min(Kept::BYTES) as u64)
    }

    /// What the text encoders made of a sample's caption, or of the empty one.
    pub(crate) fn text(&self, sample: usize, dropped: bool) -> Result<Text, Failure> {
        let Row { shard, row } = self.rows[sample];
        let digest = if dropped { self.empty.as_str() } else { self.shards[shard].caption_digest(row) };
        if let Some(text) = self.kept.lock().unwrap_or_else(PoisonError::into_inner).get(digest) {
            return Ok(text);
        }
        let mut text = BTreeMap::new();
        for encoder in &self.encoders {
            let caption = self.captions.get(digest, encoder).map_err(unusable)?;
            let (tokens, width) = (i64::from(caption.tokens), i64::from(caption.width));
            let tensor = |bytes: Option<Vec<u8>>, shape: &[i64]| {
                bytes.map(|b| Tensor::from_data_size(&b, shape, Kind::BFloat16))
            };
            let encoded = Encoded {
                tokens,
                embedding: tensor(caption.embedding, &[tokens, width]),
                pooled: tensor(caption.pooled, &[width]),
            };
            text.insert(encoder.clone(), encoded);
        }
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).keep(digest, &text);
        Ok(text)
    }
}

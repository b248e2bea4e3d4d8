//! The captions table: written row by row, read by caption and encoder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::error::{Error, Result};
use crate::meta::TextMeta;
use crate::reader::{Location, TableReader};
use crate::row::{Caption, CaptionInfo};
use crate::schema;
use crate::writer::{RowWriter, Written};

/// Key of a caption: BLAKE3 of its UTF-8 text, hex.
pub fn caption_digest(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// Writes captions whose tensors fit their own `tokens` and `width`.
pub struct CaptionsWriter(RowWriter<Caption>);

impl CaptionsWriter {
    /// Starts a file.
    pub fn create(path: &Path, meta: &TextMeta) -> Result<Self> {
        RowWriter::with_schema(path, schema::captions(meta)).map(Self)
    }

    /// Appends a row.
    pub fn push(&mut self, row: Caption) -> Result<()> {
        check(&row).map_err(|detail| Error::BadRow { table: "captions", item: row.caption_digest.clone(), detail })?;
        self.0.push(row)
    }

    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.0.rows()
    }

    /// Completes the file.
    pub fn finish(self) -> Result<Written> {
        self.0.finish()
    }
}

/// Whether the digest is the text's, and the tensors have the sizes the row gives.
fn check(row: &Caption) -> Result<(), String> {
    let count = |n: i32| usize::try_from(n).map_err(|_| format!("negative size {n}"));
    let (tokens, width) = (count(row.tokens)?, count(row.width)?);
    if row.caption_digest != caption_digest(&row.text) {
        return Err(format!("its digest is not that of its text {:?}", row.text));
    }
    let sizes = [("embedding", &row.embedding, 2 * tokens * width), ("pooled", &row.pooled, 2 * width)];
    for (name, tensor, expected) in sizes {
        if let Some(found) = tensor.as_ref().map(Vec::len).filter(|&found| found != expected) {
            return Err(format!("`{name}` has {found} bytes, but {tokens} x {width} numbers in bf16 make {expected}"));
        }
    }
    if row.embedding.is_none() && row.pooled.is_none() {
        return Err("it has neither `embedding` nor `pooled`".into());
    }
    Ok(())
}

/// Random access to captions: an index in memory, tensors read when asked for.
pub struct CaptionReader {
    table: TableReader,
    index: BTreeMap<(String, String), Location>,
    meta: TextMeta,
}

impl CaptionReader {
    /// Opens the captions in a file or below a folder.
    pub fn open(path: &Path) -> Result<Self> {
        let table = TableReader::open(path)?;
        let mut metas = table.schemas().map(|(file, schema)| TextMeta::of(schema, file).map(|meta| (file, meta)));
        let (_, meta) = metas.next().ok_or_else(|| Error::NoFiles { path: path.into() })??;
        for other in metas {
            let (file, other) = other?;
            if other != meta {
                let detail = "its encoders differ from those of the table's first file".into();
                return Err(Error::Metadata { path: file.into(), column: "embedding".into(), detail });
            }
        }
        let mut index = BTreeMap::new();
        for row in table.rows::<CaptionInfo>() {
            let (at, row) = row?;
            let twice = format!("caption {} is there twice for `{}`", row.caption_digest, row.encoder);
            if index.insert((row.caption_digest, row.encoder), at).is_some() {
                return Err(Error::damaged(path, twice));
            }
        }
        Ok(Self { table, index, meta })
    }

    /// How the embeddings were made.
    pub fn meta(&self) -> &TextMeta {
        &self.meta
    }

    /// Text encoders that have rows.
    pub fn encoders(&self) -> BTreeSet<&str> {
        self.index.keys().map(|(_, encoder)| encoder.as_str()).collect()
    }

    /// Whether the caption was encoded.
    pub fn contains(&self, digest: &str, encoder: &str) -> bool {
        self.index.contains_key(&(digest.to_owned(), encoder.to_owned()))
    }

    /// The caption's row of one encoder; reads its pages only. Callable from several threads.
    pub fn get(&self, digest: &str, encoder: &str) -> Result<Caption> {
        let Some(&at) = self.index.get(&(digest.to_owned(), encoder.to_owned())) else {
            let help = format!("it has embeddings by {:?}", self.encoders());
            return Err(Error::NoCaption {
                path: self.table.path().into(),
                digest: digest.into(),
                encoder: encoder.into(),
                help,
            });
        };
        let row: Caption = self.table.get(at)?;
        check(&row).map_err(|detail| Error::damaged(self.table.path(), format!("caption {digest}: {detail}")))?;
        Ok(row)
    }

    /// All rows without their tensors, with their places for [`CaptionReader::at`].
    pub fn infos(&self) -> impl Iterator<Item = Result<(Location, CaptionInfo)>> + '_ {
        self.table.rows()
    }

    /// The row at a place.
    pub fn at(&self, at: Location) -> Result<Caption> {
        self.table.get(at)
    }
}

//! The latents table: every latent has the shape of its bucket.

use std::path::Path;

use crate::error::{Error, Result};
use crate::meta::LatentMeta;
use crate::reader::{Location, TableReader};
use crate::row::{Latent, LatentInfo};
use crate::schema;
use crate::writer::{RowWriter, Written};

/// Writes latents of the shape that their bucket and the metadata imply.
pub struct LatentsWriter {
    rows: RowWriter<Latent>,
    meta: LatentMeta,
}

impl LatentsWriter {
    /// Starts a file.
    pub fn create(path: &Path, meta: &LatentMeta) -> Result<Self> {
        Ok(Self { rows: RowWriter::with_schema(path, schema::latents(meta))?, meta: meta.clone() })
    }

    /// Appends a row.
    pub fn push(&mut self, row: Latent) -> Result<()> {
        check(&row, &self.meta).map_err(|detail| Error::BadRow {
            table: "latents",
            item: row.sample_id.clone(),
            detail,
        })?;
        self.rows.push(row)
    }

    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.rows.rows()
    }

    /// Completes the file.
    pub fn finish(self) -> Result<Written> {
        self.rows.finish()
    }
}

fn check(row: &Latent, meta: &LatentMeta) -> Result<(), String> {
    let bucket = row.info().bucket();
    let shape = meta.shape(bucket);
    let (found, expected) = (row.latent.len(), shape.iter().product::<usize>());
    if found == expected && found > 0 {
        return Ok(());
    }
    Err(format!("its latent has {found} values, but bucket {bucket} makes {shape:?}, {expected} values"))
}

/// Reads latents, all made the same way.
pub struct LatentReader {
    table: TableReader,
    meta: LatentMeta,
}

impl LatentReader {
    /// Opens the latents in a file or below a folder; files that differ in encoder, normalisation or layout are an error.
    pub fn open(path: &Path) -> Result<Self> {
        let table = TableReader::open(path)?;
        let mut metas = table.schemas().map(|(file, schema)| LatentMeta::of(schema, file).map(|meta| (file, meta)));
        let (_, meta) = metas.next().ok_or_else(|| Error::NoFiles { path: path.into() })??;
        for other in metas {
            let (file, other) = other?;
            if other != meta {
                let detail = "its encoder, layout or normalisation differs from the table's first file".into();
                return Err(Error::Metadata { path: file.into(), column: "latent".into(), detail });
            }
        }
        Ok(Self { table, meta })
    }

    /// How the latents were made.
    pub fn meta(&self) -> &LatentMeta {
        &self.meta
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether it has no row.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// All rows without their latents, with their places for [`LatentReader::get`].
    pub fn infos(&self) -> impl Iterator<Item = Result<(Location, LatentInfo)>> + '_ {
        self.table.rows()
    }

    /// All rows, streamed.
    pub fn rows(&self) -> impl Iterator<Item = Result<(Location, Latent)>> + '_ {
        self.table.rows()
    }

    /// One row; reads its pages only. Callable from several threads.
    pub fn get(&self, at: Location) -> Result<Latent> {
        let row: Latent = self.table.get(at)?;
        let damaged = |detail| Error::damaged(self.table.path(), format!("sample {}: {detail}", row.sample_id));
        check(&row, &self.meta).map_err(damaged)?;
        Ok(row)
    }
}

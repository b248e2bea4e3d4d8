//! Reads Parquet tables: streaming over all files of a table, or one row alone.
//!
//! Only the columns of the row type are read, and of a single row only its pages.

use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::vec::IntoIter;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use fs_err::File;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowSelection,
    RowSelector,
};
use parquet::file::metadata::PageIndexPolicy;

use crate::error::{Error, Result};
use crate::row::{Row, missing};

/// Place of a row in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    file: usize,
    row: usize,
}

impl Location {
    /// Number of the row in its file, from 0.
    pub fn row(&self) -> usize {
        self.row
    }
}

struct TableFile {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
}

/// A table in one or more Parquet files, in path order.
pub struct TableReader {
    path: PathBuf,
    files: Vec<TableFile>,
}

impl TableReader {
    /// Opens a file, or all `.parquet` files below a folder.
    pub fn open(path: &Path) -> Result<Self> {
        let mut paths = Vec::new();
        find(path, &mut paths)?;
        if paths.is_empty() {
            return Err(Error::NoFiles { path: path.into() });
        }
        paths.sort();
        let files = paths.into_iter().map(TableFile::open).collect::<Result<_>>()?;
        Ok(Self { path: path.into(), files })
    }

    /// The file or folder it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Rows in all files.
    pub fn len(&self) -> usize {
        self.files.iter().map(TableFile::rows).sum()
    }

    /// Whether it has no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Files, in path order, with the schema of each.
    pub fn schemas(&self) -> impl Iterator<Item = (&Path, &SchemaRef)> {
        self.files.iter().map(|file| (file.path.as_path(), file.metadata.schema()))
    }

    /// All rows in order, a batch in memory at a time.
    pub fn rows<R: Row>(&self) -> Rows<'_, R> {
        Rows { table: self, file: 0, row: 0, batches: None, ready: Vec::new().into_iter() }
    }

    /// The rows at `places`, in ascending order; pages without such rows are not read.
    pub fn select<R: Row>(&self, mut places: Vec<Location>) -> Selected<'_, R> {
        places.sort_unstable();
        places.dedup();
        Selected { table: self, places: places.into_iter().peekable(), open: None }
    }

    fn file(&self, number: usize) -> Result<&TableFile> {
        self.files.get(number).ok_or_else(|| Error::damaged(&self.path, format!("it has no file {number}")))
    }

    /// One row.
    pub fn get<R: Row>(&self, at: Location) -> Result<R> {
        let gone = || Error::damaged(&self.path, format!("it has no row {} in file {}", at.row, at.file));
        let file = self.file(at.file)?;
        let mut first = 0;
        let groups = file.metadata.metadata().row_groups().iter().enumerate();
        for (group, rows) in groups.map(|(i, group)| (i, group.num_rows() as usize)) {
            if at.row < first + rows {
                let selection = [RowSelector::skip(at.row - first), RowSelector::select(1)];
                let mut batches = file.batches::<R>(Some(group), Some(RowSelection::from(selection.to_vec())))?;
                let batch = file.next(&mut batches)?.ok_or_else(gone)?;
                return R::rows(&batch, &file.path)?.into_iter().next().ok_or_else(gone);
            }
            first += rows;
        }
        Err(gone())
    }
}

impl TableFile {
    fn open(path: PathBuf) -> Result<Self> {
        let file = File::open(&path).map_err(|e| Error::io("read", &path, e))?;
        let options = ArrowReaderOptions::new().with_offset_index_policy(PageIndexPolicy::Optional);
        let metadata =
            ArrowReaderMetadata::load(&file.into_parts().0, options).map_err(|e| Error::parquet("read", &path, e))?;
        Ok(Self { path, metadata })
    }

    fn rows(&self) -> usize {
        self.metadata.metadata().file_metadata().num_rows() as usize
    }

    fn batches<R: Row>(
        &self,
        group: Option<usize>,
        selection: Option<RowSelection>,
    ) -> Result<ParquetRecordBatchReader> {
        let (schema, parquet) = (self.metadata.schema(), self.metadata.parquet_schema());
        let column = |field: arrow::datatypes::Field| {
            schema.index_of(field.name()).map_err(|_| missing(schema, field.name(), &self.path))
        };
        let columns = R::fields().into_iter().map(column).collect::<Result<Vec<_>>>()?;
        let file = File::open(&self.path).map_err(|e| Error::io("read", &self.path, e))?.into_parts().0;
        let mut builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone())
            .with_projection(ProjectionMask::roots(parquet, columns))
            .with_batch_size(R::BATCH);
        if let Some(group) = group {
            builder = builder.with_row_groups(vec![group]);
        }
        if let Some(selection) = selection {
            builder = builder.with_row_selection(selection);
        }
        builder.build().map_err(|e| Error::parquet("read", &self.path, e))
    }

    fn next(&self, batches: &mut ParquetRecordBatchReader) -> Result<Option<RecordBatch>> {
        batches.next().transpose().map_err(|e| Error::arrow("read", &self.path, e))
    }
}

fn find(path: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let error = |e| Error::io("read", path, e);
    if !fs_err::metadata(path).map_err(error)?.is_dir() {
        found.push(path.into());
        return Ok(());
    }
    for entry in fs_err::read_dir(path).map_err(error)? {
        let entry = entry.map_err(error)?.path();
        if entry.is_dir() || entry.extension().is_some_and(|e| e == "parquet") {
            find(&entry, found)?;
        }
    }
    Ok(())
}

/// Rows of a table, with their places.
pub struct Rows<'t, R> {
    table: &'t TableReader,
    file: usize,
    row: usize,
    batches: Option<ParquetRecordBatchReader>,
    ready: std::vec::IntoIter<R>,
}

impl<R: Row> Rows<'_, R> {
    fn advance(&mut self) -> Result<Option<(Location, R)>> {
        loop {
            if let Some(row) = self.ready.next() {
                let at = Location { file: self.file, row: self.row };
                self.row += 1;
                return Ok(Some((at, row)));
            }
            let Some(file) = self.table.files.get(self.file) else { return Ok(None) };
            let batches = match &mut self.batches {
                Some(batches) => batches,
                None => self.batches.insert(file.batches::<R>(None, None)?),
            };
            match file.next(batches)? {
                Some(batch) => self.ready = R::rows(&batch, &file.path)?.into_iter(),
                None if self.row == file.rows() => (self.file, self.row, self.batches) = (self.file + 1, 0, None),
                None => {
                    let detail = format!("it ends after {} of {}", self.row, spec::counted(file.rows(), "row"));
                    return Err(Error::damaged(&file.path, detail));
                }
            }
        }
    }
}

impl<R: Row> Iterator for Rows<'_, R> {
    type Item = Result<(Location, R)>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.advance().transpose();
        if matches!(item, Some(Err(_))) {
            self.file = usize::MAX;
        }
        item
    }
}

/// Some rows of a table, with their places.
pub struct Selected<'t, R> {
    table: &'t TableReader,
    places: Peekable<IntoIter<Location>>,
    /// Of one file: its batches, the places still to come, and the rows decoded so far.
    open: Option<(ParquetRecordBatchReader, IntoIter<Location>, IntoIter<R>)>,
}

impl<R: Row> Selected<'_, R> {
    fn advance(&mut self) -> Result<Option<(Location, R)>> {
        loop {
            let Some((batches, places, ready)) = &mut self.open else {
                let Some(Location { file: number, .. }) = self.places.peek().copied() else { return Ok(None) };
                let here: Vec<_> = std::iter::from_fn(|| self.places.next_if(|place| place.file == number)).collect();
                let file = self.table.file(number)?;
                let rows = here.iter().map(|place| place.row..place.row + 1);
                let selection = RowSelection::from_consecutive_ranges(rows, file.rows());
                self.open = Some((file.batches::<R>(None, Some(selection))?, here.into_iter(), Vec::new().into_iter()));
                continue;
            };
            if let Some(row) = ready.next() {
                let file = self.table.path();
                let at = places.next().ok_or_else(|| Error::damaged(file, "it has more rows than were asked for"))?;
                return Ok(Some((at, row)));
            }
            match (places.as_slice().first().copied(), batches.next().transpose()) {
                (None, _) => self.open = None,
                (Some(at), batch) => {
                    let file = self.table.file(at.file)?;
                    let batch = batch.map_err(|e| Error::arrow("read", &file.path, e))?;
                    let batch = batch.ok_or_else(|| Error::damaged(&file.path, format!("it has no row {}", at.row)))?;
                    *ready = R::rows(&batch, &file.path)?.into_iter();
                }
            }
        }
    }
}

impl<R: Row> Iterator for Selected<'_, R> {
    type Item = Result<(Location, R)>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.advance().transpose();
        if matches!(item, Some(Err(_))) {
            (self.open, self.places) = (None, Vec::new().into_iter().peekable());
        }
        item
    }
}

/// A whole small table: all rows of a file or folder.
pub fn read<R: Row>(path: &Path) -> Result<Vec<R>> {
    TableReader::open(path)?.rows().map(|row| row.map(|(_, row)| row)).collect()
}

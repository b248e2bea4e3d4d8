//! Parquet files with pictures inside: a struct of `bytes` and `path` (as `datasets` writes them), plain binary, or paths
//! of files beside them. Streamed a few rows at a time.

use std::path::Path;

use ::parquet::arrow::ProjectionMask;
use ::parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Schema};
use spec::Problem;
use stage::{Exit, Failure};

use crate::layout::folder;
use crate::origin::{Origin, unreadable};
use crate::parameters::{MissingCaption, Parameters};
use crate::row::{CAPTION_NAMES, Column, IMAGE_NAMES, Media, Refusal, Row, Rows, choose, listed};

/// Rows decoded at once.
const BATCH: usize = 16;

/// The columns of a data set.
#[derive(Debug, Clone)]
pub(crate) struct Columns {
    /// Pictures.
    pub(crate) image: Column,
    /// Captions, if there are any.
    pub(crate) caption: Option<Column>,
}

/// Opens a file.
fn open(place: &Path) -> Result<ParquetRecordBatchReaderBuilder<std::fs::File>, Failure> {
    let file = fs_err::File::open(place).map_err(unreadable)?;
    ParquetRecordBatchReaderBuilder::try_new(file.into_parts().0).map_err(|error| broken(place, &error))
}

/// Not Parquet; unless it is the disk that does not give the file, which the reader's errors do not always tell.
fn broken(place: &Path, error: &dyn std::fmt::Display) -> Failure {
    let read = fs_err::File::open(place).and_then(|mut file| std::io::copy(&mut file, &mut std::io::sink()));
    if let Err(error) = read {
        return unreadable(error);
    }
    let message = format!("`{}` cannot be read as Parquet: {error}", place.display());
    Failure::new(Exit::Input, Problem::new(message).help("fetch or write the file again"))
}

/// Chooses the columns by the schema of one file.
pub(crate) fn columns(place: &Path, parameters: &Parameters) -> Result<Columns, Failure> {
    let builder = open(place)?;
    choose_columns(builder.schema(), parameters).map_err(|problem| Failure::new(Exit::Input, problem))
}

/// Rows of a file, from its footer.
pub(crate) fn count(place: &Path) -> Result<u64, Failure> {
    Ok(open(place)?.metadata().file_metadata().num_rows().max(0) as u64)
}

/// Rows of a file, whose path inside the data set is `path`.
pub(crate) fn rows<'a>(
    place: &Path,
    path: &'a str,
    columns: &'a Columns,
    origin: &'a Origin,
) -> Result<Rows<'a>, Failure> {
    let builder = open(place)?;
    let mut wanted = vec![find(builder.schema(), &columns.image, place)?];
    if let Some(caption) = &columns.caption {
        wanted.push(find(builder.schema(), caption, place)?);
    }
    let mask = ProjectionMask::roots(builder.parquet_schema(), wanted);
    let reader = builder.with_projection(mask).with_batch_size(BATCH).build().map_err(|e| broken(place, &e))?;
    let place = place.to_owned();
    let batches = Batches { reader, place, first: 0 };
    Ok(Box::new(batches.flat_map(move |batch| match batch {
        Ok((first, batch)) => batch_rows(&batch, first, path, columns, origin),
        Err(failure) => vec![Err(failure)],
    })))
}

/// Batches with the number of their first row; ends after an error.
struct Batches {
    reader: ParquetRecordBatchReader,
    place: std::path::PathBuf,
    first: u64,
}

impl Iterator for Batches {
    type Item = Result<(u64, RecordBatch), Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        let first = self.first;
        match self.reader.next()? {
            Ok(batch) => {
                self.first += batch.num_rows() as u64;
                Some(Ok((first, batch)))
            }
            Err(error) => Some(Err(broken(&self.place, &error))),
        }
    }
}

fn find(schema: &Schema, column: &Column, place: &Path) -> Result<usize, Failure> {
    schema.index_of(&column.name).map_err(|_| {
        let names = listed(schema.fields().iter().map(|field| field.name().as_str()));
        let message = format!("`{}` has no column `{}`, unlike the files before it", place.display(), column.name);
        Failure::new(Exit::Input, Problem::new(message).help(format!("its columns are {names}")))
    })
}

fn is_binary(kind: &DataType) -> bool {
    matches!(kind, DataType::Binary | DataType::LargeBinary | DataType::BinaryView)
}

fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Null => true,
        DataType::Dictionary(_, value) => is_text(value),
        _ => false,
    }
}

/// A struct with the bytes of a file, or bytes.
fn is_picture(kind: &DataType) -> bool {
    match kind {
        DataType::Struct(fields) => fields.iter().any(|field| field.name() == "bytes" && is_binary(field.data_type())),
        other => is_binary(other),
    }
}

/// The one column whose type says that it holds pictures.
fn only_picture(schema: &Schema) -> Result<Column, Problem> {
    let pictures: Vec<_> = schema.fields().iter().filter(|field| is_picture(field.data_type())).collect();
    if let [only] = pictures.as_slice() {
        return Ok(Column { name: only.name().clone(), guessed: true });
    }
    let names = listed(schema.fields().iter().map(|field| field.name().as_str()));
    Err(Problem::new("no column is known to hold the pictures")
        .help(format!("name it with `image_column`; the columns are {names}"))
        .field("dataset"))
}

fn choose_columns(schema: &Schema, parameters: &Parameters) -> Result<Columns, Problem> {
    let names = schema.fields().iter().map(|field| field.name().as_str());
    let kind = |column: &Column| schema.field_with_name(&column.name).map(|field| field.data_type().clone());
    let named = choose("image_column", parameters.image_column.as_deref(), IMAGE_NAMES, names.clone())?;
    let image = named.map_or_else(|| only_picture(schema), Ok)?;
    if !kind(&image).is_ok_and(|kind| is_picture(&kind) || is_text(&kind)) {
        let found = kind(&image).map_or("nothing".to_owned(), |kind| kind.to_string());
        return Err(Problem::new(format!("the column `{}` holds {found}, not pictures", image.name))
            .help("a picture is binary, a struct of `bytes` and `path`, or the path of a file; name its column with `image_column`")
            .field(if image.guessed { "dataset" } else { "image_column" }));
    }
    let caption = choose("caption_column", parameters.caption_column.as_deref(), CAPTION_NAMES, names.clone())?;
    match &caption {
        None if parameters.missing_caption == MissingCaption::Reject => Err(Problem::new(
            "no column is known to hold the captions",
        )
        .help(format!(
            "name it with `caption_column`, or set `missing_caption` to `empty` or `filename`; the columns are {}",
            listed(names)
        ))
        .field("dataset")),
        Some(column) if !kind(column).is_ok_and(|kind| is_text(&kind)) => {
            let found = kind(column).map_or("nothing".to_owned(), |kind| kind.to_string());
            Err(Problem::new(format!("the column `{}` holds {found}, not text", column.name))
                .help("name a text column with `caption_column`")
                .field(if column.guessed { "dataset" } else { "caption_column" }))
        }
        _ => Ok(Columns { image, caption }),
    }
}

fn batch_rows(
    batch: &RecordBatch,
    first: u64,
    path: &str,
    columns: &Columns,
    origin: &Origin,
) -> Vec<Result<Row, Failure>> {
    let image = batch.column_by_name(&columns.image.name).cloned();
    let caption = columns.caption.as_ref().and_then(|column| batch.column_by_name(&column.name)).map(plain_text);
    (0..batch.num_rows())
        .map(|i| {
            let source = format!("{path}#{}", first + i as u64);
            let caption = match &caption {
                None => Ok(None),
                Some(Some(texts)) => Ok(text_at(texts.as_ref(), i).map(str::to_owned)),
                Some(None) => Err(Refusal::new("caption_encoding", "the caption is not text")),
            };
            let (media, name) = match &image {
                Some(column) => picture_at(column.as_ref(), i, path, origin)?,
                None => (Err(Refusal::new("no_media", "the row has no picture")), None),
            };
            Ok(Row { source, name, media, caption })
        })
        .collect()
}

/// A text column without its dictionary.
fn plain_text(column: &ArrayRef) -> Option<ArrayRef> {
    match column.data_type() {
        DataType::Dictionary(..) | DataType::Null => arrow::compute::cast(column, &DataType::Utf8).ok(),
        _ => Some(column.clone()),
    }
}

/// A picture, or why there is none, and the name of its file.
type Stated = (Result<Media, Refusal>, Option<String>);

fn picture_at(column: &dyn Array, i: usize, path: &str, origin: &Origin) -> Result<Stated, Failure> {
    let none = || Refusal::new("no_media", "the row has no picture");
    if column.is_null(i) {
        return Ok((Err(none()), None));
    }
    let (bytes, stated) = match column.data_type() {
        DataType::Struct(_) => {
            let parts = column.as_struct();
            let bytes = parts.column_by_name("bytes").and_then(|bytes| bytes_at(bytes.as_ref(), i));
            let stated = parts.column_by_name("path").and_then(plain_text);
            (bytes, stated.and_then(|texts| text_at(texts.as_ref(), i).map(str::to_owned)))
        }
        kind if is_text(kind) => (None, plain_text_at(column, i)),
        _ => (bytes_at(column, i), None),
    };
    let media = match (bytes, &stated) {
        (Some(bytes), _) => Ok(Media::Bytes(bytes.to_vec())),
        (None, Some(stated)) => origin.locate(folder(path), stated)?.map(Media::File),
        (None, None) => Err(none()),
    };
    Ok((media, stated))
}

fn plain_text_at(column: &dyn Array, i: usize) -> Option<String> {
    let one = plain_text(&column.slice(i, 1))?;
    text_at(one.as_ref(), 0).map(str::to_owned)
}

fn bytes_at(column: &dyn Array, i: usize) -> Option<&[u8]> {
    if column.is_null(i) {
        return None;
    }
    match column.data_type() {
        DataType::Binary => Some(column.as_binary::<i32>().value(i)),
        DataType::LargeBinary => Some(column.as_binary::<i64>().value(i)),
        DataType::BinaryView => Some(column.as_binary_view().value(i)),
        _ => None,
    }
}

fn text_at(column: &dyn Array, i: usize) -> Option<&str> {
    if column.is_null(i) {
        return None;
    }
    match column.data_type() {
        DataType::Utf8 => Some(column.as_string::<i32>().value(i)),
        DataType::LargeUtf8 => Some(column.as_string::<i64>().value(i)),
        DataType::Utf8View => Some(column.as_string_view().value(i)),
        _ => None,
    }
}

//! Results as text: a grid to read, CSV and JSON to process. Each row is written as it comes.

use std::io::Write;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, StringArray};
use arrow::csv::{Writer as CsvWriter, WriterBuilder as CsvBuilder};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::json::writer::{JsonFormat, LineDelimited, Writer as JsonWriter, WriterBuilder as JsonBuilder};
use arrow::util::display::{ArrayFormatter, FormatOptions};

use crate::Format;
use crate::error::{Error, Result};
use crate::grid::Grid;
use crate::tensor::{Encoding, Tensors};

/// Lists up to this length are shown whole in a grid.
const SHORT_LIST: usize = 8;
/// Values shown of a longer one.
const SHOWN: usize = 3;

/// A result under way.
pub(crate) struct Renderer<'w> {
    schema: SchemaRef,
    rows: u64,
    sink: Sink<'w>,
}

enum Sink<'w> {
    Grid(Grid<'w>),
    Csv(CsvWriter<&'w mut dyn Write>),
    Json(JsonWriter<&'w mut dyn Write, Lines>),
    Jsonl(JsonWriter<&'w mut dyn Write, LineDelimited>),
}

impl<'w> Renderer<'w> {
    pub(crate) fn start(format: Format, schema: &SchemaRef, out: &'w mut dyn Write) -> Result<Self> {
        let mut renderer = match format {
            Format::Table => Self { schema: schema.clone(), rows: 0, sink: Sink::Grid(Grid::new(schema, out)) },
            Format::Csv => Self { schema: schema.clone(), rows: 0, sink: Sink::Csv(CsvBuilder::new().build(out)) },
            Format::Json => {
                let writer = JsonBuilder::new().with_explicit_nulls(true).build(out);
                Self { schema: distinct(schema), rows: 0, sink: Sink::Json(writer) }
            }
            Format::Jsonl => {
                let writer = JsonBuilder::new().with_explicit_nulls(true).build(out);
                Self { schema: distinct(schema), rows: 0, sink: Sink::Jsonl(writer) }
            }
            Format::Parquet => return Err(Error::ParquetNeedsFile),
        };
        // The header, even if no row follows.
        renderer.write(&RecordBatch::new_empty(schema.clone()))?;
        Ok(renderer)
    }

    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        self.rows += batch.num_rows() as u64;
        let text: fn(&dyn Array, &Field) -> Result<Option<ArrayRef>, ArrowError> = match &self.sink {
            Sink::Grid(_) => shortened,
            Sink::Csv(_) => |column, _| if flat(column.data_type()) { Ok(None) } else { spelled(column).map(Some) },
            Sink::Json(_) | Sink::Jsonl(_) => {
                |column, _| if binary(column.data_type()) { spelled(column).map(Some) } else { Ok(None) }
            }
        };
        let batch = map(batch, &self.schema, text).map_err(failed)?;
        match &mut self.sink {
            Sink::Grid(grid) => grid.write(&batch)?,
            Sink::Csv(writer) => writer.write(&batch).map_err(failed)?,
            Sink::Json(writer) => writer.write(&batch).map_err(failed)?,
            Sink::Jsonl(writer) => writer.write(&batch).map_err(failed)?,
        }
        Ok(())
    }

    /// Ends the result; its number of rows.
    pub(crate) fn finish(self) -> Result<u64> {
        match self.sink {
            Sink::Grid(grid) => grid.finish()?,
            Sink::Csv(writer) => writer.into_inner().flush().map_err(Error::Output)?,
            Sink::Json(mut writer) => {
                writer.finish().map_err(failed)?;
                writer.into_inner().flush().map_err(Error::Output)?;
            }
            Sink::Jsonl(mut writer) => {
                writer.finish().map_err(failed)?;
                writer.into_inner().flush().map_err(Error::Output)?;
            }
        }
        Ok(self.rows)
    }
}

pub(crate) fn failed(error: ArrowError) -> Error {
    match error {
        ArrowError::IoError(_, source) => Error::Output(source),
        other => Error::Failed(other.to_string()),
    }
}

/// The batch with some columns replaced by text.
fn map(
    batch: &RecordBatch,
    schema: &Schema,
    text: impl Fn(&dyn Array, &Field) -> Result<Option<ArrayRef>, ArrowError>,
) -> Result<RecordBatch, ArrowError> {
    let (mut fields, mut columns) = (Vec::new(), Vec::new());
    for (column, field) in batch.columns().iter().zip(schema.fields()) {
        let column = text(column, field)?.unwrap_or_else(|| column.clone());
        fields.push(Field::new(field.name(), column.data_type().clone(), true));
        columns.push(column);
    }
    let rows = arrow::array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &rows)
}

fn flat(data_type: &DataType) -> bool {
    !data_type.is_nested() && !binary(data_type)
}

fn binary(data_type: &DataType) -> bool {
    use DataType::{Binary, BinaryView, FixedSizeBinary, LargeBinary};
    matches!(data_type, Binary | LargeBinary | BinaryView | FixedSizeBinary(_))
}

/// Every value in full: lists as `[1, 2]`, binary as hex.
fn spelled(column: &dyn Array) -> Result<ArrayRef, ArrowError> {
    let options = FormatOptions::default().with_display_error(false);
    let formatter = ArrayFormatter::try_new(column, &options)?;
    let text = |i| column.is_valid(i).then(|| formatter.value(i).try_to_string()).transpose();
    Ok(Arc::new((0..column.len()).map(text).collect::<Result<StringArray, _>>()?))
}

/// For a grid: tensors as `f16[61440] 0.5, -1, 0.25, …`, media as `<4096 bytes>`; `None` if it is short as it is.
fn shortened(column: &dyn Array, field: &Field) -> Result<Option<ArrayRef>, ArrowError> {
    if flat(column.data_type()) {
        return Ok(None);
    }
    let options = FormatOptions::default();
    let formatter = ArrayFormatter::try_new(column, &options)?;
    let encoding = Encoding::of(field).ok();
    let text = |i: usize| -> Result<Option<String>, ArrowError> {
        if column.is_null(i) {
            return Ok(None);
        }
        if let Some(encoding) = encoding {
            let values = Tensors { column, encoding }.get(i);
            match values {
                Ok(Some(values)) if values.len() > SHORT_LIST => return Ok(Some(glimpse(&values, encoding, field))),
                Ok(Some(values)) if encoding != Encoding::List => return Ok(Some(format!("{values:?}"))),
                _ => {}
            }
        }
        if binary(column.data_type()) {
            let hex = formatter.value(i).try_to_string()?;
            return Ok(Some(format!("<{} bytes>", hex.len() / 2)));
        }
        formatter.value(i).try_to_string().map(Some)
    };
    Ok(Some(Arc::new((0..column.len()).map(text).collect::<Result<StringArray, _>>()?)))
}

fn glimpse(values: &[f64], encoding: Encoding, field: &Field) -> String {
    let dtype = encoding.dtype().unwrap_or(match field.data_type() {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => match item.data_type() {
            DataType::Float16 => "f16",
            DataType::Float32 => "f32",
            _ => "f64",
        },
        _ => "",
    });
    let first: Vec<String> = values.iter().take(SHOWN).map(|v| format!("{v:.4}")).collect();
    format!("{dtype}[{}] {}, …", values.len(), first.join(", "))
}

/// Columns with names of their own: a JSON object would lose the second of two.
pub(crate) fn distinct(schema: &Schema) -> SchemaRef {
    let mut fields: Vec<Field> = Vec::new();
    for field in schema.fields() {
        let taken = |name: &str| fields.iter().any(|field| field.name() == name);
        let mut name = field.name().clone();
        let mut n = 2;
        while taken(&name) {
            name = format!("{}_{n}", field.name());
            n += 1;
        }
        fields.push(field.as_ref().clone().with_name(name));
    }
    Arc::new(Schema::new(fields))
}

/// A JSON array, one row a line.
#[derive(Debug, Default)]
struct Lines;

impl JsonFormat for Lines {
    fn start_stream<W: Write>(&self, out: &mut W) -> Result<(), ArrowError> {
        out.write_all(b"[").map_err(Into::into)
    }

    fn start_row<W: Write>(&self, out: &mut W, first: bool) -> Result<(), ArrowError> {
        out.write_all(if first { b"\n" } else { b",\n" }).map_err(Into::into)
    }

    fn end_stream<W: Write>(&self, out: &mut W) -> Result<(), ArrowError> {
        out.write_all(b"\n]\n").map_err(Into::into)
    }
}

//! What a table is made of: Parquet files, JSON Lines of stages that write no Parquet, or a few rows of the runner's own.

use std::collections::HashMap;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::json::reader::{ReaderBuilder, infer_json_schema};
use datafusion::catalog::TableProvider;
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::{ListingOptions, ListingTable, ListingTableConfig, ListingTableUrl};
use datafusion::datasource::{MemTable, ViewTable, provider_as_source};
use datafusion::logical_expr::LogicalPlanBuilder;
use fs_err::File;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use wildmatch::WildMatch;

use crate::error::{Error, Result};

/// A named table.
#[derive(Debug, Clone)]
pub struct TableSource {
    pub(crate) name: String,
    pub(crate) stage: Option<String>,
    origin: Origin,
}

#[derive(Debug, Clone)]
enum Origin {
    Files(Vec<PathBuf>),
    Rows(RecordBatch),
}

/// Type of a column of [`TableSource::rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// Text.
    Text,
    /// Whole number.
    Integer,
    /// Number.
    Float,
    /// Truth value.
    Boolean,
}

impl TableSource {
    /// A table in Parquet files, in path order. Without files, it has no rows and the columns its name implies; a name
    /// that implies none makes no table.
    pub fn files(name: impl Into<String>, mut files: Vec<PathBuf>) -> Self {
        files.sort();
        Self { name: name.into(), stage: None, origin: Origin::Files(files) }
    }

    /// A table in the files below `root` that match `glob`: `*` matches within a name, `**` any folders.
    pub fn glob(name: impl Into<String>, root: &Path, glob: &str) -> Result<Self> {
        let name = name.into();
        let parts: Vec<&str> = glob.split('/').filter(|part| !part.is_empty()).collect();
        let mut files = Vec::new();
        find(root, &parts, &mut files).map_err(|e| Error::bad_file(&name, root, format!("cannot be listed: {e}")))?;
        files.sort();
        files.dedup();
        Ok(Self::files(name, files))
    }

    /// A small table in memory: one JSON object a row; an absent or null value is null.
    pub fn rows(name: impl Into<String>, columns: &[(&str, Column)], rows: &[serde_json::Value]) -> Result<Self> {
        let name = name.into();
        let field = |(column, kind): &(&str, Column)| {
            let data_type = match kind {
                Column::Text => DataType::Utf8,
                Column::Integer => DataType::Int64,
                Column::Float => DataType::Float64,
                Column::Boolean => DataType::Boolean,
            };
            Field::new(*column, data_type, true)
        };
        let schema = Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()));
        let decode = || {
            let builder = arrow::json::ReaderBuilder::new(schema.clone()).with_batch_size(rows.len().max(1));
            let mut decoder = builder.build_decoder()?;
            decoder.serialize(rows)?;
            Ok(decoder.flush()?.unwrap_or_else(|| RecordBatch::new_empty(schema.clone())))
        };
        let batch = decode().map_err(|e: arrow::error::ArrowError| Error::Failed(format!("table `{name}`: {e}")))?;
        Ok(Self { name, stage: None, origin: Origin::Rows(batch) })
    }

    /// The same, under the name `stage.table`.
    #[must_use]
    pub fn of(mut self, stage: impl Into<String>) -> Self {
        self.stage = Some(stage.into());
        self
    }

    /// Name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The table for the engine; `None` if nothing tells its columns.
    pub(crate) fn provider(&self) -> Result<Option<Arc<dyn TableProvider>>> {
        let memory = |schema: SchemaRef, batches: Vec<RecordBatch>| {
            let table = MemTable::try_new(schema, vec![batches]).map_err(|e| Error::from_engine(&e))?;
            Ok(Some(Arc::new(table) as Arc<dyn TableProvider>))
        };
        match &self.origin {
            Origin::Rows(batch) => memory(batch.schema(), vec![batch.clone()]),
            Origin::Files(files) if files.is_empty() => {
                tables::schema::by_name(&self.name).map_or(Ok(None), |schema| memory(schema, Vec::new()))
            }
            Origin::Files(files) => {
                let (lines, parquet): (Vec<PathBuf>, Vec<PathBuf>) =
                    files.iter().cloned().partition(|path| path.extension().is_some_and(|ending| ending == "jsonl"));
                let read = |known| json_lines(&self.name, &lines, known);
                match (lines.is_empty(), parquet.is_empty()) {
                    (true, _) => listing(&self.name, &parquet).map(Some),
                    (false, true) => {
                        let (schema, batches) = read(tables::schema::by_name(&self.name))?;
                        memory(schema, batches)
                    }
                    (false, false) => {
                        let listing = listing(&self.name, &parquet)?;
                        let (schema, batches) = read(Some(listing.schema()))?;
                        let memory = MemTable::try_new(schema, vec![batches]).map_err(|e| Error::from_engine(&e))?;
                        union(&self.name, listing, Arc::new(memory)).map(Some)
                    }
                }
            }
        }
    }
}

fn find(folder: &Path, glob: &[&str], found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    let Some((&first, rest)) = glob.split_first() else { return Ok(()) };
    if first == "**" {
        find(folder, rest, found)?;
    }
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs_err::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if first == "**" {
            if path.is_dir() {
                find(&path, glob, found)?;
            }
        } else if WildMatch::new(first).matches(&entry.file_name().to_string_lossy()) {
            if rest.is_empty() && path.is_file() {
                found.push(path);
            } else if path.is_dir() {
                find(&path, rest, found)?;
            }
        }
    }
    Ok(())
}

fn listing(table: &str, files: &[PathBuf]) -> Result<Arc<dyn TableProvider>> {
    let mut merged: Option<(PathBuf, Schema)> = None;
    let mut urls = Vec::with_capacity(files.len());
    for path in files {
        let schema = schema_of(table, path)?;
        merged = Some(match merged {
            None => (path.clone(), schema),
            Some((first, known)) => {
                let schema = merge(&known, &schema)
                    .map_err(|detail| Error::bad_file(table, path, format!("{detail} in `{}`", first.display())))?;
                (first, schema)
            }
        });
        urls.push(url(path).map_err(|e| Error::bad_file(table, path, e.to_string()))?);
    }
    let schema = Arc::new(merged.map_or_else(Schema::empty, |(_, schema)| schema));
    let options = ListingOptions::new(Arc::new(ParquetFormat::default())).with_file_extension("");
    let config = ListingTableConfig::new_with_multi_paths(urls).with_listing_options(options).with_schema(schema);
    let listing = ListingTable::try_new(config).map_err(|e| Error::from_engine(&e))?;
    Ok(Arc::new(listing))
}

/// Small tables as text, read into memory; `known` are the columns that such a table has.
fn json_lines(table: &str, files: &[PathBuf], known: Option<SchemaRef>) -> Result<(SchemaRef, Vec<RecordBatch>)> {
    let open = |path: &PathBuf| File::open(path).map(BufReader::new);
    let mut schema = known;
    let mut batches = Vec::new();
    for path in files {
        let bad =
            |e: &dyn std::fmt::Display| Error::bad_file(table, path, format!("cannot be read as JSON Lines: {e}"));
        let columns = if let Some(schema) = &schema {
            Arc::clone(schema)
        } else {
            let (found, _) = infer_json_schema(open(path).map_err(|e| bad(&e))?, None).map_err(|e| bad(&e))?;
            Arc::clone(schema.insert(Arc::new(found)))
        };
        let reader = ReaderBuilder::new(columns).build(open(path).map_err(|e| bad(&e))?).map_err(|e| bad(&e))?;
        for batch in reader {
            batches.push(batch.map_err(|e| bad(&e))?);
        }
    }
    Ok((schema.unwrap_or_else(|| Arc::new(Schema::empty())), batches))
}

/// Two tables with the same columns as one.
fn union(name: &str, a: Arc<dyn TableProvider>, b: Arc<dyn TableProvider>) -> Result<Arc<dyn TableProvider>> {
    let scan = |table| LogicalPlanBuilder::scan(name, provider_as_source(table), None);
    let plan = || scan(a)?.union(scan(b)?.build()?)?.build();
    let plan = plan().map_err(|e| Error::from_engine(&e))?;
    Ok(Arc::new(ViewTable::new(plan, None)))
}

fn schema_of(table: &str, path: &Path) -> Result<Schema> {
    let file = File::open(path).map_err(|e| Error::bad_file(table, path, format!("cannot be opened: {e}")))?;
    let metadata = ArrowReaderMetadata::load(&file.into_parts().0, ArrowReaderOptions::default())
        .map_err(|e| Error::bad_file(table, path, format!("is truncated, damaged or not Parquet: {e}")))?;
    // What a file says of itself as a whole belongs to no table: the union of two would be at odds with it.
    Ok(metadata.schema().as_ref().clone().with_metadata(HashMap::new()))
}

/// Columns of both; a description of a column holds if both agree on it.
fn merge(known: &Schema, other: &Schema) -> Result<Schema, String> {
    let mut fields: Vec<Field> = known.fields().iter().map(|field| field.as_ref().clone()).collect();
    for field in other.fields() {
        let Some(same) = fields.iter_mut().find(|known| known.name() == field.name()) else {
            fields.push(field.as_ref().clone().with_nullable(true));
            continue;
        };
        if !same.data_type().equals_datatype(field.data_type()) {
            let (name, ours, theirs) = (field.name(), field.data_type(), same.data_type());
            return Err(format!("has column `{name}` of type `{ours}`, which is `{theirs}`"));
        }
        let both = |(key, value): &(&String, &String)| field.metadata().get(*key) == Some(value);
        let metadata: HashMap<_, _> =
            same.metadata().iter().filter(both).map(|(key, value)| (key.clone(), value.clone())).collect();
        same.set_metadata(metadata);
        same.set_nullable(same.is_nullable() || field.is_nullable());
    }
    let absent = |field: Field| {
        let nullable = field.is_nullable() || other.field_with_name(field.name()).is_err();
        field.with_nullable(nullable)
    };
    Ok(Schema::new(fields.into_iter().map(absent).collect::<Vec<_>>()))
}

/// `file://` URL: a plain path would be taken for a glob.
fn url(path: &Path) -> std::io::Result<ListingTableUrl> {
    let path = fs_err::canonicalize(path)?;
    let text = path.to_str().ok_or_else(|| std::io::Error::other("has a name that is not UTF-8"))?;
    let mut url = String::from("file://");
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"/-_.".contains(&byte);
        url += &if plain { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    }
    ListingTableUrl::parse(&url).map_err(std::io::Error::other)
}

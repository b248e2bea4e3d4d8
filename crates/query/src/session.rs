//! Plans and runs one query at a time over registered tables.

use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::json::ArrayWriter;
use datafusion::catalog::MemorySchemaProvider;
use datafusion::common::TableReference;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion::sql::parser::{DFParserBuilder, Statement};
use datafusion::sql::sqlparser::ast;
use futures::TryStreamExt;
use serde::de::DeserializeOwned;
use tables::TableWriter;
use tokio::runtime::Runtime;

use crate::error::{Error, Result};
use crate::render::{self, Renderer, distinct};
use crate::source::TableSource;
use crate::{Format, tensor};

/// Bytes that a query may hold; sorts and groupings that need more go on in temporary files.
const MEMORY: usize = 2 << 30;

/// Rows at a time: few, since a row may hold a picture.
const BATCH: usize = 1024;

/// Tables, ready to be asked.
pub struct Session {
    pub(crate) context: SessionContext,
    pub(crate) runtime: Runtime,
    /// Plain names.
    tables: BTreeSet<String>,
    /// Names with a stage: `bucket.held`.
    of_stages: BTreeSet<String>,
}

/// A column of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnInfo {
    /// Name.
    pub name: String,
    /// Arrow type, as the engine writes it.
    pub data_type: String,
    /// Whether it may be null.
    pub nullable: bool,
}

impl Session {
    /// Registers tables; of two with one name, the later wins. Not to be called from async code.
    pub fn new(tables: &[TableSource]) -> Result<Self> {
        Self::with_memory(tables, MEMORY)
    }

    /// The same, with another limit on what a query holds, in bytes.
    pub fn with_memory(tables: &[TableSource], memory: usize) -> Result<Self> {
        let engine = |e| Error::from_engine(&e);
        // One partition: rows come in file order and sums in row order, so that a query has one answer.
        let config =
            SessionConfig::new().with_target_partitions(1).with_information_schema(true).with_batch_size(BATCH);
        let pool = Arc::new(FairSpillPool::new(memory));
        let environment = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc().map_err(engine)?;
        let context = SessionContext::new_with_config_rt(config, environment);
        {
            let state = context.state_ref();
            let mut state = state.write();
            let parquet = &mut state.config_mut().options_mut().execution.parquet;
            parquet.schema_force_view_types = false;
            // A row's media and tensors are read only if the row is wanted.
            parquet.pushdown_filters = true;
        }
        for function in tensor::functions() {
            context.register_udf(function);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Error::Failed(format!("cannot start threads: {e}")))?;
        let mut session = Self { context, runtime, tables: BTreeSet::new(), of_stages: BTreeSet::new() };
        for table in tables {
            session.register(table)?;
        }
        Ok(session)
    }

    fn register(&mut self, table: &TableSource) -> Result<()> {
        let engine = |e| Error::from_engine(&e);
        let Some(provider) = table.provider()? else { return Ok(()) };
        let name = table.name.clone();
        let Some(stage) = &table.stage else {
            self.context.register_table(TableReference::bare(name.as_str()), provider).map_err(engine)?;
            self.tables.insert(name);
            return Ok(());
        };
        let catalog = self.context.catalog("datafusion").ok_or_else(|| Error::Failed("no catalog".to_owned()))?;
        if catalog.schema(stage).is_none() {
            catalog.register_schema(stage, Arc::new(MemorySchemaProvider::new())).map_err(engine)?;
        }
        self.context
            .register_table(TableReference::partial(stage.as_str(), name.as_str()), provider)
            .map_err(engine)?;
        self.of_stages.insert(format!("{stage}.{name}"));
        Ok(())
    }

    /// Names a query, so that it can be asked like a table.
    pub fn view(&mut self, name: &str, sql: &str) -> Result<()> {
        let engine = |e| Error::from_engine(&e);
        let view = self.runtime.block_on(self.context.sql(sql)).map_err(engine)?.into_view();
        self.context.register_table(TableReference::bare(name), view).map_err(engine)?;
        self.tables.insert(name.to_owned());
        Ok(())
    }

    /// Columns of a table, `TABLE` or `STAGE.TABLE`.
    pub fn columns(&self, table: &str) -> Result<Vec<ColumnInfo>> {
        let reference = match table.split_once('.') {
            _ if self.tables.contains(table) => TableReference::bare(table),
            Some((stage, name)) if self.of_stages.contains(table) => TableReference::partial(stage, name),
            _ => return Err(self.unknown(table)),
        };
        let provider = self.runtime.block_on(self.context.table_provider(reference));
        let schema = provider.map_err(|e| Error::from_engine(&e))?.schema();
        let column = |field: &arrow::datatypes::FieldRef| ColumnInfo {
            name: field.name().clone(),
            data_type: field.data_type().to_string(),
            nullable: field.is_nullable(),
        };
        Ok(schema.fields().iter().map(column).collect())
    }

    /// Tables that one stage wrote, as `stage.table`.
    pub fn tables_of_stages(&self) -> &BTreeSet<String> {
        &self.of_stages
    }

    /// Names of the tables that can be asked.
    pub fn tables(&self) -> &BTreeSet<String> {
        &self.tables
    }

    /// Answers a query on `out` row by row; returns the number of rows.
    pub fn run(&self, sql: &str, format: Format, out: &mut dyn Write) -> Result<u64> {
        self.runtime.block_on(self.answer(sql, format, out))
    }

    /// Answers a query into a file, which appears when it is whole; returns the number of rows.
    pub fn save(&self, sql: &str, format: Format, path: &Path) -> Result<u64> {
        if format == Format::Parquet {
            return self.runtime.block_on(self.save_parquet(sql, path));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let beside = path.with_file_name(format!(".{name}.{}", std::process::id()));
        let write = || {
            let mut out = BufWriter::new(fs_err::File::create(&beside).map_err(Error::Output)?);
            let rows = self.run(sql, format, &mut out)?;
            out.flush().and_then(|()| fs_err::rename(&beside, path)).map_err(Error::Output)?;
            Ok(rows)
        };
        write().inspect_err(|_| drop(fs_err::remove_file(&beside)))
    }

    async fn save_parquet(&self, sql: &str, path: &Path) -> Result<u64> {
        let (schema, mut stream) = self.ask(sql).await?;
        let schema = distinct(&schema);
        let failed = |e: tables::Error| Error::Output(std::io::Error::other(e.to_string()));
        let mut writer = TableWriter::create(path, schema.clone()).map_err(failed)?;
        while let Some(batch) = stream.try_next().await.map_err(|e| Error::from_engine(&e))? {
            let batch = RecordBatch::try_new(schema.clone(), batch.columns().to_vec()).map_err(render::failed)?;
            writer.write(&batch).map_err(failed)?;
        }
        Ok(writer.finish().map_err(failed)?.rows)
    }

    /// The answer as typed rows, for programs; all of them are held in memory. NaN and infinity read as null.
    pub fn rows<T: DeserializeOwned>(&self, sql: &str) -> Result<Vec<T>> {
        let mut json = ArrayWriter::new(Vec::new());
        for batch in &self.batches(sql)? {
            json.write(batch).map_err(|e| Error::Failed(e.to_string()))?;
        }
        json.finish().map_err(|e| Error::Failed(e.to_string()))?;
        let json = json.into_inner();
        let json = if json.is_empty() { b"[]".as_slice() } else { &json };
        serde_json::from_slice(json).map_err(|e| Error::Failed(e.to_string()))
    }

    /// The answer as Arrow batches; all of them are held in memory.
    pub fn batches(&self, sql: &str) -> Result<Vec<RecordBatch>> {
        self.runtime.block_on(async {
            let (_, stream) = self.ask(sql).await?;
            stream.try_collect().await.map_err(|e| Error::from_engine(&e))
        })
    }

    async fn answer(&self, sql: &str, format: Format, out: &mut dyn Write) -> Result<u64> {
        let (schema, mut stream) = self.ask(sql).await?;
        let mut renderer = Renderer::start(format, &schema, out)?;
        while let Some(batch) = stream.try_next().await.map_err(|e| Error::from_engine(&e))? {
            renderer.write(&batch)?;
        }
        renderer.finish()
    }

    /// Plans and starts a query that only reads.
    async fn ask(&self, sql: &str) -> Result<(SchemaRef, SendableRecordBatchStream)> {
        let engine = |e| Error::from_engine(&e);
        let statement = self.parse(sql)?;
        let plan = self.context.state().statement_to_plan(statement).await.map_err(engine)?;
        let read_only = SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
        read_only.verify_plan(&plan).map_err(engine)?;
        let frame = self.context.execute_logical_plan(plan).await.map_err(engine)?;
        let schema = Arc::new(frame.schema().as_arrow().clone());
        let stream = frame.execute_stream().await.map_err(engine)?;
        Ok((schema, stream))
    }

    /// The one statement, if it reads only and its tables exist.
    fn parse(&self, sql: &str) -> Result<Statement> {
        let engine = |e| Error::from_engine(&e);
        let mut statements = DFParserBuilder::new(sql).build().map_err(engine)?.parse_statements().map_err(engine)?;
        let statement = match (statements.pop_front(), statements.len()) {
            (None, _) => return Err(Error::Empty),
            (Some(statement), 0) => statement,
            (Some(_), more) => return Err(Error::Many(more + 1)),
        };
        let statement = match statement {
            // The engine's answer lists its own views as well.
            Statement::Statement(inner) if matches!(*inner, ast::Statement::ShowTables { .. }) => {
                let list = "select table_name from information_schema.tables where table_schema = 'public' order by 1";
                return self.parse(list);
            }
            other => other,
        };
        reads_only(&statement)?;
        self.know_tables(&statement)?;
        Ok(statement)
    }

    fn know_tables(&self, statement: &Statement) -> Result<()> {
        let references =
            self.context.state().resolve_table_references(statement).map_err(|e| Error::from_engine(&e))?;
        for reference in references {
            let name = match reference.schema() {
                None | Some("public") => reference.table().to_owned(),
                Some(schema) => format!("{schema}.{}", reference.table()),
            };
            let known = self.tables.contains(&name) || self.of_stages.contains(&name);
            if !known && reference.schema() != Some("information_schema") {
                return Err(self.unknown(&name));
            }
        }
        Ok(())
    }

    fn unknown(&self, name: &str) -> Error {
        let known = self.tables.iter().chain(&self.of_stages).map(String::as_str);
        let near =
            spec::suggest::nearest(name, known).map(|near| format!("did you mean `{near}`? ")).unwrap_or_default();
        let list = self.tables.iter().map(|table| format!("`{table}`")).collect::<Vec<_>>().join(", ");
        let help = if list.is_empty() { "this run has no tables yet".into() } else { format!("{near}tables: {list}") };
        Error::UnknownTable { name: name.to_owned(), help }
    }
}

/// Refuses everything that is not known to only read.
fn reads_only(statement: &Statement) -> Result<()> {
    match statement {
        Statement::Explain(explain) => reads_only(&explain.statement),
        Statement::Statement(inner) => match inner.as_ref() {
            ast::Statement::Query(_)
            | ast::Statement::ShowColumns { .. }
            | ast::Statement::ShowVariable { .. }
            | ast::Statement::ShowFunctions { .. }
            | ast::Statement::ExplainTable { .. } => Ok(()),
            ast::Statement::Explain { statement, .. } => reads_only(&Statement::Statement(statement.clone())),
            other => Err(refusal(&other.to_string())),
        },
        other => Err(refusal(&other.to_string())),
    }
}

fn refusal(statement: &str) -> Error {
    Error::ReadOnly(statement.split_whitespace().next().unwrap_or("it").to_lowercase())
}

/// Answers one query over `tables`; returns the number of rows.
pub fn run(tables: &[TableSource], sql: &str, format: Format, out: &mut dyn Write) -> Result<u64> {
    Session::new(tables)?.run(sql, format, out)
}

//! Plans and runs one query at a time over registered tables.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;

use datafusion::execution::context::SQLOptions;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion::sql::parser::{DFParserBuilder, Statement};
use datafusion::sql::sqlparser::ast;
use futures::TryStreamExt;
use tokio::runtime::Runtime;

use crate::error::{Error, Result};
use crate::render::Renderer;
use crate::source::TableSource;
use crate::{Format, tensor};

/// Tables, ready to be asked.
pub struct Session {
    context: SessionContext,
    runtime: Runtime,
    tables: BTreeSet<String>,
}

impl Session {
    /// Registers tables; of two with one name, the later wins. Not to be called from async code.
    pub fn new(tables: &[TableSource]) -> Result<Self> {
        // One partition: rows come in file order and sums in row order, so that a query has one answer.
        let config = SessionConfig::new().with_target_partitions(1).with_information_schema(true);
        let environment = RuntimeEnvBuilder::new().build_arc().map_err(|e| Error::from_engine(&e))?;
        let context = SessionContext::new_with_config_rt(config, environment);
        context.state_ref().write().config_mut().options_mut().execution.parquet.schema_force_view_types = false;
        for function in tensor::functions() {
            context.register_udf(function);
        }
        let mut names = BTreeSet::new();
        for table in tables {
            if let Some(provider) = table.provider()? {
                let reference = datafusion::common::TableReference::bare(table.name.as_str());
                context.register_table(reference, provider).map_err(|e| Error::from_engine(&e))?;
                names.insert(table.name.clone());
            }
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Error::Failed(format!("cannot start threads: {e}")))?;
        Ok(Self { context, runtime, tables: names })
    }

    /// Names of the tables that can be asked.
    pub fn tables(&self) -> &BTreeSet<String> {
        &self.tables
    }

    /// Answers a query on `out`, streaming except for [`Format::Table`]; returns the number of rows.
    pub fn run(&self, sql: &str, format: Format, out: &mut dyn Write) -> Result<u64> {
        self.runtime.block_on(self.answer(sql, format, out))
    }

    async fn answer(&self, sql: &str, format: Format, out: &mut dyn Write) -> Result<u64> {
        let engine = |e| Error::from_engine(&e);
        let statement = self.parse(sql)?;
        let plan = self.context.state().statement_to_plan(statement).await.map_err(engine)?;
        let read_only = SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
        read_only.verify_plan(&plan).map_err(engine)?;
        let frame = self.context.execute_logical_plan(plan).await.map_err(engine)?;
        let schema = Arc::new(frame.schema().as_arrow().clone());
        let mut stream = frame.execute_stream().await.map_err(engine)?;
        let mut renderer = Renderer::start(format, &schema, out)?;
        while let Some(batch) = stream.try_next().await.map_err(engine)? {
            renderer.write(&batch)?;
        }
        renderer.finish()
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
            let ours = reference.schema().is_none_or(|schema| schema == "public");
            if ours && !self.tables.contains(reference.table()) {
                let name = reference.table().to_owned();
                let near = spec::suggest::nearest(&name, self.tables.iter().map(String::as_str));
                let near = near.map(|near| format!("did you mean `{near}`? ")).unwrap_or_default();
                let list = self.tables.iter().map(|table| format!("`{table}`")).collect::<Vec<_>>().join(", ");
                let help =
                    if list.is_empty() { "this run has no tables yet".into() } else { format!("{near}tables: {list}") };
                return Err(Error::UnknownTable { name, help });
            }
        }
        Ok(())
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

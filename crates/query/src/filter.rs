//! A condition on a table's rows, such as a recipe holds: one expression that is true or false by the row alone.

use arrow::array::AsArray;
use arrow::datatypes::DataType;
use datafusion::common::tree_node::TreeNode;
use datafusion::logical_expr::{Expr, ExprSchemable, Volatility};

use crate::Session;
use crate::error::{Error, Result};

impl Session {
    /// Values of the text column `name` in the rows of `table` for which `condition` is true; not those for which it is
    /// null. A condition in which the clock or chance has a say is refused: its answer would not be the rows' own.
    pub fn names_where(&self, table: &str, name: &str, condition: &str) -> Result<Vec<String>> {
        let engine = |e| Error::from_engine(&e);
        let frame = self.runtime.block_on(self.context.table(table)).map_err(engine)?;
        let condition = self.context.parse_sql_expr(condition, frame.schema()).map_err(engine)?;
        let found = condition.get_type(frame.schema()).map_err(engine)?;
        if found != DataType::Boolean {
            return Err(Error::Failed(format!("the condition is of type {found}; it must be true or false")));
        }
        let moody = |expr: &Expr| match expr {
            Expr::ScalarFunction(call) => Ok(call.func.signature().volatility != Volatility::Immutable),
            _ => Ok(false),
        };
        if condition.exists(moody).map_err(engine)? {
            let text = "the condition asks the clock or chance; the same rows would not always be kept";
            return Err(Error::Failed(text.to_owned()));
        }
        let frame = frame.filter(condition).and_then(|frame| frame.select_columns(&[name])).map_err(engine)?;
        let batches = self.runtime.block_on(frame.collect()).map_err(engine)?;
        let texts = batches.iter().flat_map(|batch| batch.column(0).as_string::<i32>().iter().flatten());
        Ok(texts.map(str::to_owned).collect())
    }
}

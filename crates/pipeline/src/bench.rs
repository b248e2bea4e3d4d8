//! `pipeline bench`: a run, then its numbers against the bounds of the recipe.

use serde_json::{Map, Value, json};
use spec::{Bound, Mistake};
use stage::Exit;

use crate::database::{self, failed};
use crate::error::{Error, Result, say};
use crate::execute;
use crate::selection::Selection;
use crate::show::current;
use crate::workspace::Workspace;

/// Runs what is not cached, then asks each query; fails if a number is out of its bounds.
pub(crate) fn run(workspace: &Workspace, selection: &Selection, json: bool) -> Result<()> {
    let bounds = &workspace.recipe.bounds;
    if bounds.is_empty() {
        let path = workspace.recipe.path.display();
        let mistake = Mistake::new(format!("`{path}` has no `[bench.NAME]` tables"))
            .help("add one with a `query` and `at_least` or `at_most`, or use `pipeline run`");
        return Err(Error::new(Exit::Recipe, mistake));
    }
    execute::run(workspace, selection, json)?;
    let session = database::open(workspace, &current(workspace)?)?;
    let width = bounds.keys().map(String::len).max().unwrap_or(0);
    let mut missed = Vec::new();
    for (name, bound) in bounds {
        let rows: Vec<Map<String, Value>> = session.rows(&bound.query).map_err(failed)?;
        let number = number(name, &rows)?;
        let holds = bound.holds(number);
        if !holds {
            missed.push(format!("`{name}` is {number:.4}, not {}", bound.words()));
        }
        say(&mut std::io::stdout(), &line(name, bound, number, json, width));
    }
    if missed.is_empty() {
        return Ok(());
    }
    let help = "the queries are in the recipe's `[bench]` tables; `pipeline sql` takes them, too";
    Err(Error::new(Exit::Missed, Mistake::new(missed.join("; ")).help(help)))
}

fn line(name: &str, bound: &Bound, number: f64, json: bool, width: usize) -> String {
    if json {
        let Bound { at_least, at_most, .. } = bound;
        let good = bound.holds(number);
        let event = json!({"event": "bench", "name": name, "number": number, "at_least": at_least, "at_most": at_most, "good": good});
        return format!("{event}\n");
    }
    let verdict = if bound.holds(number) { "good" } else { "MISSED" };
    format!("{name:width$}  {number:10.4}  {}  {verdict}\n", bound.words())
}

/// The one number of an answer.
fn number(name: &str, rows: &[Map<String, Value>]) -> Result<f64> {
    let wrong = |found: String| {
        let mistake = Mistake::new(format!("the query of `bench.{name}` gave {found}, not one number"));
        Error::new(Exit::Recipe, mistake.help("select one row with one column of numbers"))
    };
    match rows {
        [row] if row.len() == 1 => {
            let value = row.values().next().unwrap_or(&Value::Null);
            value.as_f64().ok_or_else(|| wrong(format!("`{value}`")))
        }
        // A column that is null is left out of its row.
        [row] if row.is_empty() => Err(wrong("null".to_owned())),
        [row] => Err(wrong(format!("{} columns", row.len()))),
        _ => Err(wrong(format!("{} rows", rows.len()))),
    }
}

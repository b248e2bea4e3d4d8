//! Bounds: numbers that a run must reach, in `[bench.NAME]` tables of its recipe.

use serde::Deserialize;
use serde_json::Value;

use crate::Problem;

/// A number that a query gives over the tables of a run, and where it must lie.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bound {
    /// SQL with an answer of one row and one column.
    pub query: String,
    /// Least number that is good.
    #[serde(default)]
    pub at_least: Option<f64>,
    /// Greatest number that is good.
    #[serde(default)]
    pub at_most: Option<f64>,
}

impl Bound {
    /// Reads a `[bench.NAME]` table.
    pub fn read(table: &Value) -> Result<Self, Problem> {
        let help = "write `query = \"select …\"` with `at_least`, `at_most` or both";
        let bound: Self = serde_json::from_value(table.clone())
            .map_err(|error| Problem::new(format!("not a bound: {error}")).help(help))?;
        match (bound.at_least, bound.at_most) {
            (None, None) => Err(Problem::new("this bound holds for every number").help(help)),
            (Some(least), Some(most)) if least > most => {
                Err(Problem::new(format!("no number is at least {least} and at most {most}")).help("swap them"))
            }
            _ => Ok(bound),
        }
    }

    /// Whether a number is good. Not a number never is.
    pub fn holds(&self, number: f64) -> bool {
        self.at_least.is_none_or(|least| number >= least) && self.at_most.is_none_or(|most| number <= most)
    }

    /// In words, such as `at least 0.2`.
    pub fn words(&self) -> String {
        let least = self.at_least.map(|least| format!("at least {least}"));
        let most = self.at_most.map(|most| format!("at most {most}"));
        least.into_iter().chain(most).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bounds_include_their_ends_and_refuse_nan() {
        let bound = Bound::read(&json!({"query": "select 1", "at_least": 0.5, "at_most": 2})).unwrap();
        for (number, good) in [(0.5, true), (2.0, true), (0.49, false), (2.01, false), (f64::NAN, false)] {
            assert_eq!(bound.holds(number), good, "{number}");
        }
        assert_eq!(bound.words(), "at least 0.5, at most 2");
        assert!(!Bound { at_most: None, ..bound }.holds(f64::NAN));
    }

    #[test]
    fn bounds_that_say_nothing_or_too_much_are_refused() {
        for (table, part) in [
            (json!({"query": "select 1"}), "holds for every number"),
            (json!({"query": "select 1", "at_least": 2, "at_most": 1}), "no number is at least 2"),
            (json!({"at_least": 2}), "missing field `query`"),
            (json!({"query": "select 1", "atleast": 2}), "unknown field `atleast`"),
            (json!(3), "not a bound"),
        ] {
            let problem = Bound::read(&table).unwrap_err();
            assert!(problem.message.contains(part) && problem.help.is_some(), "{table}: {problem:?}");
        }
    }
}

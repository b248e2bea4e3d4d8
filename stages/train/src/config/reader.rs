//! Reads one mapping of a training recipe strictly: every key is taken, answered or reported.
//!
//! Mistakes and notes are collected in a [`Report`], with the place of the value: a field of the recipe's table, or a
//! line of the YAML file.

use std::cell::RefCell;

use serde_json::{Map, Value};
use spec::{Problem, suggest};

use super::source::Origin;

/// What reading found, and where values came from.
pub(crate) struct Report {
    origin: Origin,
    problems: RefCell<Vec<Problem>>,
    notes: RefCell<Vec<String>>,
}

impl Report {
    pub(crate) fn new(origin: Origin) -> Self {
        Self { origin, problems: RefCell::default(), notes: RefCell::default() }
    }

    /// A mistake at dotted `path`.
    pub(crate) fn problem(&self, path: &str, problem: Problem) {
        self.problems.borrow_mut().push(self.origin.place(path, problem));
    }

    /// One line for a person: accepted, but without effect or not quite as written.
    pub(crate) fn note(&self, note: String) {
        self.notes.borrow_mut().push(note);
    }

    pub(crate) fn finish(self) -> (Vec<Problem>, Vec<String>, Origin) {
        (self.problems.into_inner(), self.notes.into_inner(), self.origin)
    }
}

/// One mapping, with the keys asked for so far.
pub(crate) struct Block<'r> {
    report: &'r Report,
    path: String,
    values: Map<String, Value>,
    known: Vec<&'static str>,
}

impl<'r> Block<'r> {
    /// The whole recipe.
    pub(crate) fn root(report: &'r Report, values: Map<String, Value>) -> Self {
        Self { report, path: String::new(), values, known: Vec::new() }
    }

    /// Dotted path of `key`.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Adds a mistake about `key`.
    pub(crate) fn problem(&self, key: &str, problem: Problem) {
        self.report.problem(&self.path(key), problem);
    }

    /// Adds `path: why`.
    pub(crate) fn note(&self, key: &str, why: impl std::fmt::Display) {
        let path = self.path(key);
        // What nobody wrote needs no answer.
        if self.report.origin.is_written(&path) {
            self.report.note(format!("{path}: {why}"));
        }
    }

    /// The value of `key`, taken; `null` counts as absent.
    pub(crate) fn take(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        self.values.remove(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there and not `null`; does not take it.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|value| !value.is_null())
    }

    /// Whether `key` was written as `null`.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(Value::is_null)
    }

    fn typed<T>(&mut self, key: &'static str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let value = self.take(key)?;
        let read = read(&value);
        if read.is_none() {
            self.problem(key, Problem::new(format!("`{}` is {}, expected {expected}", self.path(key), shown(&value))));
        }
        read
    }

    pub(crate) fn number(&mut self, key: &'static str) -> Option<f64> {
        self.typed(key, "a number", number)
    }

    pub(crate) fn count(&mut self, key: &'static str) -> Option<u64> {
        self.typed(key, "a whole number, 0 or more", count)
    }

    /// A whole number above 0.
    pub(crate) fn positive(&mut self, key: &'static str) -> Option<u64> {
        self.typed(key, "a whole number above 0", |v| count(v).filter(|n| *n > 0))
    }

    pub(crate) fn flag(&mut self, key: &'static str) -> Option<bool> {
        self.typed(key, "`true` or `false`", flag)
    }

    pub(crate) fn text(&mut self, key: &'static str) -> Option<String> {
        self.typed(key, "a text", |v| v.as_str().map(str::to_owned))
    }

    pub(crate) fn numbers(&mut self, key: &'static str) -> Option<Vec<f64>> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(number).collect())
    }

    /// A list of texts; one text stands for a list of one.
    pub(crate) fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        self.typed(key, "a list of texts", |v| match v {
            Value::String(one) => Some(vec![one.clone()]),
            Value::Array(many) => many.iter().map(|t| t.as_str().map(str::to_owned)).collect(),
            _ => None,
        })
    }

    /// One of `names`; anything else is a mistake with the nearest name.
    pub(crate) fn name(&mut self, key: &'static str, names: &[&'static str]) -> Option<&'static str> {
        let given = self.text(key)?;
        let found = names.iter().copied().find(|name| *name == given);
        if found.is_none() {
            let message = format!("`{}` is `{given}`, which is no known name", self.path(key));
            self.problem(key, Problem::new(message).help(suggest::help(&given, names.iter().copied())));
        }
        found
    }

    /// The mapping under `key`, if it is there.
    pub(crate) fn block(&mut self, key: &'static str) -> Option<Block<'r>> {
        let values = self.typed(key, "a table", |v| v.as_object().cloned())?;
        Some(Block { report: self.report, path: self.path(key), values, known: Vec::new() })
    }

    /// As [`Block::block`], empty if it is not there.
    pub(crate) fn block_or_empty(&mut self, key: &'static str) -> Block<'r> {
        let path = self.path(key);
        self.block(key).unwrap_or(Block { report: self.report, path, values: Map::new(), known: Vec::new() })
    }

    /// Keys that change nothing here: one note each, unless the value is what happens anyway (`usual`).
    pub(crate) fn without_effect(&mut self, key: &'static str, usual: &[Value], why: &str) {
        if let Some(value) = self.take(key)
            && !usual.iter().any(|usual| same(usual, &value))
        {
            self.note(key, format_args!("{}: {why}", shown(&value)));
        }
    }

    /// A key that would change the result and is not implemented: any value but `allowed` is a mistake.
    pub(crate) fn refused(&mut self, key: &'static str, allowed: &[Value], why: &str) {
        if let Some(value) = self.take(key)
            && !allowed.iter().any(|allowed| same(allowed, &value))
        {
            let message = format!("`{}: {}` is not supported: {why}", self.path(key), shown(&value));
            self.problem(key, Problem::new(message).help("remove the key"));
        }
    }

    /// Takes whatever is left, unread; for blocks of other programs.
    pub(crate) fn rest(&mut self) -> Map<String, Value> {
        std::mem::take(&mut self.values)
    }

    /// What is left is unknown.
    pub(crate) fn finish(self) {
        for key in self.values.keys() {
            let place = if self.path.is_empty() { String::new() } else { format!(" in `{}`", self.path) };
            let help = suggest::help(key, self.known.iter().copied());
            self.report.problem(&self.path(key), Problem::new(format!("unknown key `{key}`{place}")).help(help));
        }
    }
}

fn number(value: &Value) -> Option<f64> {
    // A YAML 1.1 reader takes `1e-6` for a text, so people quote it.
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()).filter(|n: &f64| n.is_finite())
}

fn count(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..9e15).contains(n)).map(|n| n as u64))
}

fn flag(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        // YAML 1.1 words.
        Value::String(word) => match word.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b)
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => format!("`{text}`"),
        other => other.to_string(),
    }
}

//! A user's mistake, as data: what is wrong, where, and what to do.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One thing wrong in what the user wrote or gave. Problems are collected, not thrown one by one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    /// Lower-case sentence fragment with names and values in backticks, no full stop.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// Dotted path of the value inside the stage's table, such as `step_scheduler.max_steps`; the runner finds its line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// File the mistake is in, when it is not the recipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Line in `file`, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
}

impl Problem {
    /// A problem with a message only.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::default() }
    }

    /// Adds what to do.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds the field.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// Adds a place in a file.
    #[must_use]
    pub fn at(mut self, file: impl Into<PathBuf>, line: Option<usize>) -> Self {
        self.file = Some(file.into());
        self.line = line;
        self
    }
}

//! A [`Problem`] with its place found: what `miette` renders with file, line and a labelled snippet.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use miette::{Diagnostic, LabeledSpan, NamedSource, SourceCode};
use thiserror::Error;

use crate::Problem;

/// A piece of text that a user wrote: a file, or one `--set` argument.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    /// Path as the user named it, or `--set`.
    pub(crate) name: String,
    pub(crate) text: Arc<str>,
}

impl Origin {
    pub(crate) fn new(name: impl Into<String>, text: &str) -> Self {
        Self { name: name.into(), text: Arc::from(text) }
    }

    /// Line of a byte offset, from 1.
    fn line(&self, offset: usize) -> usize {
        self.text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
    }
}

/// One thing wrong, placed.
#[derive(Debug, Clone, Error)]
#[error("{message}")]
pub struct Mistake {
    /// Lower-case sentence fragment.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
    place: Option<Spot>,
}

/// A labelled stretch of text.
#[derive(Debug, Clone)]
struct Spot {
    origin: Origin,
    source: NamedSource<Arc<str>>,
    span: Range<usize>,
    label: String,
}

impl Mistake {
    /// A mistake without a place.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), help: None, place: None }
    }

    /// Adds what to do.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    #[must_use]
    pub(crate) fn at(mut self, origin: &Origin, span: Range<usize>, label: impl Into<String>) -> Self {
        // An empty span is not drawn.
        let span = span.start..span.end.max(span.start + 1).min(origin.text.len().max(1));
        let source = NamedSource::new(&origin.name, Arc::clone(&origin.text));
        self.place = Some(Spot { origin: origin.clone(), source, span, label: label.into() });
        self
    }

    /// Where it is: (file or `--set`, line from 1).
    pub fn line(&self) -> Option<(&str, usize)> {
        self.place.as_ref().map(|spot| (spot.origin.name.as_str(), spot.origin.line(spot.span.start)))
    }

    /// A problem in a file that is neither the recipe nor the graph: the line is shown if the file can be read.
    pub(crate) fn in_file(problem: &Problem, file: &Path) -> Self {
        let name = file.display().to_string();
        let mut mistake = Self { message: problem.message.clone(), help: problem.help.clone(), place: None };
        let snippet = problem.line.and_then(|line| {
            let text = fs_err::read_to_string(file).ok()?;
            let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
            let end = start + text.get(start..)?.lines().next()?.len();
            let indent = text.get(start..end)?.len() - text.get(start..end)?.trim_start().len();
            Some((Origin::new(&name, &text), start + indent..end))
        });
        if let Some((origin, span)) = snippet {
            return mistake.at(&origin, span, "here");
        }
        let line = problem.line.map(|line| format!(":{line}")).unwrap_or_default();
        mistake.message = format!("{} (in `{name}{line}`)", mistake.message);
        mistake
    }
}

impl From<Problem> for Mistake {
    fn from(problem: Problem) -> Self {
        match &problem.file {
            Some(file) => Self::in_file(&problem, file),
            None => Self { message: problem.message, help: problem.help, place: None },
        }
    }
}

impl Diagnostic for Mistake {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.place.as_ref().map(|spot| &spot.source as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.place.as_ref().map(|spot| {
            let label = LabeledSpan::at(spot.span.clone(), &spot.label);
            Box::new(std::iter::once(label)) as Box<dyn Iterator<Item = LabeledSpan>>
        })
    }
}

/// All that is wrong, in reading order; never empty.
#[derive(Debug, Clone)]
pub struct Mistakes(pub Vec<Mistake>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for Mistakes {}

impl From<Mistake> for Mistakes {
    fn from(mistake: Mistake) -> Self {
        Self(vec![mistake])
    }
}

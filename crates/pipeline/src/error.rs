//! How the runner fails: all that is wrong, placed, and one exit code.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};

use miette::{GraphicalReportHandler, GraphicalTheme};
use serde_json::json;
use spec::{Mistake, Mistakes};
use stage::Exit;

/// A failed command.
#[derive(Debug)]
pub(crate) struct Error {
    pub(crate) exit: Exit,
    pub(crate) mistakes: Vec<Mistake>,
    /// Last lines of a stage's log, shown below the report.
    pub(crate) log_tail: Option<(String, Vec<String>)>,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(exit: Exit, mistake: Mistake) -> Self {
        Self { exit, mistakes: vec![mistake], log_tail: None }
    }

    pub(crate) fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(Exit::Usage, Mistake::new(message).help(help))
    }

    /// Any diagnostic, with its help.
    pub(crate) fn from_diagnostic(exit: Exit, error: &dyn miette::Diagnostic) -> Self {
        let mistake = Mistake::new(error.to_string());
        Self::new(
            exit,
            match error.help() {
                Some(help) => mistake.help(help.to_string()),
                None => mistake,
            },
        )
    }

    /// Prints the report: for people on standard error, as JSON lines on standard output.
    pub(crate) fn print(&self, json: bool) {
        if json {
            for mistake in &self.mistakes {
                let place = mistake.line().map(|(file, line)| format!("{file}:{line}"));
                let line = json!({
                    "event": "error", "exit": self.exit.code(), "message": mistake.message, "help": mistake.help, "place": place,
                });
                say(&mut std::io::stdout(), &format!("{line}\n"));
            }
            return;
        }
        say(&mut std::io::stderr(), &self.text(std::io::stderr().is_terminal()));
    }

    /// The report for people.
    pub(crate) fn text(&self, terminal: bool) -> String {
        let plain = !terminal || std::env::var_os("NO_COLOR").is_some();
        let theme = if plain { GraphicalTheme::unicode_nocolor() } else { GraphicalTheme::unicode() };
        let handler = GraphicalReportHandler::new_themed(theme).with_width(110).with_links(false);
        let mut text = String::new();
        for mistake in &self.mistakes {
            let mut report = String::new();
            if handler.render_report(&mut report, mistake).is_err() {
                report = format!("{mistake}\n");
            }
            text.push_str(report.trim_start_matches('\n'));
        }
        if let Some((path, lines)) = &self.log_tail {
            let _ = writeln!(text, "  last lines of {path}:");
            for line in lines {
                let _ = writeln!(text, "    {line}");
            }
        }
        text
    }
}

/// Writes to a stream of the user's; one that is closed cannot be complained to.
pub(crate) fn say(out: &mut dyn Write, text: &str) {
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

impl From<Mistakes> for Error {
    fn from(mistakes: Mistakes) -> Self {
        Self { exit: Exit::Recipe, mistakes: mistakes.0, log_tail: None }
    }
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        let exit = match &error {
            store::Error::Io(_) => Exit::Io,
            store::Error::Format { .. } => Exit::Usage,
            store::Error::Missing { .. } | store::Error::Empty { .. } | store::Error::Name { .. } => Exit::Input,
            store::Error::Unpublishable { .. } | store::Error::Digest(_) => Exit::Failed,
        };
        match &error {
            store::Error::Io(io) => Self::from(std::io::Error::new(io.kind(), io.to_string())),
            _ => Self::from_diagnostic(exit, &error),
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        let mistake = Mistake::new(error.to_string());
        Self::new(
            Exit::Io,
            match error.kind() {
                StorageFull | QuotaExceeded => mistake
                    .help("free some space, or choose another disk with `--cache DIR`; what was finished is kept"),
                PermissionDenied | ReadOnlyFilesystem => {
                    mistake.help("choose another folder with `--cache DIR` or `--runs DIR`")
                }
                _ => mistake,
            },
        )
    }
}

//! The SQL prompt: lines with history and completion, statements that end with `;`. Knows nothing of what they ask.

use std::path::{Path, PathBuf};

use dialoguer::theme::SimpleTheme;
use dialoguer::{Completion, History, Input};
use query::{Format, Session};
use stage::Exit;

use crate::error::{Error, Result, say};
use crate::sql::answer_aloud;

/// Lines of history that are kept.
const REMEMBERED: usize = 1000;

const KEYWORDS: &[&str] = &[
    "select",
    "from",
    "where",
    "group by",
    "order by",
    "limit",
    "join",
    "left join",
    "using",
    "count(*)",
    "avg",
    "sum",
    "min",
    "max",
    "distinct",
    "having",
    "desc",
    "tensor_mean",
    "tensor_std",
    "tensor_norm",
    "tensor_min",
    "tensor_max",
    "has_nan",
    "cosine",
];

/// Asks and answers until the user leaves.
pub(crate) fn talk(session: &Session, format: Format, history: &Path) -> Result<()> {
    let mut words: Vec<String> = KEYWORDS.iter().map(|word| (*word).to_owned()).collect();
    for table in session.tables() {
        words.push(table.clone());
        words.extend(session.columns(table).into_iter().flatten().map(|column| column.name));
    }
    let words = Words(words);
    let mut lines = Lines::open(history);
    say(&mut std::io::stderr(), "\\d lists the tables, \\? helps, \\q leaves; the right arrow completes a word\n");
    let mut open = String::new();
    loop {
        let prompt = if open.is_empty() { "sql" } else { "  …" };
        let line: String = Input::with_theme(&SimpleTheme)
            .with_prompt(prompt)
            .allow_empty(true)
            .history_with(&mut lines)
            .completion_with(&words)
            .interact_text()
            .map_err(|error| Error::new(Exit::Interrupted, spec::Mistake::new(format!("the prompt: {error}"))))?;
        open += &line;
        open.push('\n');
        let text = open.trim();
        if matches!(text.trim_end_matches(';'), "\\q" | "\\quit" | "quit" | "exit") {
            return Ok(());
        }
        if text.is_empty() || text.starts_with('\\') || text.ends_with(';') {
            for statement in statements(text) {
                answer_aloud(session, &statement, format);
            }
            open.clear();
        }
    }
}

/// Lines that were typed, newest last, in a file.
struct Lines {
    path: PathBuf,
    lines: Vec<String>,
}

impl Lines {
    /// A history that cannot be read is an empty one.
    fn open(path: &Path) -> Self {
        let text = fs_err::read_to_string(path).unwrap_or_default();
        Self { path: path.to_owned(), lines: text.lines().map(str::to_owned).collect() }
    }
}

impl<T: ToString> History<T> for Lines {
    fn read(&self, back: usize) -> Option<String> {
        self.lines.iter().rev().nth(back).cloned()
    }

    fn write(&mut self, line: &T) {
        let line = line.to_string();
        if line.trim().is_empty() || self.lines.last() == Some(&line) {
            return;
        }
        self.lines.push(line);
        let kept = &self.lines[self.lines.len().saturating_sub(REMEMBERED)..];
        // A history that cannot be kept is no reason to stop.
        let _ = fs_err::write(&self.path, kept.join("\n") + "\n");
    }
}

/// Completes the last word if only one fits.
struct Words(Vec<String>);

impl Completion for Words {
    fn get(&self, input: &str) -> Option<String> {
        let at = input.rfind(|c: char| !c.is_alphanumeric() && c != '_');
        let start = at.map_or(0, |at| at + input[at..].chars().next().map_or(1, char::len_utf8));
        let begun = input[start..].to_lowercase();
        let mut fits = self.0.iter().filter(|word| !begun.is_empty() && word.starts_with(&begun));
        let word = fits.next()?;
        fits.all(|other| other == word).then(|| format!("{}{word}", &input[..start]))
    }
}

/// Cuts a text at each `;` that is not inside quotes or a comment; a line that begins with `\` is one statement.
pub(crate) fn statements(text: &str) -> Vec<String> {
    let mut statements = Vec::new();
    let mut open = String::new();
    let mut quote = None;
    for line in text.lines() {
        if quote.is_none() && open.trim().is_empty() && line.trim_start().starts_with('\\') {
            statements.push(line.trim().to_owned());
            open.clear();
            continue;
        }
        let mut letters = line.chars().peekable();
        while let Some(letter) = letters.next() {
            match (quote, letter) {
                (Some(end), _) if letter == end => quote = None,
                (None, '\'' | '"') => quote = Some(letter),
                (None, '-') if letters.peek() == Some(&'-') => break,
                (None, ';') => {
                    statements.push(std::mem::take(&mut open).trim().to_owned());
                    continue;
                }
                _ => {}
            }
            open.push(letter);
        }
        open.push('\n');
    }
    statements.push(open.trim().to_owned());
    statements.retain(|statement| !statement.is_empty());
    statements
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_end_at_semicolons_outside_of_quotes_and_comments() {
        let text = "\\d samples\nselect ';' -- not; here\n from t;select \"a;b\" from u;\n\n;\nselect 1";
        assert_eq!(statements(text), ["\\d samples", "select ';' \n from t", "select \"a;b\" from u", "select 1"]);
        assert!(statements(" \n;").is_empty());
    }

    #[test]
    fn the_last_word_is_completed_if_only_one_fits() {
        let words = Words(["samples", "sample_id", "losses", "losses"].map(str::to_owned).to_vec());
        assert_eq!(words.get("select * from loss").as_deref(), Some("select * from losses"));
        assert_eq!(words.get("select * from sam"), None);
        assert_eq!(words.get("select * from samples").as_deref(), Some("select * from samples"));
        assert_eq!(words.get("select "), None);
    }

    #[test]
    fn typed_lines_are_remembered_from_one_prompt_to_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history");
        let mut lines = Lines::open(&path);
        for line in ["one;", "", "two;", "two;"] {
            lines.write(&line.to_owned());
        }
        let again = Lines::open(&path);
        let read = |back| <Lines as History<String>>::read(&again, back);
        assert_eq!([read(0), read(1), read(2)], [Some("two;".to_owned()), Some("one;".to_owned()), None]);
    }
}

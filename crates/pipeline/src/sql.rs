//! `pipeline sql`: one query on the command line, a script on standard input, or a prompt.

use std::fmt::Write as _;
use std::io::{IsTerminal, Read};
use std::path::Path;
use std::time::Instant;

use query::{Format, Session};

use crate::clock::told;
use crate::database::{self, failed};
use crate::error::{Error, Result, say};
use crate::prompt;
use crate::show::current;
use crate::workspace::Workspace;

/// What is asked, and where the answer goes.
pub(crate) struct Question<'a> {
    pub(crate) query: Option<&'a str>,
    /// As typed.
    pub(crate) format: Option<&'a str>,
    pub(crate) output: Option<&'a Path>,
}

const HELP: &str = "\
\\d          tables           \\d TABLE   columns of a table
\\q          leave            \\?         this help
A statement ends with `;` and may span lines. STAGE.TABLE is what one stage wrote.
";

/// Answers on standard output or into a file.
pub(crate) fn print(workspace: &Workspace, question: &Question<'_>) -> Result<()> {
    let format = match (question.format, question.output) {
        (Some(name), _) => name.parse().map_err(failed)?,
        (None, Some(path)) => Format::of_path(path).ok_or_else(|| {
            Error::usage(
                format!("the format of `{}` is not known by its ending", path.display()),
                "add `--format`, or end it with .csv, .json, .jsonl or .parquet",
            )
        })?,
        (None, None) => Format::Table,
    };
    if format == Format::Parquet && question.output.is_none() {
        return Err(failed(query::Error::ParquetNeedsFile));
    }
    let stages = current(workspace)?;
    let older: Vec<String> = stages
        .iter()
        .filter(|stage| stage.artifact.is_some() && !stage.fresh)
        .map(|stage| format!("`{}`", stage.stage))
        .collect();
    if !older.is_empty() {
        let (is, another) = if older.len() == 1 { ("is", "another") } else { ("are", "others") };
        let text = format!("note: {} {is} of an earlier run; the recipe now asks for {another}\n", older.join(", "));
        say(&mut std::io::stderr(), &text);
    }
    let session = database::open(workspace, &stages)?;
    match (question.query, question.output) {
        (Some(query), Some(path)) => {
            let rows = session.save(query, format, path).map_err(failed)?;
            say(&mut std::io::stderr(), &format!("{rows} rows in {}\n", path.display()));
            Ok(())
        }
        (None, Some(_)) => Err(Error::usage("`--output` needs a query", "write it behind the recipe")),
        (Some(query), None) => answer(&session, query, format),
        (None, None) if std::io::stdin().is_terminal() => {
            prompt::talk(&session, format, &workspace.cache.root().join("sql_history"))
        }
        (None, None) => script(&session, format),
    }
}

/// Statements from standard input, one after the other, up to the first that fails; without any, the tables are listed.
fn script(session: &Session, format: Format) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let statements = prompt::statements(&text);
    if statements.is_empty() {
        return answer(session, "\\d", format);
    }
    statements.iter().try_for_each(|statement| answer(session, statement, format))
}

/// Answers one statement or `\\` command on standard output.
pub(crate) fn answer(session: &Session, statement: &str, format: Format) -> Result<()> {
    let statement = statement.trim();
    if statement.starts_with('\\') {
        let text = command(session, statement)?;
        say(&mut std::io::stdout(), &text);
        return Ok(());
    }
    match session.run(statement, format, &mut std::io::stdout().lock()) {
        Ok(_) => Ok(()),
        // `pipeline sql … | head` is no failure.
        Err(query::Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// [`answer`] for a person at a prompt: failures are told, and so is the time.
pub(crate) fn answer_aloud(session: &Session, statement: &str, format: Format) {
    let began = Instant::now();
    match answer(session, statement, format) {
        Ok(()) if !statement.starts_with('\\') => {
            say(&mut std::io::stderr(), &format!("({})\n", told(began.elapsed().as_secs_f64())));
        }
        Ok(()) => {}
        Err(error) => error.print(false),
    }
}

fn command(session: &Session, command: &str) -> Result<String> {
    let words: Vec<&str> = command.trim_end_matches(';').split_whitespace().collect();
    match words.as_slice() {
        ["\\d"] => catalog(session),
        ["\\d", table] => columns(session, table),
        ["\\?" | "\\h"] => Ok(HELP.to_owned()),
        _ => Err(Error::usage(format!("`{command}` is no command"), format!("these are:\n{HELP}"))),
    }
}

/// Every table with its columns.
fn catalog(session: &Session) -> Result<String> {
    let width = session.tables().iter().map(String::len).max().unwrap_or(0);
    let mut out = String::new();
    for table in session.tables() {
        let columns = session.columns(table).map_err(failed)?;
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        let _ = writeln!(out, "{table:width$}  {}", names.join(", "));
    }
    Ok(out)
}

fn columns(session: &Session, table: &str) -> Result<String> {
    let columns = session.columns(table).map_err(failed)?;
    let width = columns.iter().map(|column| column.name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for column in columns {
        let null = if column.nullable { "" } else { "  not null" };
        let _ = writeln!(out, "{:width$}  {}{null}", column.name, column.data_type);
    }
    Ok(out)
}

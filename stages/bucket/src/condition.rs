//! `where`: which samples are kept, by a condition on the columns of their latents and of the samples themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use query::{Session, TableSource};
use spec::Problem;
use stage::{Exit, Failure};

/// What a condition is asked of: a latent's columns, and those of its sample that it lacks.
const ROWS: &str = "rows";
const WITH_SAMPLES: &str = "select l.*, s.source, s.media, s.frames, s.fps, s.caption, s.digest \
    from latents l left join samples s on l.sample_id = s.sample_id";
const ALONE: &str = "select * from latents";

/// What is wrong with a condition, as far as the columns tell.
pub(crate) fn check(condition: &str, inputs: &BTreeSet<String>) -> Option<Problem> {
    let columns = |name: &str| TableSource::files(name, Vec::new());
    let samples = inputs.contains("samples").then(|| columns("samples"));
    ask(condition, columns("latents"), samples).err().map(|error| problem(condition, &error))
}

/// Ids of the samples that are kept.
pub(crate) fn kept(condition: &str, latents: &Path, samples: Option<&PathBuf>) -> Result<BTreeSet<String>, Failure> {
    let tables = || {
        let samples = samples.map(|folder| TableSource::glob("samples", folder, "samples/*.parquet")).transpose()?;
        ask(condition, TableSource::glob("latents", latents, "latents/**/*.parquet")?, samples)
    };
    let ids = tables().map_err(|error| Failure::new(Exit::Recipe, problem(condition, &error)))?;
    Ok(ids.into_iter().collect())
}

fn ask(condition: &str, latents: TableSource, samples: Option<TableSource>) -> query::Result<Vec<String>> {
    let rows = if samples.is_some() { WITH_SAMPLES } else { ALONE };
    let tables: Vec<TableSource> = std::iter::once(latents).chain(samples).collect();
    let mut session = Session::new(&tables)?;
    session.view(ROWS, rows)?;
    session.names_where(ROWS, "sample_id", condition)
}

fn problem(condition: &str, error: &query::Error) -> Problem {
    let problem = Problem::new(format!("`where = \"{condition}\"`: {error}")).field("where");
    match miette::Diagnostic::help(error) {
        Some(help) => problem.help(help.to_string()),
        None => problem,
    }
}

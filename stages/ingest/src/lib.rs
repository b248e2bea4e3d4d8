//! The stage `ingest`: pictures, clips and captions, from a folder, Parquet files or the Hub, to the table `samples`. Every
//! source row ends there or in `rejects`. Knows nothing of models.

mod judge;
mod layout;
mod metadata;
mod origin;
mod parameters;
mod parquet;
mod row;
mod sidecar;
mod source;
mod work;

use std::path::Path;

use stage::{About, CheckRequest, Checked, Exit, Failure, Outcome, SourceKind, Stage, Work};

use origin::Origin;
use parameters::Place;
pub use parameters::{MissingCaption, Parameters, Settings};

/// The stage.
#[derive(Debug, Clone, Copy)]
pub struct Ingest;

impl Stage for Ingest {
    type Parameters = Parameters;
    type Settings = Settings;

    fn describe() -> About {
        About {
            stage: "ingest",
            version: 1,
            about: "Reads pictures, clips and captions from a folder, Parquet files or the Hub.",
            inputs: &[],
            optional: &[],
            output: "samples",
            tables: &[("samples", "samples/*.parquet"), ("rejects", "rejects.parquet")],
            measured: &[],
            resumable: false,
            devices: &["cpu"],
        }
    }

    fn check(parameters: &Parameters, _settings: &Settings, request: &CheckRequest) -> Checked {
        let mut checked = Checked { key: parameters.key(), ..Checked::default() };
        let mut fail = |problem: spec::Problem| {
            let problem = if problem.field.is_none() { problem.field("dataset") } else { problem };
            checked.problems.push(problem);
        };
        if parameters.limit == Some(0) {
            fail(
                spec::Problem::new("`limit = 0` leaves no sample").help("leave `limit` out to take all").field("limit"),
            );
        }
        let source = |kind, location: String, revision, parts| stage::Source {
            name: "dataset".to_owned(),
            kind,
            location,
            revision,
            parts,
        };
        match parameters.place(&request.base_dir) {
            Err(problem) => fail(problem),
            Ok(Place::Hub(id, revision)) => {
                checked.sources.push(source(SourceKind::HubDataset, id, revision, layout::hub_parts()));
            }
            Ok(Place::Local(path)) => match look(&path, parameters) {
                Err(failure) => {
                    fail(failure.problem);
                    checked.exit = (failure.exit == Exit::Io).then_some(Exit::Io.code());
                }
                Ok(notes) => {
                    checked.notes = notes;
                    let location = path.to_string_lossy().into_owned();
                    checked.sources.push(source(SourceKind::Path, location, None, layout::parts()));
                }
            },
        }
        checked
    }

    fn run(work: &Work<Self>) -> Result<Outcome, Failure> {
        let source = work.request.sources.get("dataset");
        let source = source.ok_or_else(|| spec::Problem::new("the request has no source `dataset`"))?;
        let origin = match (source.kind, &source.commit) {
            (SourceKind::Path, _) => Origin::local(&work.request.base_dir.join(&source.location), &source.parts)?,
            (SourceKind::HubDataset | SourceKind::HubModel, Some(commit)) => {
                Origin::hub(&source.location, commit, &source.parts)?
            }
            (SourceKind::HubDataset | SourceKind::HubModel, None) => {
                return Err(spec::Problem::new("the request names no commit of the data set").into());
            }
        };
        work::run(work, origin)
    }
}

/// Looks a local data set over; notes on how it is understood.
fn look(path: &Path, parameters: &Parameters) -> Result<Vec<String>, Failure> {
    if fs_err::metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        let problem = spec::Problem::new(format!("the data set `{}` does not exist", path.display()));
        return Err(Failure::new(Exit::Input, problem.help("a relative path starts at the recipe's folder")));
    }
    let quiet = stage::Events::to(Box::new(std::io::sink()));
    let source = source::Source::open(Origin::local(path, &[])?, parameters, &quiet)?;
    if source.count()? == Some(0) {
        return Err(work::empty(&path.display().to_string()));
    }
    Ok(source.notes)
}

/// A failure of the tables this stage writes: the disk, not the data.
pub(crate) fn cannot_write(error: tables::Error) -> Failure {
    let failure = Failure::from_diagnostic(error);
    if failure.exit == Exit::Failed { failure.exit(Exit::Io) } else { failure }
}

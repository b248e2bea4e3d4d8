//! The files of a data set, in a local folder or on the Hub, behind one door that nothing outside is reached through.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::path::{Component, Path, PathBuf};

use hub::{Commit, Hub, Repo};
use spec::glob::{matches_any, takes_out};
use stage::{Events, Exit, Failure};

use crate::layout::{hub_parts, parts};
use crate::row::Refusal;

/// Where files come from.
pub(crate) enum Origin {
    /// A folder, canonical; files whose real path leaves `trusted` are refused, and only those that match `parts` count.
    Folder { root: PathBuf, trusted: PathBuf, parts: Vec<String> },
    /// One local file.
    File(PathBuf),
    /// A repository at a commit, and its files that count.
    Hub { hub: Box<Hub>, repo: Repo, commit: Commit, files: BTreeSet<String> },
}

/// What the data set consists of.
pub(crate) struct Listing {
    /// Paths inside the data set, with `/`, sorted.
    pub(crate) files: Vec<String>,
    /// Entries that are refused as they stand, with the reason.
    pub(crate) refused: Vec<(String, Refusal)>,
}

impl Origin {
    /// A file or folder; `counted` are globs of what the data set's identity counts.
    pub(crate) fn local(path: &Path, counted: &[String]) -> Result<Self, Failure> {
        let real = fs_err::canonicalize(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Failure::from_error(error).exit(Exit::Input),
            _ => unreadable(error),
        })?;
        if fs_err::metadata(&real).map_err(unreadable)?.is_file() {
            return Ok(Self::File(real));
        }
        // A snapshot in a Hub cache consists of links into the `blobs` beside it.
        let mut above = real.ancestors().skip(1);
        let trusted = match (above.next(), above.next()) {
            (Some(parent), Some(repo)) if parent.ends_with("snapshots") && repo.join("blobs").is_dir() => {
                repo.to_owned()
            }
            _ => real.clone(),
        };
        Ok(Self::Folder { root: real, trusted, parts: [&parts(), counted].concat() })
    }

    /// A data set of the Hub; `counted` are globs of what its identity counts.
    pub(crate) fn hub(id: &str, commit: &str, counted: &[String]) -> Result<Self, Failure> {
        let open = || Ok::<_, hub::Error>((Hub::from_env()?, Repo::dataset(id)?, commit.parse()?));
        let (hub, repo, commit) = open().map_err(unreachable_hub)?;
        let files = hub.files(&repo, &commit).map_err(unreachable_hub)?;
        let parts = [&hub_parts(), counted].concat();
        let files = files.into_iter().map(|file| file.path).filter(|path| matches_any(&parts, path)).collect();
        Ok(Self::Hub { hub: Box::new(hub), repo, commit, files })
    }

    pub(crate) fn list(&self) -> Result<Listing, Failure> {
        let mut listing = Listing { files: Vec::new(), refused: Vec::new() };
        match self {
            Self::File(path) => listing.files.push(file_name(path)),
            Self::Folder { root, trusted, parts } => Walk { root, trusted, parts }.list("", &mut listing)?,
            Self::Hub { files, .. } => listing.files = files.iter().cloned().collect(),
        }
        listing.files.sort();
        listing.refused.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(listing)
    }

    /// Makes files of the data set present on this machine; their places in the order asked for.
    pub(crate) fn fetch(&self, paths: &[String], events: &Events) -> Result<Vec<PathBuf>, Failure> {
        match self {
            Self::File(path) => Ok(paths.iter().map(|_| path.clone()).collect()),
            Self::Folder { root, .. } => Ok(paths.iter().map(|path| root.join(path)).collect()),
            Self::Hub { hub, repo, commit, .. } => {
                let progress = |done, total| {
                    events.progress("fetching", done, Some(total), "bytes", None);
                    if events.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                };
                hub.fetch_all(repo, commit, paths, &progress).map_err(|error| match error {
                    hub::Error::Stopped { .. } => Failure::interrupted("what was fetched stays in the Hub cache"),
                    other => unreachable_hub(other),
                })
            }
        }
    }

    /// A path that a row states, relative to `folder` inside the data set; refused if it leads out of the data set or nowhere.
    /// That one cannot tell is a failure.
    pub(crate) fn locate(&self, folder: &str, stated: &str) -> Result<Result<String, Refusal>, Failure> {
        let outside = || Refusal::new("outside", format!("`{stated}` leads out of the data set"));
        let joined = if folder.is_empty() { stated.to_owned() } else { format!("{folder}/{stated}") };
        let mut parts = Vec::new();
        for part in Path::new(&joined).components() {
            match part {
                Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
                Component::CurDir => {}
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Ok(Err(outside())),
            }
        }
        if stated.is_empty() || stated.starts_with('/') || stated.contains(['\\', '\0']) || parts.is_empty() {
            return Ok(Err(outside()));
        }
        let path = parts.join("/");
        let missing = |detail: String| Err(Refusal::new("missing_file", detail));
        Ok(match self {
            Self::Folder { parts, .. } if !matches_any(parts, &path) => {
                let detail =
                    format!("`{path}` is no part of the data set: hidden files and what the runner writes are not");
                Err(Refusal::new("outside", detail))
            }
            Self::Folder { root, trusted, .. } => match find(&root.join(&path))? {
                Found::At(real, _) if !real.starts_with(trusted) => Err(outside()),
                Found::At(_, meta) if !meta.is_file() => missing(format!("`{path}` is not a file")),
                Found::At(..) => Ok(path),
                Found::Nothing(kind) => missing(format!("`{path}` cannot be opened: {kind}")),
            },
            Self::Hub { files, .. } if files.contains(&path) => Ok(path),
            Self::Hub { .. } => missing(format!("`{path}` is not among the files of the repository that are read")),
            Self::File(_) => missing(format!("`{path}`: name the folder as the data set")),
        })
    }
}

/// What a path leads to, links followed.
enum Found {
    /// Something, and where it really is.
    At(PathBuf, Metadata),
    /// Nothing has that name.
    Nothing(ErrorKind),
}

fn find(path: &Path) -> Result<Found, Failure> {
    let found = fs_err::canonicalize(path).and_then(|real| fs_err::metadata(&real).map(|meta| Found::At(real, meta)));
    match found {
        Err(error)
            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::InvalidFilename) =>
        {
            Ok(Found::Nothing(error.kind()))
        }
        found => found.map_err(unreadable),
    }
}

/// What is there cannot be read. That may pass, so nothing follows from it for the data set, and nothing is refused for it.
pub(crate) fn unreadable(error: io::Error) -> Failure {
    let mut failure = Failure::from_error(error).exit(Exit::Io);
    let help = "no sample was dropped for it: see to its permissions, its disk and `ulimit -n`, then run again; \
                or take it out of the data set";
    failure.problem.help = Some(help.to_owned());
    failure
}

/// A walk through a folder.
#[derive(Clone, Copy)]
struct Walk<'a> {
    root: &'a Path,
    trusted: &'a Path,
    parts: &'a [String],
}

impl Walk<'_> {
    fn list(self, inside: &str, listing: &mut Listing) -> Result<(), Failure> {
        for entry in fs_err::read_dir(self.root.join(inside)).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name();
            let shown = name.to_string_lossy();
            let path = if inside.is_empty() { shown.clone().into_owned() } else { format!("{inside}/{shown}") };
            let kind = entry.file_type().map_err(unreadable)?;
            if !matches_any(self.parts, &path) || (kind.is_dir() && takes_out(self.parts, &path)) {
                continue;
            }
            let refused = match name.to_str() {
                None => Some(Refusal::new("name", "the file name is not UTF-8")),
                Some(_) if kind.is_dir() => {
                    self.list(&path, listing)?;
                    continue;
                }
                Some(_) if kind.is_symlink() => match find(&entry.path())? {
                    Found::At(real, _) if !real.starts_with(self.trusted) => {
                        Some(Refusal::new("outside", "a link that leads out of the data set"))
                    }
                    // A folder inside the data set is walked where it really is.
                    Found::At(_, meta) if meta.is_dir() => continue,
                    Found::At(_, meta) => not_a_file(meta.is_file()),
                    Found::Nothing(kind) => {
                        Some(Refusal::new("missing_file", format!("a link that leads nowhere: {kind}")))
                    }
                },
                Some(_) => not_a_file(kind.is_file()),
            };
            match refused {
                Some(refusal) => listing.refused.push((path, refusal)),
                None => listing.files.push(path),
            }
        }
        Ok(())
    }
}

fn not_a_file(is_file: bool) -> Option<Refusal> {
    (!is_file).then(|| Refusal::new("unsupported", "neither a file nor a folder"))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The Hub refuses or cannot be reached; a full disk stays a full disk.
pub(crate) fn unreachable_hub(error: hub::Error) -> Failure {
    let failure = Failure::from_diagnostic(error);
    if failure.exit == Exit::Io { failure } else { failure.exit(Exit::Hub) }
}

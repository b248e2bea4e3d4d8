//! The files of a data set, in a local folder or on the Hub, behind one door that nothing outside is reached through.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Component, Path, PathBuf};

use hub::{Commit, Hub, Repo};
use stage::{Events, Exit, Failure};

use crate::layout::hub_parts;
use crate::row::Refusal;

/// Where files come from.
pub(crate) enum Origin {
    /// A folder, canonical; files whose real path leaves `trusted` are refused.
    Folder { root: PathBuf, trusted: PathBuf },
    /// One local file.
    File(PathBuf),
    /// A repository at a commit, and all its files.
    Hub { hub: Box<Hub>, repo: Repo, commit: Commit, files: BTreeSet<String> },
}

/// What the data set consists of.
pub(crate) struct Listing {
    /// Paths inside the data set, with `/`, sorted; hidden files left out.
    pub(crate) files: Vec<String>,
    /// Entries that are refused as they stand, with the reason.
    pub(crate) refused: Vec<(String, Refusal)>,
}

impl Origin {
    pub(crate) fn local(path: &Path) -> Result<Self, Failure> {
        let real = fs_err::canonicalize(path).map_err(|error| Failure::from_error(error).exit(Exit::Input))?;
        if real.is_file() {
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
        Ok(Self::Folder { root: real, trusted })
    }

    pub(crate) fn hub(id: &str, commit: &str) -> Result<Self, Failure> {
        let open = || Ok::<_, hub::Error>((Hub::from_env()?, Repo::dataset(id)?, commit.parse()?));
        let (hub, repo, commit) = open().map_err(unreachable_hub)?;
        let files = hub.files(&repo, &commit).map_err(unreachable_hub)?;
        let files = files.into_iter().map(|file| file.path).collect();
        Ok(Self::Hub { hub: Box::new(hub), repo, commit, files })
    }

    pub(crate) fn list(&self) -> Result<Listing, Failure> {
        let mut listing = Listing { files: Vec::new(), refused: Vec::new() };
        match self {
            Self::File(path) => listing.files.push(file_name(path)),
            Self::Folder { root, trusted } => walk(root, trusted, "", &mut listing)?,
            Self::Hub { files, .. } => {
                let parts = hub_parts();
                let counts = |path: &&String| !is_hidden(path) && spec::glob::matches_any(&parts, path);
                listing.files = files.iter().filter(counts).cloned().collect();
            }
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

    /// A path that a row states, relative to `folder` inside the data set; refused if it leads out of the data set.
    pub(crate) fn locate(&self, folder: &str, stated: &str) -> Result<String, Refusal> {
        let outside = || Refusal::new("outside", format!("`{stated}` leads out of the data set"));
        let joined = if folder.is_empty() { stated.to_owned() } else { format!("{folder}/{stated}") };
        let mut parts = Vec::new();
        for part in Path::new(&joined).components() {
            match part {
                Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
                Component::CurDir => {}
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(outside()),
            }
        }
        if stated.is_empty() || stated.starts_with('/') || stated.contains(['\\', '\0']) || parts.is_empty() {
            return Err(outside());
        }
        let path = parts.join("/");
        match self {
            Self::Folder { root, trusted } => match fs_err::canonicalize(root.join(&path)) {
                Ok(real) if !real.starts_with(trusted) => Err(outside()),
                Ok(real) if !real.is_file() => Err(Refusal::new("missing_file", format!("`{path}` is not a file"))),
                Ok(_) => Ok(path),
                Err(error) => Err(Refusal::new("missing_file", format!("`{path}` cannot be opened: {}", error.kind()))),
            },
            Self::Hub { files, .. } if files.contains(&path) => Ok(path),
            Self::Hub { .. } => Err(Refusal::new("missing_file", format!("`{path}` is not in the repository"))),
            Self::File(_) => Err(Refusal::new("missing_file", format!("`{path}`: name the folder as the data set"))),
        }
    }
}

fn walk(root: &Path, trusted: &Path, inside: &str, listing: &mut Listing) -> Result<(), Failure> {
    let unreadable = |error| Failure::from_error(error).exit(Exit::Input);
    for entry in fs_err::read_dir(root.join(inside)).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        let shown = name.to_string_lossy();
        if shown.starts_with('.') {
            continue;
        }
        let path = if inside.is_empty() { shown.clone().into_owned() } else { format!("{inside}/{shown}") };
        let refuse = |reason, detail: String, listing: &mut Listing| {
            listing.refused.push((path.clone(), Refusal::new(reason, detail)));
        };
        if name.to_str().is_none() {
            refuse("name", "the file name is not UTF-8".to_owned(), listing);
            continue;
        }
        let kind = entry.file_type().map_err(unreadable)?;
        if kind.is_dir() {
            walk(root, trusted, &path, listing)?;
            continue;
        }
        if kind.is_symlink() {
            match fs_err::canonicalize(entry.path()) {
                Ok(real) if !real.starts_with(trusted) => {
                    refuse("outside", "a link that leads out of the data set".to_owned(), listing);
                    continue;
                }
                // A folder inside the data set is walked where it really is.
                Ok(real) if real.is_dir() => continue,
                Ok(_) => {}
                Err(error) => {
                    refuse("missing_file", format!("a link that leads nowhere: {}", error.kind()), listing);
                    continue;
                }
            }
        } else if !kind.is_file() {
            refuse("unsupported", "neither a file nor a folder".to_owned(), listing);
            continue;
        }
        listing.files.push(path);
    }
    Ok(())
}

fn is_hidden(path: &str) -> bool {
    path.split('/').any(|part| part.starts_with('.'))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The Hub refuses or cannot be reached; a full disk stays a full disk.
pub(crate) fn unreachable_hub(error: hub::Error) -> Failure {
    let failure = Failure::from_diagnostic(error);
    if failure.exit == Exit::Io { failure } else { failure.exit(Exit::Hub) }
}

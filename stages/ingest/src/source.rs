//! A data set, opened: its layout, its columns, its rows in order.

use std::path::PathBuf;

use serde_json::{Value, json};
use spec::Problem;
use stage::{Events, Exit, Failure};

use crate::layout::{Layout, in_split};
use crate::metadata::Metadata;
use crate::origin::Origin;
use crate::parameters::Parameters;
use crate::parquet::{self, Columns};
use crate::row::{Column, Refusal, Row, Rows};
use crate::sidecar;

/// An opened data set.
pub(crate) struct Source {
    pub(crate) origin: Origin,
    kind: Kind,
    /// Entries refused whatever the layout.
    refused: Vec<(String, Refusal)>,
    /// What a person should know of how it was understood.
    pub(crate) notes: Vec<String>,
}

enum Kind {
    Parquet { files: Vec<String>, columns: Columns },
    Metadata(Metadata),
    SideCar { pictures: Vec<String>, captions: Vec<String> },
}

impl Source {
    /// Lists the files, finds the layout and chooses columns; of a Hub data set, fetches metadata or the first Parquet file.
    pub(crate) fn open(origin: Origin, parameters: &Parameters, events: &Events) -> Result<Self, Failure> {
        let listing = origin.list()?;
        let layout = match &origin {
            Origin::File(path) if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("parquet")) => {
                let problem = Problem::new(format!("`{}` is not a Parquet file", path.display()));
                let help = "name a folder of pictures, or a file that ends in `.parquet`";
                return Err(Failure::new(Exit::Input, problem.help(help).field("dataset")));
            }
            _ => Layout::of(&listing),
        };
        let mut refused = listing.refused;
        let mut notes = Vec::new();
        if parameters.config.is_some() && !matches!(layout, Layout::Parquet { .. }) {
            notes.push("`config` has no effect: the data set has no Parquet files".to_owned());
        }
        if parameters.split.is_some() && !matches!(layout, Layout::Parquet { .. }) {
            notes.push("`split` has no effect: the data set has no Parquet files".to_owned());
        }
        let kind = match layout {
            Layout::Parquet { files, ignored } => {
                if !ignored.is_empty() {
                    notes.push(format!(
                        "{} loose pictures beside the Parquet files are not part of the data set",
                        ignored.len()
                    ));
                }
                let all = files.len();
                let (config, split) = (parameters.config.as_deref(), parameters.split.as_deref());
                let files = in_split(&files, config, split).map_err(|words| no_such_split(parameters, &words))?;
                if files.len() < all && split.is_none() {
                    notes.push(format!("the split `train` is taken: {} of {all} Parquet files", files.len()));
                }
                let first = origin.fetch(&files[..1], events)?;
                let columns = parquet::columns(&first[0], parameters)?;
                guessed(&mut notes, Some(&columns.image), columns.caption.as_ref());
                Kind::Parquet { files, columns }
            }
            Layout::Metadata { tables, pictures } => {
                let places = origin.fetch(&tables, events)?;
                let metadata = Metadata::read(&tables, &places, &pictures, parameters)?;
                guessed(&mut notes, None, metadata.caption.as_ref());
                Kind::Metadata(metadata)
            }
            Layout::SideCar { pictures, captions } => {
                if parameters.caption_column.is_some() || parameters.image_column.is_some() {
                    notes.push("column names have no effect: captions are text files beside the pictures".to_owned());
                }
                let mut pictures = pictures;
                if matches!(origin, Origin::Hub { .. }) {
                    refused.extend(sidecar::set_aside(&mut pictures, &captions));
                }
                Kind::SideCar { pictures, captions }
            }
        };
        Ok(Self { origin, kind, refused, notes })
    }

    /// All rows, in an order that depends on the data set alone.
    pub(crate) fn rows<'a>(&'a self, events: &'a Events) -> Rows<'a> {
        let rows: Rows<'a> = match &self.kind {
            Kind::Parquet { files, columns } => Box::new(files.iter().flat_map(move |path| {
                let opened = self.origin.fetch(std::slice::from_ref(path), events);
                match opened.and_then(|places| parquet::rows(&places[0], path, columns, &self.origin)) {
                    Ok(rows) => rows,
                    Err(failure) => Box::new(std::iter::once(Err(failure))) as Rows<'a>,
                }
            })),
            Kind::Metadata(metadata) => metadata.rows(&self.origin),
            Kind::SideCar { pictures, captions } => sidecar::rows(pictures, captions, &self.origin, events),
        };
        Box::new(rows.chain(self.refused.iter().map(|(path, refusal)| {
            Ok(Row { source: path.clone(), name: None, media: Err(refusal.clone()), caption: Ok(None) })
        })))
    }

    /// Rows, when that is known without fetching anything more.
    pub(crate) fn count(&self) -> Result<Option<u64>, Failure> {
        let rows = match &self.kind {
            Kind::Parquet { files, .. } => {
                let places: Vec<PathBuf> = match &self.origin {
                    Origin::Folder { root, .. } => files.iter().map(|path| root.join(path)).collect(),
                    Origin::File(path) => vec![path.clone()],
                    Origin::Hub { .. } => return Ok(None),
                };
                places.iter().map(|place| parquet::count(place)).sum::<Result<u64, Failure>>()?
            }
            Kind::Metadata(metadata) => metadata.len(),
            Kind::SideCar { pictures, captions } => sidecar::count(pictures, captions),
        };
        Ok(Some(rows + self.refused.len() as u64))
    }

    /// How it was understood, for the manifest.
    pub(crate) fn info(&self) -> Value {
        let name = |column: &Column| column.name.clone();
        match &self.kind {
            Kind::Parquet { files, columns } => json!({
                "layout": "parquet",
                "files": files,
                "image_column": columns.image.name,
                "caption_column": columns.caption.as_ref().map(name),
            }),
            Kind::Metadata(metadata) => json!({
                "layout": "metadata",
                "caption_column": metadata.caption.as_ref().map(name),
            }),
            Kind::SideCar { .. } => json!({ "layout": "side-car" }),
        }
    }
}

fn guessed(notes: &mut Vec<String>, image: Option<&Column>, caption: Option<&Column>) {
    let mut say = |what: &str, column: Option<&Column>| {
        if let Some(column) = column.filter(|column| column.guessed) {
            notes.push(format!("{what} are taken from the column `{}`", column.name));
        }
    };
    say("pictures", image);
    say("captions", caption);
}

fn no_such_split(parameters: &Parameters, words: &[String]) -> Failure {
    let named = |name: &str, value: &Option<String>| value.as_ref().map(|value| format!("`{name} = {value}`"));
    let asked = [named("config", &parameters.config), named("split", &parameters.split)];
    let asked = asked.into_iter().flatten().collect::<Vec<_>>().join(" and ");
    let problem = Problem::new(format!("no Parquet file of the data set is of {asked}"));
    let help = format!("words in the names of its files: {}", crate::row::listed(words.iter().map(String::as_str)));
    Failure::new(Exit::Input, problem.help(help).field(if parameters.split.is_some() { "split" } else { "config" }))
}

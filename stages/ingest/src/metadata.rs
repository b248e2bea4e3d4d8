//! `metadata.jsonl` and `metadata.csv` (the convention of Hugging Face's ImageFolder): one row per file, named by the
//! column `file_name` relative to the table's folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use spec::counted;
use stage::{Exit, Failure};

use crate::layout::{extension, folder};
use crate::origin::{Origin, unreadable};
use crate::parameters::Parameters;
use crate::row::{CAPTION_NAMES, Column, IMAGE_NAMES, Media, Refusal, Row, Rows, choose, listed};

/// One line of a table.
struct Line {
    /// Where it stands: `metadata.jsonl:12`.
    source: String,
    /// The table's folder inside the data set.
    folder: String,
    values: Result<BTreeMap<String, Value>, Refusal>,
}

/// All tables of a data set, read; pictures that no row names follow the rows, refused.
pub(crate) struct Metadata {
    lines: Vec<Line>,
    orphans: Vec<String>,
    file: Column,
    /// Chosen column of captions, if any.
    pub(crate) caption: Option<Column>,
}

impl Metadata {
    /// Reads the tables (`places` are the files on this machine) and chooses columns.
    pub(crate) fn read(
        tables: &[String],
        places: &[impl AsRef<Path>],
        pictures: &[String],
        parameters: &Parameters,
    ) -> Result<Self, Failure> {
        let mut lines = Vec::new();
        for (table, place) in tables.iter().zip(places) {
            let bytes = fs_err::read(place.as_ref()).map_err(unreadable)?;
            match extension(table).as_str() {
                "csv" => read_csv(table, &bytes, &mut lines),
                _ => read_jsonl(table, &bytes, &mut lines),
            }
        }
        let keys: BTreeSet<&str> =
            lines.iter().filter_map(|line| line.values.as_ref().ok()).flatten().map(|(key, _)| key.as_str()).collect();
        let (file, caption) = choose_columns(&keys, parameters).map_err(|p| Failure::new(Exit::Input, p))?;
        let named: BTreeSet<String> = lines.iter().filter_map(|line| line.file(&file.name)).collect();
        let orphans = pictures.iter().filter(|picture| !named.contains(*picture)).cloned().collect();
        Ok(Self { lines, orphans, file, caption })
    }

    pub(crate) fn len(&self) -> u64 {
        (self.lines.len() + self.orphans.len()) as u64
    }

    pub(crate) fn rows<'a>(&'a self, origin: &'a Origin) -> Rows<'a> {
        let lines = self.lines.iter().map(move |line| self.row(line, origin));
        let orphans = self.orphans.iter().map(|path| {
            let refusal = Refusal::new("no_metadata", "no row of the metadata names this file");
            Ok(Row { source: path.clone(), name: None, media: Err(refusal), caption: Ok(None) })
        });
        Box::new(lines.chain(orphans))
    }

    fn row(&self, line: &Line, origin: &Origin) -> Result<Row, Failure> {
        let values = match &line.values {
            Ok(values) => values,
            Err(refusal) => {
                let media = Err(refusal.clone());
                return Ok(Row { source: line.source.clone(), name: None, media, caption: Ok(None) });
            }
        };
        let stated = match values.get(&self.file.name) {
            Some(Value::String(stated)) if !stated.is_empty() => Ok(stated.as_str()),
            other => {
                let found = other.map_or("nothing".to_owned(), Value::to_string);
                Err(Refusal::new("metadata", format!("`{}` should name a file, but is {found}", self.file.name)))
            }
        };
        let caption = match self.caption.as_ref().and_then(|column| values.get(&column.name)) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(caption)) => Ok(Some(caption.clone())),
            Some(other) => Err(Refusal::new("metadata", format!("the caption should be a text, but is {other}"))),
        };
        let media = match stated {
            Ok(stated) => origin.locate(&line.folder, stated)?.map(Media::File),
            Err(refusal) => Err(refusal),
        };
        let source = match &media {
            Ok(Media::File(path)) => path.clone(),
            _ => line.source.clone(),
        };
        let name = values.get(&self.file.name).and_then(Value::as_str).map(str::to_owned);
        Ok(Row { source, name, media, caption })
    }
}

impl Line {
    /// The file it names, as a path inside the data set, whether it exists or not.
    fn file(&self, column: &str) -> Option<String> {
        let stated = self.values.as_ref().ok()?.get(column)?.as_str()?;
        let joined = if self.folder.is_empty() { stated.to_owned() } else { format!("{}/{stated}", self.folder) };
        Some(joined.split('/').filter(|part| !matches!(*part, "" | ".")).collect::<Vec<_>>().join("/"))
    }
}

fn choose_columns(keys: &BTreeSet<&str>, parameters: &Parameters) -> Result<(Column, Option<Column>), spec::Problem> {
    let asked = parameters.image_column.as_deref();
    let image = asked.map_or(IMAGE_NAMES.to_vec(), |name| vec![name]);
    let prefixed: Vec<String> = image.iter().map(|name| format!("{name}_file_name")).collect();
    // `file_name` is the picture itself; that a recipe calls it `image` is right, since that is its name once loaded.
    let candidates = std::iter::once("file_name").chain(prefixed.iter().map(String::as_str)).chain(image);
    let file = candidates.into_iter().find(|name| keys.contains(name)).ok_or_else(|| {
        spec::Problem::new("the metadata has no column `file_name`")
            .help(format!(
                "name each picture's file in a column `file_name`; the columns are {}",
                listed(keys.iter().copied())
            ))
            .field("dataset")
    })?;
    let caption = choose("caption_column", parameters.caption_column.as_deref(), CAPTION_NAMES, keys.iter().copied())?;
    Ok((Column { name: file.to_owned(), guessed: false }, caption))
}

fn read_jsonl(table: &str, bytes: &[u8], lines: &mut Vec<Line>) {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let values = serde_json::from_slice(line).map_err(|error| {
            // serde_json counts lines of its own input, which is one line.
            let error = error.to_string();
            let error = error.split(" at line ").next().unwrap_or_default();
            Refusal::new("metadata", format!("not a JSON object: {error}"))
        });
        lines.push(Line { source: format!("{table}:{}", number + 1), folder: folder(table).to_owned(), values });
    }
}

fn read_csv(table: &str, bytes: &[u8], lines: &mut Vec<Line>) {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(bytes);
    let header: Vec<String> = match reader.byte_headers() {
        Ok(header) => header.iter().map(|name| String::from_utf8_lossy(name).trim().to_owned()).collect(),
        Err(_) => Vec::new(),
    };
    for record in reader.byte_records() {
        let number = record.as_ref().ok().and_then(csv::ByteRecord::position).map_or(0, csv::Position::line);
        let values = record.map_err(|error| Refusal::new("metadata", error.to_string())).and_then(|record| {
            if record.len() != header.len() {
                let detail = format!("{}, but the header has {}", counted(record.len(), "field"), header.len());
                return Err(Refusal::new("metadata", detail));
            }
            let texts =
                record.iter().map(|field| std::str::from_utf8(field).map(|text| Value::String(text.to_owned())));
            let texts: Result<Vec<Value>, _> = texts.collect();
            let texts = texts.map_err(|_| Refusal::new("metadata", "not UTF-8"))?;
            Ok(header.iter().cloned().zip(texts).collect())
        });
        lines.push(Line { source: format!("{table}:{number}"), folder: folder(table).to_owned(), values });
    }
}

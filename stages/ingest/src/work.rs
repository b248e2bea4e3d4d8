//! The run: rows in chunks of bounded size, judged on all threads, written in source order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Value, json};
use spec::{Problem, counted};
use stage::{Events, Exit, Failure, Ledger, Outcome, Work};
use tables::{Reject, RowWriter, Sample};

use crate::judge::{Accepted, judge, read};
use crate::origin::Origin;
use crate::row::{Media, Refusal, Row};
use crate::source::Source;
use crate::{Ingest, cannot_write};

/// A chunk ends at so many rows, or so many bytes of those rows that carry them.
const CHUNK_ROWS: usize = 64;
const CHUNK_BYTES: usize = 64 << 20;
/// A file of the table ends after about so many bytes.
const PART_BYTES: u64 = 1 << 30;
const KEPT: &str = "nothing of this stage is kept";

pub(crate) fn run(work: &Work<Ingest>, origin: Origin) -> Result<Outcome, Failure> {
    let (request, events, parameters) = (&work.request, &work.events, &work.parameters);
    let source = Source::open(origin, parameters, events)?;
    // `check` told those of a local data set.
    if matches!(source.origin, Origin::Hub { .. }) {
        source.notes.iter().for_each(|note| events.warning(note.clone()));
    }
    let limit = parameters.limit.unwrap_or(u64::MAX);
    let total = source.count()?.map(|rows| rows.min(limit));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(request.threads.max(1)).build();
    let pool = pool.map_err(Failure::from_error)?;
    let dump = match &work.settings.dump {
        Some(folder) => {
            let folder = request.base_dir.join(folder);
            fs_err::create_dir_all(&folder)?;
            Some(folder)
        }
        None => None,
    };
    let mut tables = Tables::create(&request.output)?;
    let mut rows = source.rows(events).take(usize::try_from(limit).unwrap_or(usize::MAX));
    loop {
        events.check_interrupted(KEPT)?;
        let chunk = next_chunk(&mut rows)?;
        if chunk.is_empty() {
            break;
        }
        let places = fetch(&chunk, &source.origin, events)?;
        let mut left: Vec<_> = chunk.into_iter().zip(places).collect();
        while !left.is_empty() {
            let group: Vec<_> = left.drain(..at_once(&left)).collect();
            let judged: Vec<Judged> = pool.install(|| {
                let one = |(row, place): (Row, Option<PathBuf>)| judge_row(work, row, place.as_deref(), dump.is_some());
                group.into_par_iter().map(one).collect::<Result<_, Failure>>()
            })?;
            let mut named = Vec::new();
            for (source, verdict) in judged {
                match verdict {
                    Ok(accepted) => named.push(tables.accept(source, accepted)?),
                    Err(refusal) => tables.reject(source, refusal, events)?,
                }
            }
            if let Some(folder) = &dump {
                pool.install(|| {
                    named.par_iter().try_for_each(|(id, picture)| write_picture(folder, id, picture.as_ref()))
                })?;
            }
            events.progress("reading", tables.taken(), total, "samples", None);
        }
    }
    if let Some(folder) = dump {
        events.output("what the model sees", folder);
    }
    finish(tables, &source, &work.parameters.dataset)
}

fn finish(tables: Tables, source: &Source, dataset: &str) -> Result<Outcome, Failure> {
    let ledger = tables.ledger();
    let reasons = tables.reasons.clone();
    let first = tables.first_reject.clone();
    tables.finish()?;
    if ledger.taken == 0 {
        return Err(empty(dataset));
    }
    let listed = reasons.iter().map(|(reason, n)| format!("{n} {reason}")).collect::<Vec<_>>().join(", ");
    if ledger.out == 0 {
        let message = format!("nothing of `{dataset}` is usable: {} ({listed})", counted(ledger.taken, "row"));
        return Err(Failure::new(
            Exit::Input,
            Problem::new(message).help(format!("the first: {}", first.unwrap_or_default())),
        ));
    }
    let rejected = if listed.is_empty() { String::new() } else { format!(", {} rejected ({listed})", ledger.rejected) };
    let mut info = source.info();
    if let Value::Object(facts) = &mut info {
        facts.insert("rejected".to_owned(), json!(reasons));
    }
    Ok(Outcome { summary: format!("{}{rejected}", counted(ledger.out, "sample")), ledger, info })
}

/// There is nothing to learn from.
pub(crate) fn empty(dataset: &str) -> Failure {
    let problem = Problem::new(format!("the data set `{dataset}` is empty"))
        .help("it needs pictures with captions: `metadata.jsonl`, text files of the same names, or Parquet files");
    Failure::new(Exit::Input, problem)
}

/// Rows whose files are held in memory together: as many as their bytes allow, and at least one.
fn at_once(rows: &[(Row, Option<PathBuf>)]) -> usize {
    let mut bytes = 0;
    let fits = |(_, place): &&(Row, Option<PathBuf>)| {
        let length = place.as_ref().and_then(|place| fs_err::metadata(place).ok()).map_or(0, |file| file.len());
        bytes += length;
        bytes <= CHUNK_BYTES as u64
    };
    rows.iter().take_while(fits).count().max(1)
}

fn next_chunk(rows: &mut impl Iterator<Item = Result<Row, Failure>>) -> Result<Vec<Row>, Failure> {
    let (mut chunk, mut bytes) = (Vec::new(), 0);
    while chunk.len() < CHUNK_ROWS && bytes < CHUNK_BYTES {
        let Some(row) = rows.next().transpose()? else { break };
        if let Ok(Media::Bytes(held)) = &row.media {
            bytes += held.len();
        }
        chunk.push(row);
    }
    Ok(chunk)
}

/// Places of the rows' files on this machine, fetched if need be; `None` for rows that name no file.
fn fetch(rows: &[Row], origin: &Origin, events: &Events) -> Result<Vec<Option<PathBuf>>, Failure> {
    let file = |row: &Row| match &row.media {
        Ok(Media::File(path)) => Some(path.clone()),
        Ok(Media::Bytes(_)) | Err(_) => None,
    };
    let wanted: Vec<String> = rows.iter().filter_map(file).collect();
    if wanted.is_empty() {
        return Ok(vec![None; rows.len()]);
    }
    let mut places = origin.fetch(&wanted, events)?.into_iter();
    Ok(rows.iter().map(|row| file(row).and_then(|_| places.next())).collect())
}

/// Where a row stands, and what became of it.
type Judged = (String, Result<Accepted, Refusal>);

fn judge_row(work: &Work<Ingest>, row: Row, place: Option<&Path>, keep: bool) -> Result<Judged, Failure> {
    let Row { source, name, media, caption } = row;
    let bytes = match (media, place) {
        (Ok(Media::Bytes(bytes)), _) => Ok(bytes),
        (Ok(Media::File(_)), Some(place)) => read(place)?,
        (Ok(Media::File(path)), None) => Err(Refusal::new("missing_file", format!("`{path}` was not found"))),
        (Err(refusal), _) => Err(refusal),
    };
    let policy = work.parameters.missing_caption;
    let background = work.settings.background.0;
    let verdict = bytes.and_then(|bytes| judge(bytes, caption, name.as_deref(), policy, background, keep));
    Ok((source, verdict))
}

fn write_picture(folder: &Path, id: &str, picture: Option<&media::Picture>) -> Result<(), Failure> {
    let Some(picture) = picture else { return Ok(()) };
    media::write_png(&folder.join(format!("{id}.png")), picture, &[]).map_err(|error| {
        let failure = Failure::from_diagnostic(error);
        failure.exit(Exit::Io)
    })
}

/// The tables this stage writes.
struct Tables {
    folder: PathBuf,
    samples: RowWriter<Sample>,
    rejects: RowWriter<Reject>,
    part: usize,
    part_bytes: u64,
    /// Uses of each id so far.
    ids: BTreeMap<String, u64>,
    /// Samples so far.
    accepted: u64,
    reasons: BTreeMap<&'static str, u64>,
    first_reject: Option<String>,
}

impl Tables {
    fn create(folder: &Path) -> Result<Self, Failure> {
        Ok(Self {
            folder: folder.to_owned(),
            samples: RowWriter::create(&part(folder, 0)).map_err(cannot_write)?,
            rejects: RowWriter::create(&folder.join("rejects.parquet")).map_err(cannot_write)?,
            part: 0,
            part_bytes: 0,
            ids: BTreeMap::new(),
            accepted: 0,
            reasons: BTreeMap::new(),
            first_reject: None,
        })
    }

    /// Writes a sample; its id and, if it was kept, its picture.
    fn accept(&mut self, source: String, accepted: Accepted) -> Result<(String, Option<media::Picture>), Failure> {
        if self.part_bytes >= PART_BYTES {
            self.part += 1;
            self.part_bytes = 0;
            let next = RowWriter::create(&part(&self.folder, self.part)).map_err(cannot_write)?;
            std::mem::replace(&mut self.samples, next).finish().map_err(cannot_write)?;
        }
        let digest = accepted.digest.to_hex();
        let sample_id = numbered(&mut self.ids, &digest[..16]);
        self.part_bytes += accepted.bytes.len() as u64;
        self.accepted += 1;
        let row = Sample {
            sample_id: sample_id.clone(),
            source,
            media: accepted.media.to_owned(),
            width: accepted.width as i32,
            height: accepted.height as i32,
            frames: accepted.clip.map_or(1, |(frames, _)| frames as i32),
            fps: accepted.clip.map(|(_, fps)| fps as f32),
            caption: accepted.caption,
            digest: digest.to_string(),
            bytes: accepted.bytes,
        };
        self.samples.push(row).map_err(cannot_write)?;
        Ok((sample_id, accepted.picture))
    }

    fn reject(&mut self, source: String, refusal: Refusal, events: &Events) -> Result<(), Failure> {
        let Refusal { reason, detail } = refusal;
        events.rejected(source.clone(), reason, detail.clone());
        *self.reasons.entry(reason).or_default() += 1;
        self.first_reject.get_or_insert_with(|| format!("`{source}`: {detail}"));
        let (stage, reason) = ("ingest".to_owned(), reason.to_owned());
        self.rejects.push(Reject { sample_id: None, source, stage, reason, detail }).map_err(cannot_write)
    }

    fn taken(&self) -> u64 {
        self.accepted + self.reasons.values().sum::<u64>()
    }

    fn ledger(&self) -> Ledger {
        Ledger { taken: self.taken(), out: self.accepted, rejected: self.reasons.values().sum(), held: 0 }
    }

    fn finish(self) -> Result<(), Failure> {
        self.samples.finish().map_err(cannot_write)?;
        self.rejects.finish().map_err(cannot_write)?;
        Ok(())
    }
}

fn part(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("samples/part-{number:05}.parquet"))
}

/// The id itself at its first use, then with `-2`, `-3`, ….
fn numbered(uses: &mut BTreeMap<String, u64>, id: &str) -> String {
    let count = uses.entry(id.to_owned()).and_modify(|n| *n += 1).or_insert(1);
    if *count == 1 { id.to_owned() } else { format!("{id}-{count}") }
}

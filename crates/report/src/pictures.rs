//! Thumbnails: of samples in the tables, and of picture files in the artifacts. Each is a JPEG inside the page; together
//! they stay below a few megabytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use image::RgbImage;
use image::codecs::jpeg::JpegEncoder;
use query::Session;
use serde::Deserialize;

use crate::data::Data;
use crate::facts::Run;

/// Training samples shown.
const SAMPLES: usize = 16;
/// Generated pictures shown.
const GENERATED: usize = 24;
/// Rounds of previews shown, and pictures of each.
const ROUNDS: (usize, usize) = (6, 4);
/// Other pictures of a stage, such as grids, shown large.
const SHEETS: usize = 4;
/// Longest sides, in pixels.
const SMALL: u32 = 200;
const MEDIUM: u32 = 400;
const LARGE: u32 = 1400;
/// Larger files are not read.
const MOST_BYTES: u64 = 256 << 20;

/// A picture of the page.
#[derive(Debug, Clone)]
pub(crate) struct Shown {
    /// `data:` URI, or why there is none.
    pub(crate) data: Result<String, String>,
    /// Size of the thumbnail.
    pub(crate) size: (u32, u32),
    /// Below it.
    pub(crate) caption: String,
    /// Small print.
    pub(crate) detail: String,
}

/// All pictures of the page.
#[derive(Debug, Default)]
pub(crate) struct Pictures {
    pub(crate) samples: Vec<Shown>,
    pub(crate) hardest: Vec<Shown>,
    /// Step → pictures drawn after it, ascending.
    pub(crate) previews: Vec<(u64, Vec<Shown>)>,
    pub(crate) generated: Vec<Shown>,
    pub(crate) sheets: Vec<Shown>,
}

/// A row of `images`.
#[derive(Deserialize)]
struct Image {
    file: String,
    prompt: String,
    seed: i64,
    steps: i64,
    guidance: f64,
}

impl Pictures {
    pub(crate) fn collect(run: &Run, session: &Session, data: &Data) -> Self {
        let mut pictures = Self { samples: samples(session), hardest: hardest(session, data), ..Self::default() };
        // Path inside an artifact → the artifact.
        let mut files: BTreeMap<&str, &Path> = BTreeMap::new();
        for artifact in run.stages.iter().filter_map(|stage| stage.result.as_ref()) {
            let drawn = artifact.files.iter().filter(|file| is_picture(file));
            files.extend(drawn.map(|file| (file.as_str(), artifact.path.as_path())));
        }
        let images: Vec<Image> = if session.tables().contains("images") {
            session
                .rows(&format!(
                    "select file, prompt, seed, steps, guidance from images order by file limit {GENERATED}"
                ))
                .unwrap_or_default()
        } else {
            Vec::new()
        };
        let mut listed = BTreeSet::new();
        for image in &images {
            listed.insert(image.file.clone());
            if let Some(folder) = files.get(image.file.as_str()) {
                let detail = format!("seed {} · {} steps · guidance {}", image.seed, image.steps, image.guidance);
                pictures.generated.push(file(&folder.join(&image.file), MEDIUM, image.prompt.clone(), detail));
            }
        }
        pictures.previews = previews(&files);
        let many = data.tables.get("images").is_some_and(|n| *n > 0);
        // What no table lists: grids and comparisons. The sheet of all pictures repeats them, but for clips it is what there is to
        // see.
        for (name, folder) in files {
            let seen = !pictures.generated.is_empty() && name.ends_with("contact_sheet.png");
            let repeated = many && (listed.contains(name) || seen);
            // Of more pictures than are shown, the rest is not "other".
            let numbered = many && name.as_bytes().first().is_some_and(u8::is_ascii_digit);
            if !repeated && !numbered && round(name).is_none() && pictures.sheets.len() < SHEETS {
                pictures.sheets.push(file(&folder.join(name), LARGE, name.to_owned(), String::new()));
            }
        }
        pictures
    }
}

fn is_picture(file: &str) -> bool {
    let extension = Path::new(file).extension().and_then(|e| e.to_str()).unwrap_or_default();
    ["png", "jpg", "jpeg", "webp"].iter().any(|known| extension.eq_ignore_ascii_case(known))
}

/// The step of a preview: `samples/step_19/000.png`.
fn round(file: &str) -> Option<u64> {
    file.split('/').rev().nth(1)?.strip_prefix("step_")?.parse().ok()
}

/// The first pictures of some rounds: the first, the last, and some between.
fn previews(files: &BTreeMap<&str, &Path>) -> Vec<(u64, Vec<Shown>)> {
    let mut rounds: BTreeMap<u64, Vec<(&str, &Path)>> = BTreeMap::new();
    for (name, folder) in files {
        if let Some(step) = round(name) {
            rounds.entry(step).or_default().push((name, folder));
        }
    }
    let steps: Vec<u64> = rounds.keys().copied().collect();
    let (most, each) = ROUNDS;
    let spread = |i: usize| steps[i * (steps.len() - 1) / (most - 1)];
    let chosen: BTreeSet<u64> =
        if steps.len() <= most { steps.iter().copied().collect() } else { (0..most).map(spread).collect() };
    let show = |step: u64| {
        let of_step = rounds[&step].iter().take(each);
        (step, of_step.map(|(name, folder)| file(&folder.join(name), SMALL, String::new(), String::new())).collect())
    };
    chosen.into_iter().map(show).collect()
}

fn samples(session: &Session) -> Vec<Shown> {
    if !session.tables().contains("samples") {
        return Vec::new();
    }
    let rows = session.batches(&format!("select * from samples limit {SAMPLES}")).unwrap_or_default();
    rows.iter().flat_map(|batch| (0..batch.num_rows()).map(|row| sample(batch, row, None))).collect()
}

fn hardest(session: &Session, data: &Data) -> Vec<Shown> {
    if data.hardest.is_empty() || !session.tables().contains("samples") {
        return Vec::new();
    }
    let ids: Vec<String> =
        data.hardest.iter().map(|hard| format!("'{}'", hard.sample_id.replace('\'', "''"))).collect();
    let sql = format!("select * from samples where sample_id in ({})", ids.join(", "));
    let mut found = BTreeMap::new();
    for batch in session.batches(&sql).unwrap_or_default() {
        for row in 0..batch.num_rows() {
            found.insert(text(&batch, "sample_id", row), (batch.slice(row, 1), 0));
        }
    }
    data.hardest
        .iter()
        .filter_map(|hard| {
            let (batch, row) = found.get(&hard.sample_id)?;
            let detail = format!("{:+.3} over {}", hard.excess, crate::text::many(hard.n as u64, "draw"));
            Some(sample(batch, *row, Some(detail)))
        })
        .collect()
}

fn text(batch: &RecordBatch, column: &str, row: usize) -> String {
    let column = batch.column_by_name(column).and_then(|column| column.as_string_opt::<i32>().cloned());
    column.filter(|column| column.is_valid(row)).map(|column| column.value(row).to_owned()).unwrap_or_default()
}

fn sample(batch: &RecordBatch, row: usize, detail: Option<String>) -> Shown {
    let bytes = batch.column_by_name("bytes").and_then(|column| column.as_binary_opt::<i32>());
    let (data, size) = match bytes.filter(|column| column.is_valid(row)) {
        Some(_) if is_clip(batch, row) => (Err("a clip".to_owned()), (SMALL, SMALL)),
        Some(column) => thumbnail(column.value(row), SMALL),
        None => (Err("no picture in the table".to_owned()), (SMALL, SMALL)),
    };
    let source = text(batch, "source", row);
    Shown { data, size, caption: text(batch, "caption", row), detail: detail.unwrap_or(source) }
}

/// Whether the row says how many frames it has in a second.
fn is_clip(batch: &RecordBatch, row: usize) -> bool {
    batch.column_by_name("fps").is_some_and(|column| column.is_valid(row))
}

fn file(path: &Path, side: u32, caption: String, detail: String) -> Shown {
    let read = || -> Result<Vec<u8>, String> {
        let size = fs_err::metadata(path).map_err(|e| e.to_string())?.len();
        if size > MOST_BYTES {
            return Err(format!("{} are too many to show", crate::text::bytes(size)));
        }
        fs_err::read(path).map_err(|e| e.to_string())
    };
    let (data, size) = match read() {
        Ok(bytes) => thumbnail(&bytes, side),
        Err(error) => (Err(error), (side, side)),
    };
    Shown { data, size, caption, detail }
}

/// A picture file, made to fit a square of `side` pixels, as a JPEG in a `data:` URI; and its size.
fn thumbnail(bytes: &[u8], side: u32) -> (Result<String, String>, (u32, u32)) {
    let small = || -> Result<(String, (u32, u32)), String> {
        let picture = media::decode(bytes, [255; 3]).map_err(|e| e.to_string())?;
        let (width, height) = (picture.width, picture.height);
        let rgb = RgbImage::from_raw(width, height, picture.rgb).ok_or("an empty picture")?;
        let scale = (f64::from(side) / f64::from(width.max(height))).min(1.0);
        let fit = |n: u32| ((f64::from(n) * scale).round() as u32).max(1);
        let small = if scale < 1.0 { image::imageops::thumbnail(&rgb, fit(width), fit(height)) } else { rgb };
        let mut jpeg = Vec::new();
        let encoder = JpegEncoder::new_with_quality(&mut jpeg, 82);
        small.write_with_encoder(encoder).map_err(|e| e.to_string())?;
        Ok((format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(jpeg)), small.dimensions()))
    };
    match small() {
        Ok((data, size)) => (Ok(data), size),
        Err(reason) => (Err(reason), (side, side)),
    }
}

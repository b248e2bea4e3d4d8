//! Reads latents in order of bucket and sample id, and writes them as shards; one latent in memory at a time, and one
//! open shard.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;
use spec::{Bucket, Problem};
use stage::{Estimate, Events, Exit, Failure, Ledger, Outcome};
use store::Digest;
use tables::{Held, HeldWriter, LatentReader, Location, RejectsWriter, ShardRow, ShardWriter, ShardsWriter};

use crate::Parameters;
use crate::condition::kept;
use crate::plan::{Plan, plan};

/// What a bucket costs; in the manifest's `info.buckets`.
#[derive(Debug, Default, Serialize)]
struct Report {
    bucket: String,
    rows: usize,
    repeated: usize,
    held: usize,
    batches: usize,
    shards: usize,
    bytes: u64,
}

/// Rows of a bucket by sample id.
#[derive(Debug, Default)]
struct Rows {
    /// Those that may be packed.
    places: BTreeMap<String, Location>,
    /// Those that `where` holds back.
    excluded: BTreeSet<String>,
}

pub(crate) fn pack(
    input: &Path,
    samples: Option<&PathBuf>,
    output: &Path,
    parameters: &Parameters,
    events: &Events,
) -> Result<Outcome, Failure> {
    let latents = open(input)?;
    if latents.is_empty() {
        return Err(nothing());
    }
    let buckets = index(&latents, input, samples, parameters)?;
    if let (Some(condition), true) = (&parameters.condition, buckets.values().all(|rows| rows.places.is_empty())) {
        let message = format!("`where = \"{condition}\"` is true for none of the {} samples", latents.len());
        return Err(Failure::new(Exit::Input, Problem::new(message).field("where")));
    }
    let plans: BTreeMap<Bucket, Plan> = buckets
        .iter()
        .map(|(&bucket, rows)| (bucket, plan(rows.places.len(), row_bytes(&latents, bucket), parameters)))
        .collect();
    if plans.values().all(|plan| plan.kept == 0) {
        let message =
            format!("no bucket has a whole batch of {} rows, so every row would be held back", parameters.batch_size);
        let help = "take a smaller `batch_size`, or `remainder = \"pad\"` or `\"short\"`";
        return Err(Failure::new(Exit::Input, Problem::new(message).field("batch_size").help(help)));
    }

    let total = plans.values().map(|plan| plan.kept + plan.repeated).sum::<usize>() as u64;
    let mut packer = Packer {
        latents: &latents,
        output,
        events,
        shards: ShardsWriter::create(&output.join("shards.parquet")).map_err(unwritable)?,
        done: 0,
        total,
    };
    let mut held = HeldWriter::create(&output.join("held.parquet")).map_err(unwritable)?;
    let mut reports = Vec::new();
    for (bucket, rows) in buckets {
        let plan = plans[&bucket];
        let unpacked =
            rows.places.keys().skip(plan.kept).map(|id| (id, format!("fills no batch of {}", parameters.batch_size)));
        let condition = parameters.condition.as_deref().unwrap_or_default();
        let excluded = rows.excluded.iter().map(|id| (id, format!("not where {condition}")));
        for (sample_id, reason) in unpacked.chain(excluded) {
            let row = Held { sample_id: sample_id.clone(), bucket: bucket.to_string(), reason };
            held.push(row).map_err(unwritable)?;
        }
        let (shards, bytes) = packer.bucket(bucket, &rows, plan)?;
        let Plan { kept, repeated, held, batches, .. } = plan;
        let held = held + rows.excluded.len();
        reports.push(Report { bucket: bucket.to_string(), rows: kept, repeated, held, batches, shards, bytes });
    }
    packer.shards.finish().map_err(unwritable)?;
    held.finish().map_err(unwritable)?;
    RejectsWriter::create(&output.join("rejects.parquet")).and_then(RejectsWriter::finish).map_err(unwritable)?;
    Ok(outcome(latents.len(), &reports, parameters))
}

/// What packing would give.
pub(crate) fn estimate(input: &Path, samples: Option<&PathBuf>, parameters: &Parameters) -> Result<Estimate, Failure> {
    let latents = open(input)?;
    let (mut batches, mut held, mut repeated, mut bytes) = (0, 0, 0, 0);
    for (bucket, rows) in index(&latents, input, samples, parameters)? {
        let row = row_bytes(&latents, bucket);
        let plan = plan(rows.places.len(), row, parameters);
        (batches, repeated) = (batches + plan.batches, repeated + plan.repeated);
        held += plan.held + rows.excluded.len();
        bytes += (plan.kept + plan.repeated) as u64 * row as u64;
    }
    let rows = if parameters.batch_size == 1 { "1 row".to_owned() } else { format!("{} rows", parameters.batch_size) };
    let mut fact = format!("{batches} batches of {rows} an epoch, {held} samples held back");
    if repeated > 0 {
        fact += &format!(", {repeated} repeated to fill a batch");
    }
    Ok(Estimate { bytes: Some(bytes), facts: vec![fact], ..Estimate::default() })
}

fn open(input: &Path) -> Result<LatentReader, Failure> {
    match LatentReader::open(&input.join("latents")) {
        Err(tables::Error::NoFiles { .. }) => Err(nothing()),
        Err(error) if error.io_kind() == Some(std::io::ErrorKind::NotFound) => Err(nothing()),
        latents => latents.map_err(unreadable),
    }
}

fn row_bytes(latents: &LatentReader, bucket: Bucket) -> usize {
    2 * latents.meta().shape(bucket).iter().product::<usize>()
}

fn nothing() -> Failure {
    let problem = Problem::new("there is no latent to pack").help("look at `rejects`: every sample was refused before");
    Failure::new(Exit::Input, problem)
}

/// Places of all rows; latents stay on disk.
fn index(
    latents: &LatentReader,
    input: &Path,
    samples: Option<&PathBuf>,
    parameters: &Parameters,
) -> Result<BTreeMap<Bucket, Rows>, Failure> {
    let kept = parameters.condition.as_ref().map(|condition| kept(condition, input, samples)).transpose()?;
    let mut buckets = BTreeMap::<Bucket, Rows>::new();
    for row in latents.infos() {
        let (at, row) = row.map_err(unreadable)?;
        let bucket = row.bucket();
        let rows = buckets.entry(bucket).or_default();
        let is_new = if kept.as_ref().is_none_or(|kept| kept.contains(&row.sample_id)) {
            rows.places.insert(row.sample_id.clone(), at).is_none()
        } else {
            rows.excluded.insert(row.sample_id.clone())
        };
        if !is_new {
            let message = format!("sample `{}` is twice in bucket {bucket} of the latents", row.sample_id);
            return Err(Failure::new(
                Exit::Input,
                Problem::new(message).help("run the stage `encode` again with `--force`"),
            ));
        }
    }
    Ok(buckets)
}

struct Packer<'a> {
    latents: &'a LatentReader,
    output: &'a Path,
    events: &'a Events,
    shards: ShardsWriter,
    done: u64,
    total: u64,
}

impl Packer<'_> {
    /// Writes the shards of a bucket; their number and size.
    fn bucket(&mut self, bucket: Bucket, rows: &Rows, plan: Plan) -> Result<(usize, u64), Failure> {
        let kept: Vec<(&String, Location)> = rows.places.iter().take(plan.kept).map(|(id, at)| (id, *at)).collect();
        let order = || (0..plan.kept + plan.repeated).map(|i| (kept[i % plan.kept], i >= plan.kept));
        let places: Vec<(Location, bool)> = order().map(|((_, at), repeated)| (at, repeated)).collect();
        let (mut bytes, mut first) = (0, 0);
        let ends = tables::cuts(order().map(|((id, _), _)| id.as_str()), plan.shard_rows);
        for (shard, &end) in ends.iter().enumerate() {
            bytes += self.shard(bucket, shard, &places[first..end])?;
            first = end;
        }
        Ok((ends.len(), bytes))
    }

    /// Writes one shard; its size.
    fn shard(&mut self, bucket: Bucket, number: usize, rows: &[(Location, bool)]) -> Result<u64, Failure> {
        let shard = format!("shards/{bucket}/{number:05}.arrow");
        let path = self.output.join(&shard);
        let mut writer = ShardWriter::create(&path, self.latents.meta(), bucket).map_err(unwritable)?;
        for &(at, repeated) in rows {
            self.events.check_interrupted("nothing of this stage is kept")?;
            let row = self.latents.get(at).map_err(unreadable)?;
            writer.push(&row.sample_id, &row.caption_digest, repeated, &row.latent).map_err(unwritable)?;
            self.done += 1;
            self.events.progress("packing shards", self.done, Some(self.total), "rows", None);
        }
        let written = writer.finish().map_err(unwritable)?;
        let digest = Digest::of_file(&path).map_err(|e| Failure::from_diagnostic(e).exit(Exit::Io))?;
        let row = ShardRow {
            shard,
            bucket_width: bucket.width as i32,
            bucket_height: bucket.height as i32,
            bucket_frames: bucket.frames as i32,
            rows: written.rows as i64,
            repeated: rows.iter().filter(|(_, repeated)| *repeated).count() as i64,
            bytes: written.bytes as i64,
            digest: digest.to_string(),
        };
        self.shards.push(row).map_err(unwritable)?;
        Ok(written.bytes)
    }
}

fn outcome(taken: usize, reports: &[Report], parameters: &Parameters) -> Outcome {
    let sum = |of: fn(&Report) -> usize| reports.iter().map(of).sum::<usize>();
    let (out, repeated, held) = (sum(|r| r.rows), sum(|r| r.repeated), sum(|r| r.held));
    let count = |n: usize, one: &str| if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") };
    let repeats = if repeated > 0 { format!(" and {}", count(repeated, "repeat")) } else { String::new() };
    let held_back = if held > 0 { format!(", {held} held back") } else { String::new() };
    let bucket = |r: &Report| {
        format!("{} {} ({})", r.rows + r.repeated, r.bucket, count(r.batches, "batch").replace("batchs", "batches"))
    };
    let buckets = reports.iter().map(bucket).collect::<Vec<_>>().join(", ");
    let (rows, shards) = (count(out, "row"), count(sum(|r| r.shards), "shard"));
    let summary = format!("{rows}{repeats}{held_back} in {shards}: {buckets}");
    let ledger = Ledger { taken: taken as u64, out: out as u64, rejected: 0, held: held as u64 };
    let info = serde_json::json!({ "batch_size": parameters.batch_size, "remainder": parameters.remainder, "buckets": reports });
    Outcome { summary, ledger, info }
}

fn unreadable(error: tables::Error) -> Failure {
    let exit = if error.io_kind().is_some() { Exit::Io } else { Exit::Input };
    Failure::from_diagnostic(error).exit(exit)
}

fn unwritable(error: tables::Error) -> Failure {
    let exit = if error.io_kind().is_some() { Exit::Io } else { Exit::Failed };
    Failure::from_diagnostic(error).exit(exit)
}

//! The first pass: which bucket each sample goes to, how many there are, and which captions are distinct.

use std::collections::BTreeMap;

use models::{Clips, Family, ModelFolder};
use serde::Serialize;
use spec::{Bucket, Problem, bucket, counted};
use stage::{Events, Exit, Failure};
use tables::{Location, SampleInfo, TableReader, caption_digest};

use crate::length::{Time, available, taken};
use crate::parameters::{Parameters, Upscale};
use crate::unusable;

/// What the first pass finds.
pub(crate) struct Plan {
    buckets: Vec<Bucket>,
    time: Time,
    parameters: Parameters,
    /// Rows of `samples`.
    pub(crate) rows: u64,
    /// Digest → caption; the empty caption is always among them, for training with dropped captions.
    pub(crate) captions: BTreeMap<String, String>,
    /// Samples that have a bucket, in source order.
    pub(crate) items: Vec<Item>,
    /// The others.
    pub(crate) refused: Vec<(SampleInfo, Refusal)>,
}

/// A sample that is to be encoded: what its latent depends on, and where its media are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Item {
    /// Its row in `samples`.
    pub(crate) at: Location,
    /// Its id.
    pub(crate) sample_id: String,
    /// BLAKE3 of its media bytes.
    pub(crate) digest: String,
    /// Digest of its caption.
    pub(crate) caption: String,
    /// Its bucket.
    pub(crate) bucket: Bucket,
    /// Whether its picture is smaller.
    pub(crate) upscaled: bool,
    /// Whether it is a clip with more frames than are taken.
    pub(crate) cut: bool,
    /// Frames in a second that are taken of it, if it is a clip.
    pub(crate) rate: Option<u32>,
}

/// Samples of a bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Count {
    /// All.
    pub(crate) samples: u64,
    /// Those of them whose picture is smaller than the bucket.
    pub(crate) upscaled: u64,
}

/// Why a sample is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Reason code.
    pub(crate) reason: &'static str,
    /// Detail for a person.
    pub(crate) detail: String,
}

impl Plan {
    /// Reads all rows but not their media.
    pub(crate) fn new(parameters: &Parameters, grid: Grid, samples: &TableReader) -> Result<Self, Failure> {
        let buckets = layout(parameters, grid)
            .map_err(|problems| Failure::new(Exit::Recipe, problems.into_iter().next().unwrap_or_default()))?;
        let captions = BTreeMap::from([(caption_digest(""), String::new())]);
        let (items, refused) = (Vec::new(), Vec::new());
        let (time, parameters) = (grid.time, parameters.clone());
        let mut plan = Self { buckets, time, parameters, rows: 0, captions, items, refused };
        for row in samples.rows::<SampleInfo>() {
            let (at, row) = row.map_err(unusable)?;
            plan.rows += 1;
            match plan.place(&row) {
                Ok(bucket) => {
                    let (caption, upscaled) = (caption_digest(&row.caption), upscales(&row, bucket));
                    let rate = plan.time.clips().filter(|_| row.fps.is_some()).map(|clips| clips.fps);
                    let cut = plan.time.clips().is_some_and(|clips| available(&row, clips) > bucket.frames);
                    let SampleInfo { sample_id, digest, .. } = row;
                    plan.captions.entry(caption.clone()).or_insert(row.caption);
                    plan.items.push(Item { at, sample_id, digest, caption, bucket, upscaled, cut, rate });
                }
                Err(refusal) => plan.refused.push((row, refusal)),
            }
        }
        Ok(plan)
    }

    /// The bucket of a sample, a function of its size and length alone.
    pub(crate) fn place(&self, row: &SampleInfo) -> Result<Bucket, Refusal> {
        let refuse = |reason, detail| Err(Refusal { reason, detail });
        let (buckets, frames) = self.fitting(row)?;
        let Some(bucket) = size(row).and_then(|(width, height)| bucket::choose(&buckets, width, height)) else {
            return refuse("decode", format!("a picture of {}x{} pixels", row.width, row.height));
        };
        let bucket = Bucket { frames, ..bucket };
        if self.parameters.upscale == Upscale::Reject && upscales(row, bucket) {
            return refuse("too_small", format!("{}x{} is smaller than its bucket {bucket}", row.width, row.height));
        }
        Ok(bucket)
    }

    /// Buckets that a sample of this length may go to, and how many frames it gives.
    fn fitting(&self, row: &SampleInfo) -> Result<(Vec<Bucket>, u32), Refusal> {
        let refuse = |reason, detail| Err(Refusal { reason, detail });
        let Some(clips) = self.time.clips() else {
            if row.frames != 1 {
                return refuse(
                    "unsupported",
                    format!("a clip of {}; this model takes pictures", counted(row.frames, "frame")),
                );
            }
            return Ok((self.buckets.clone(), 1));
        };
        let available = available(row, clips);
        if self.parameters.buckets.is_empty() {
            return Ok((self.buckets.clone(), taken(available, clips, &self.parameters)?));
        }
        let is_clip = available > 1;
        let suits = |bucket: &&Bucket| bucket.frames <= available && (bucket.frames > 1) == is_clip;
        match self.buckets.iter().filter(suits).map(|bucket| bucket.frames).max() {
            Some(frames) => {
                Ok((self.buckets.iter().filter(|bucket| bucket.frames == frames).copied().collect(), frames))
            }
            None if is_clip => refuse(
                "too_short",
                format!("{} at {} a second, and no bucket has so few", counted(available, "frame"), clips.fps),
            ),
            None => refuse("no_bucket", "a picture, and no bucket has one frame".to_owned()),
        }
    }

    /// How the model sees time, if it does.
    pub(crate) fn clips(&self) -> Option<Clips> {
        self.time.clips()
    }

    /// Samples of each bucket in use.
    pub(crate) fn counts(&self) -> BTreeMap<Bucket, Count> {
        let mut counts = BTreeMap::<Bucket, Count>::new();
        for item in &self.items {
            let count = counts.entry(item.bucket).or_default();
            count.samples += 1;
            count.upscaled += u64::from(item.upscaled);
        }
        counts
    }

    /// Says what will be done, and what a user may not expect of it.
    pub(crate) fn report(&self, events: &Events) {
        let counts = self.counts();
        let upscaled: u64 = counts.values().map(|count| count.upscaled).sum();
        if upscaled > 0 {
            let of: Vec<_> = (counts.iter().filter(|(_, count)| count.upscaled > 0))
                .map(|(bucket, count)| format!("{bucket}: {} of {}", count.upscaled, count.samples))
                .collect();
            events.warning(format!(
                "smaller than their bucket and enlarged: {upscaled} of {} ({}); `upscale = \"reject\"` leaves them out",
                counted(self.rows, "sample"),
                of.join(", ")
            ));
        }
        let garbled: Vec<&String> = self.captions.values().filter(|text| spec::looks_garbled(text)).collect();
        if let Some(first) = garbled.first() {
            let start: String = first.chars().take(60).collect();
            events.warning(format!(
                "look like text read in the wrong encoding, and are encoded as they are: {} of {}, such as {start:?}",
                garbled.len(),
                counted(self.captions.len(), "caption")
            ));
        }
        let cut = self.items.iter().filter(|item| item.cut).count();
        if cut > 0 {
            events.warning(format!(
                "longer than the frames taken of them, so that they give their beginning: {cut} of {}",
                counted(self.items.len(), "sample")
            ));
        }
    }
}

/// Pixels across and down, if there are any.
pub(crate) fn size(row: &SampleInfo) -> Option<(u32, u32)> {
    let side = |side: i32| u32::try_from(side).ok().filter(|side| *side > 0);
    side(row.width).zip(side(row.height))
}

/// Whether the sample's picture is enlarged to fill the bucket.
pub(crate) fn upscales(row: &SampleInfo, bucket: Bucket) -> bool {
    size(row).is_some_and(|(width, height)| bucket.upscales(width, height))
}

/// What a model says about sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    /// Multiple of which the sides of planned buckets are.
    pub(crate) quantum: u32,
    /// Multiple of which the sides of any picture must be.
    pub(crate) unit: u32,
    /// How it sees time.
    pub(crate) time: Time,
}

impl Grid {
    /// Of a model that is not there yet: anything goes.
    pub(crate) const UNKNOWN: Self = Self { quantum: 1, unit: 1, time: Time::Unknown };

    /// Of a model folder.
    pub(crate) fn of(family: &dyn Family, folder: &ModelFolder) -> models::Result<Self> {
        let time = family.clips(folder)?.map_or(Time::Pictures, Time::Clips);
        Ok(Self { quantum: family.pixel_quantum(folder), unit: family.pixel_unit(folder)?, time })
    }
}

/// The buckets that the parameters ask for, with the model's quantum unless they name one.
pub(crate) fn layout(parameters: &Parameters, grid: Grid) -> Result<Vec<Bucket>, Vec<Problem>> {
    let problems = grid.time.check(parameters);
    if !problems.is_empty() {
        return Err(problems);
    }
    if let Some(quantum) = parameters.quantum.filter(|quantum| *quantum == 0 || quantum % grid.unit != 0) {
        let problem = Problem::new(format!("`quantum` is {quantum}, expected a multiple of {}", grid.unit));
        return Err(vec![problem.help(format!("the model's own is {}", grid.quantum)).field("quantum")]);
    }
    let Some(budget) = parameters.budget() else {
        return parameters.explicit_buckets(parameters.quantum.unwrap_or(grid.unit), grid.time);
    };
    let quantum = parameters.quantum.unwrap_or(grid.quantum);
    let buckets = bucket::plan(budget, quantum, 1);
    if buckets.is_empty() {
        let least = u64::from(quantum) * u64::from(quantum);
        let problem = Problem::new(format!(
            "`max_pixels` is {budget}, which holds no bucket with sides of multiples of {quantum}"
        ))
        .help(format!("set it to {least} or more"))
        .field("max_pixels");
        return Err(vec![problem]);
    }
    Ok(buckets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(width: i32, height: i32, caption: &str) -> SampleInfo {
        SampleInfo {
            sample_id: "0".into(),
            source: "a.png".into(),
            media: "png".into(),
            width,
            height,
            frames: 1,
            fps: None,
            caption: caption.into(),
            digest: "0".into(),
        }
    }

    fn plan(parameters: &str, rows: Vec<SampleInfo>) -> Result<Plan, Failure> {
        plan_of(Time::Pictures, parameters, rows)
    }

    fn plan_of(time: Time, parameters: &str, rows: Vec<SampleInfo>) -> Result<Plan, Failure> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part-00000.parquet");
        tables::write(&path, rows.into_iter().map(|row| row.with(vec![1]))).unwrap();
        Plan::new(
            &serde_json::from_str(parameters).unwrap(),
            Grid { quantum: 64, unit: 16, time },
            &TableReader::open(&path).unwrap(),
        )
    }

    #[test]
    fn tarot_cards_fill_one_bucket_of_the_budget() {
        let rows = vec![row(450, 750, "a"), row(384, 640, "a"), row(300, 527, "b")];
        let plan = plan(r#"{"model": "a/b", "max_pixels": 245760}"#, rows).unwrap();
        let bucket = Bucket { width: 384, height: 640, frames: 1 };
        assert_eq!(plan.counts(), BTreeMap::from([(bucket, Count { samples: 3, upscaled: 1 })]));
        assert_eq!(
            plan.captions.values().collect::<std::collections::BTreeSet<_>>().len(),
            3,
            "a, b and the empty one"
        );
    }

    #[test]
    fn the_policy_refuses_what_it_would_have_to_enlarge() {
        let plan =
            plan(r#"{"model": "a/b", "buckets": ["384x640"], "upscale": "reject"}"#, vec![row(384, 639, "")]).unwrap();
        assert_eq!(plan.place(&row(384, 639, "")).unwrap_err().reason, "too_small");
        assert!(plan.place(&row(384, 640, "")).is_ok());
        assert_eq!((plan.items.len(), plan.refused.len()), (0, 1));
    }

    #[test]
    fn clips_and_pictures_go_to_buckets_of_their_length() {
        let wan = Time::Clips(models::Clips { stride: 4, fps: 16 });
        let clip = |frames, fps| SampleInfo { frames, fps: Some(fps), ..row(640, 384, "") };
        let rows = || vec![clip(33, 16.0), clip(130, 24.0), clip(17, 30.0), row(640, 384, "")];
        let buckets = |plan: &Plan| plan.items.iter().map(|item| item.bucket.to_string()).collect::<Vec<_>>();
        let free = plan_of(wan, r#"{"model": "a/b", "max_pixels": 245760}"#, rows()).unwrap();
        assert_eq!(buckets(&free), ["640x384x33", "640x384x81", "640x384x9", "640x384"]);
        assert_eq!(
            free.items.iter().map(|item| (item.cut, item.rate)).collect::<Vec<_>>()[1..],
            [(true, Some(16)), (false, Some(16)), (false, None)]
        );
        let asked = plan_of(wan, r#"{"model": "a/b", "max_pixels": 245760, "frames": 33}"#, rows()).unwrap();
        assert_eq!(buckets(&asked), ["640x384x33", "640x384x33", "640x384"]);
        assert_eq!(asked.refused[0].1.reason, "too_short");
        let explicit = r#"{"model": "a/b", "buckets": ["640x384x17", "640x384x81"]}"#;
        let explicit = plan_of(wan, explicit, rows()).unwrap();
        assert_eq!(buckets(&explicit), ["640x384x17", "640x384x81"]);
        assert_eq!(
            explicit.refused.iter().map(|(_, refusal)| refusal.reason).collect::<Vec<_>>(),
            ["too_short", "no_bucket"]
        );
        let failure = plan_of(wan, r#"{"model": "a/b", "buckets": ["640x384x16"]}"#, vec![]).err().unwrap();
        assert!(failure.problem.message.contains("1 + 4 n"), "{}", failure.problem.message);
    }

    #[test]
    fn a_budget_below_one_quantum_says_how_much_is_needed() {
        let failure = plan(r#"{"model": "a/b", "max_pixels": 4095}"#, vec![]).err().unwrap();
        assert_eq!((failure.exit, failure.problem.field.as_deref()), (Exit::Recipe, Some("max_pixels")));
        assert!(failure.problem.help.unwrap().contains("4096"));
    }
}

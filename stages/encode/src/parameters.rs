//! What a recipe's `[encode]` table may say, and what of it is semantic.

use nn::Dtype;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spec::bucket::NotABucket;
use spec::{Bucket, Problem, counted};
use stage::Colour;

use crate::length::{Time, wrong_count};

/// What changes the result.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    /// A diffusers folder or a Hub id (`OWNER/NAME`, `OWNER/NAME@REVISION`), whose VAE and text encoders are used.
    pub model: String,
    /// Pixels a bucket may have at most: buckets of many aspect ratios are laid out under it. 262144 when `buckets` is absent, too.
    #[serde(default)]
    pub max_pixels: Option<u64>,
    /// Exactly these buckets instead, such as `["384x640"]`, with frames for clips: `["832x480x81", "832x480"]`.
    #[serde(default)]
    pub buckets: Vec<String>,
    /// Multiple of which bucket sides are; the model's own when absent.
    #[serde(default)]
    pub quantum: Option<u32>,
    /// What to do with a picture smaller than its bucket.
    #[serde(default)]
    pub upscale: Upscale,
    /// Frames of every clip, at the model's frames per second; longer clips give their beginning, shorter ones are refused.
    #[serde(default)]
    pub frames: Option<u32>,
    /// Frames of a clip at most, when `frames` is absent: 81. A shorter clip gives all that it has.
    #[serde(default)]
    pub max_frames: Option<u32>,
    /// What to do with a clip whose number of frames the model cannot take, when `frames` is absent; `trim` when this is, too.
    #[serde(default)]
    pub frame_rule: Option<FrameRule>,
    /// Encodes large pictures in overlapping tiles: less memory, and values that differ a little along the seams. For VAEs that can.
    #[serde(default)]
    pub vae_tiling: bool,
    /// Tokens to which the long text encoder pads and cuts.
    #[serde(default = "default_max_sequence_length")]
    pub max_sequence_length: u32,
    /// Number format in which VAE and text encoders compute.
    #[serde(default)]
    pub dtype: Dtype,
    /// Colour under the transparent parts of a picture, as `#rrggbb`; white when absent.
    #[serde(default)]
    pub background: Colour,
    /// Which point of the VAE's posterior is stored.
    #[serde(default)]
    pub posterior: Posterior,
    /// Seed of `posterior = "sample"`; each sample draws its own noise from it.
    #[serde(default)]
    pub seed: u64,
}

/// What does not change the result.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Pictures in a batch on a GPU, 8 when absent. A CPU takes one on each thread.
    pub batch_size: Option<usize>,
    /// Captions in a batch on a GPU, 32 when absent. A CPU takes one on each thread.
    pub text_batch_size: Option<usize>,
}

/// Policy for pictures that would have to be enlarged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Upscale {
    /// Enlarge, and count.
    #[default]
    Allow,
    /// Refuse, into `rejects`.
    Reject,
}

/// Policy for clips with a number of frames that the model cannot take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FrameRule {
    /// Leave out the last frames.
    #[default]
    Trim,
    /// Repeat the last frame.
    Pad,
    /// Refuse, into `rejects`.
    Reject,
}

/// Which point of the posterior.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Posterior {
    /// Its mean.
    #[default]
    Mean,
    /// A draw, a function of (`seed`, sample id).
    Sample,
}

/// Pixels per bucket when the recipe names neither budget nor buckets.
pub(crate) const DEFAULT_MAX_PIXELS: u64 = 512 * 512;

fn default_max_sequence_length() -> u32 {
    512
}

impl Parameters {
    /// The pixel budget, unless buckets are explicit.
    pub(crate) fn budget(&self) -> Option<u64> {
        self.buckets.is_empty().then(|| self.max_pixels.unwrap_or(DEFAULT_MAX_PIXELS))
    }

    /// The semantic parameters with defaults filled in, without the model's location, and without what has no effect.
    pub(crate) fn key(&self) -> Value {
        json!({
            "frames": self.frames,
            "max_frames": self.max_frames,
            "frame_rule": self.frame_rule,
            "pictures": self.picture_key(),
            "captions": self.caption_key(),
            "buckets": if self.buckets.is_empty() { Value::Null } else { json!(self.buckets) },
            "max_pixels": self.budget(),
            "quantum": self.quantum,
            "upscale": self.upscale,
            "background": self.background,
        })
    }

    /// What decides a latent, apart from its picture, its bucket and the VAE.
    pub(crate) fn picture_key(&self) -> Value {
        let seed = (self.posterior == Posterior::Sample).then_some(self.seed);
        let mut key = json!({ "dtype": self.dtype, "posterior": self.posterior, "seed": seed });
        if self.vae_tiling {
            key["vae_tiling"] = true.into();
        }
        key
    }

    /// What decides an embedding, apart from its caption and the text encoders.
    pub(crate) fn caption_key(&self) -> Value {
        json!({ "dtype": self.dtype, "max_sequence_length": self.max_sequence_length })
    }

    /// The explicit buckets, sorted, without repeats; sides must be multiples of `quantum`.
    pub(crate) fn explicit_buckets(&self, quantum: u32, time: Time) -> Result<Vec<Bucket>, Vec<Problem>> {
        let parsed = self.buckets.iter().map(|written| parse_bucket(written, quantum, time));
        let (good, bad): (Vec<_>, Vec<_>) = parsed.partition(Result::is_ok);
        let problems: Vec<_> = bad.into_iter().filter_map(Result::err).collect();
        let mut buckets: Vec<_> = good.into_iter().flatten().collect();
        buckets.sort_unstable();
        buckets.dedup();
        if problems.is_empty() { Ok(buckets) } else { Err(problems) }
    }
}

fn parse_bucket(written: &str, quantum: u32, time: Time) -> Result<Bucket, Problem> {
    let bucket: Bucket =
        written.parse().map_err(|error: NotABucket| Problem::new(error.to_string()).field("buckets"))?;
    if let Some(clips) = time.clips().filter(|clips| !clips.allows(bucket.frames)) {
        return Err(wrong_count(written, bucket.frames, clips).field("buckets"));
    }
    if bucket.frames != 1 && time == Time::Pictures {
        let problem = Problem::new(format!(
            "bucket `{written}` has {}; this model takes pictures",
            counted(bucket.frames, "frame")
        ));
        return Err(problem.help(format!("write `{}x{}`", bucket.width, bucket.height)).field("buckets"));
    }
    if !bucket.width.is_multiple_of(quantum) || !bucket.height.is_multiple_of(quantum) {
        let near = |side: u32| (side.saturating_add(quantum / 2) / quantum * quantum).max(quantum);
        let problem = Problem::new(format!("the sides of bucket `{written}` are not multiples of {quantum}"));
        return Err(problem
            .help(format!("the nearest is `{}x{}`", near(bucket.width), near(bucket.height)))
            .field("buckets"));
    }
    Ok(bucket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(text: &str) -> Parameters {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_key_moves_with_what_matters_and_only_with_it() {
        let key = |text: &str| parameters(text).key();
        let base = key(r#"{"model": "a/b"}"#);
        for same in [
            r#"{"model": "/elsewhere"}"#,
            r#"{"model": "a/b@v1"}"#,
            r#"{"model": "a/b", "max_pixels": 262144, "seed": 3, "posterior": "mean"}"#,
        ] {
            assert_eq!(key(same), base, "{same}");
        }
        for other in [
            r#"{"model": "a/b", "max_pixels": 65536}"#,
            r#"{"model": "a/b", "buckets": ["64x64"]}"#,
            r#"{"model": "a/b", "quantum": 32}"#,
            r#"{"model": "a/b", "upscale": "reject"}"#,
            r#"{"model": "a/b", "max_sequence_length": 256}"#,
            r#"{"model": "a/b", "dtype": "bfloat16"}"#,
            r#"{"model": "a/b", "posterior": "sample"}"#,
            r#"{"model": "a/b", "vae_tiling": true}"#,
            r#"{"model": "a/b", "frames": 17}"#,
            r#"{"model": "a/b", "max_frames": 33}"#,
            r#"{"model": "a/b", "frame_rule": "pad"}"#,
            r##"{"model": "a/b", "background": "#000000"}"##,
        ] {
            assert_ne!(key(other), base, "{other}");
        }
        assert_ne!(
            key(r#"{"model": "a/b", "posterior": "sample", "seed": 1}"#),
            key(r#"{"model": "a/b", "posterior": "sample", "seed": 2}"#)
        );
    }

    #[test]
    fn bad_buckets_are_all_reported_with_the_nearest_good_one() {
        let parameters = parameters(r#"{"model": "a/b", "buckets": ["384x640", "400x600", "384", "0x64", "384x640"]}"#);
        let problems = parameters.explicit_buckets(64, Time::Pictures).unwrap_err();
        assert_eq!(problems.len(), 3);
        assert!(problems[0].help.as_ref().unwrap().contains("384x576"), "{:?}", problems[0]);
        assert!(problems.iter().all(|problem| problem.field.as_deref() == Some("buckets")));
    }
}

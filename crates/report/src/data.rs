//! What the page asks the tables. Every answer is small: grouped or limited by the query itself.

use std::collections::BTreeMap;

use query::Session;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Points of a curve.
const POINTS: i64 = 400;
/// Rows of a list.
pub(crate) const ROWS: usize = 24;
/// Bins of the noise level.
pub(crate) const BINS: usize = 10;
/// Samples shown as the hardest.
const HARDEST: usize = 8;

/// The answers.
#[derive(Debug, Default)]
pub(crate) struct Data {
    /// Table → rows.
    pub(crate) tables: BTreeMap<String, u64>,
    pub(crate) totals: Totals,
    pub(crate) curve: Vec<Point>,
    pub(crate) sigmas: Vec<SigmaBin>,
    pub(crate) validation: Vec<Round>,
    pub(crate) buckets: Vec<Bucket>,
    pub(crate) rejects: Vec<Refusal>,
    pub(crate) held: Vec<Held>,
    pub(crate) hardest: Vec<Hard>,
    /// Tables that did not answer, and why.
    pub(crate) problems: Vec<String>,
}

/// Sums over all steps.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Totals {
    pub(crate) steps: i64,
    pub(crate) first: Option<i64>,
    pub(crate) last: Option<i64>,
    pub(crate) epochs: Option<i64>,
    pub(crate) seconds: Option<f64>,
    pub(crate) samples: Option<i64>,
    pub(crate) memory: Option<i64>,
}

/// The mean of some consecutive steps.
#[derive(Debug, Deserialize)]
pub(crate) struct Point {
    pub(crate) step: i64,
    pub(crate) loss: Option<f64>,
    pub(crate) low: Option<f64>,
    pub(crate) high: Option<f64>,
    pub(crate) lr: Option<f64>,
    pub(crate) grad: Option<f64>,
}

/// Losses at noise levels in [bin, bin + 1) / [`BINS`], in the first and the second half of the steps.
#[derive(Debug, Deserialize)]
pub(crate) struct SigmaBin {
    pub(crate) bin: i64,
    pub(crate) n: i64,
    pub(crate) early: Option<f64>,
    pub(crate) late: Option<f64>,
}

/// Validation at a step and noise level.
#[derive(Debug, Deserialize)]
pub(crate) struct Round {
    pub(crate) step: i64,
    pub(crate) sigma: f64,
    pub(crate) loss: Option<f64>,
}

/// A bucket of the latents.
#[derive(Debug, Deserialize)]
pub(crate) struct Bucket {
    pub(crate) width: i64,
    pub(crate) height: i64,
    pub(crate) frames: i64,
    pub(crate) n: i64,
    /// Samples smaller than the bucket.
    pub(crate) enlarged: i64,
}

/// Refused rows of one reason.
#[derive(Debug, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) stage: String,
    pub(crate) reason: String,
    pub(crate) n: i64,
    pub(crate) source: Option<String>,
    pub(crate) detail: Option<String>,
}

/// Held back rows of one reason.
#[derive(Debug, Deserialize)]
pub(crate) struct Held {
    pub(crate) reason: String,
    pub(crate) bucket: String,
    pub(crate) n: i64,
}

/// A sample with a high loss.
#[derive(Debug, Deserialize)]
pub(crate) struct Hard {
    pub(crate) sample_id: String,
    /// Mean loss above that of all samples at the same noise levels.
    pub(crate) excess: f64,
    pub(crate) n: i64,
}

impl Data {
    pub(crate) fn read(session: &Session) -> Self {
        let mut asked = Asked { session, problems: Vec::new() };
        let mut data = Self { tables: asked.counts(), ..Self::default() };
        asked.training(&mut data);
        data.buckets = asked.rows(
            "latents",
            &format!(
                "select bucket_width width, bucket_height height, bucket_frames frames, count(*) n, \
                 sum(case when scale > 1 then 1 else 0 end) enlarged \
                 from latents group by 1, 2, 3 order by n desc, 1, 2, 3 limit {}",
                ROWS * 8
            ),
        );
        data.rejects = asked.rows(
            "rejects",
            &format!(
                "select stage, reason, count(*) n, min(source) source, min(detail) detail \
                 from rejects group by 1, 2 order by n desc, 1, 2 limit {ROWS}"
            ),
        );
        data.held = asked.rows(
            "held",
            &format!("select reason, bucket, count(*) n from held group by 1, 2 order by n desc, 1, 2 limit {ROWS}"),
        );
        data.problems = asked.problems;
        data
    }
}

struct Asked<'a> {
    session: &'a Session,
    problems: Vec<String>,
}

impl Asked<'_> {
    /// The answer; nothing if the table is not there, or if it has other columns, which is told on the page.
    fn rows<T: DeserializeOwned>(&mut self, table: &str, sql: &str) -> Vec<T> {
        if !self.session.tables().contains(table) {
            return Vec::new();
        }
        self.session.rows(sql).unwrap_or_else(|error| {
            self.problems.push(format!("`{table}`: {error}"));
            Vec::new()
        })
    }

    fn counts(&mut self) -> BTreeMap<String, u64> {
        #[derive(Deserialize)]
        struct Count {
            n: u64,
        }
        let mut counts = BTreeMap::new();
        for table in self.session.tables() {
            let quoted = table.replace('"', "\"\"");
            let rows: Vec<Count> = self.rows(table, &format!("select count(*) n from \"{quoted}\""));
            counts.extend(rows.first().map(|count| (table.clone(), count.n)));
        }
        counts
    }

    fn training(&mut self, data: &mut Data) {
        let totals: Vec<Totals> = self.rows(
            "steps",
            "select count(*) steps, min(step) first, max(step) last, max(epoch) + 1 epochs, sum(seconds) seconds, \
             sum(samples) samples, max(memory_bytes) memory from steps",
        );
        data.totals = totals.into_iter().next().unwrap_or_default();
        let (Some(first), Some(last)) = (data.totals.first, data.totals.last) else { return };
        let span = last.saturating_sub(first).saturating_add(1);
        let merged = span.saturating_add(POINTS - 1) / POINTS;
        data.curve = self.rows(
            "steps",
            &format!(
                "select min(step) step, avg(loss) loss, min(loss) low, max(loss) high, avg(lr) lr, avg(grad_norm) grad \
                 from steps group by (step - {first}) / {merged} order by 1"
            ),
        );
        let bin = format!("case when sigma >= 1 then {} else cast(floor(sigma * {BINS}) as bigint) end", BINS - 1);
        let half = first + span / 2;
        data.sigmas = self.rows(
            "losses",
            &format!(
                "select {bin} bin, count(*) n, avg(case when step < {half} then loss end) early, \
                 avg(case when step >= {half} then loss end) late from losses group by 1 order by 1"
            ),
        );
        data.validation = self.rows(
            "validation",
            &format!(
                "select min(step) step, sigma, avg(loss) loss from validation \
                 group by step / {}, sigma order by 1, 2 limit {}",
                (span / 200).max(1),
                POINTS * 10
            ),
        );
        data.hardest = self.rows(
            "losses",
            &format!(
                "with l as (select sample_id, loss, {bin} bin from losses), \
                 m as (select bin, avg(loss) mean from l group by bin) \
                 select sample_id, avg(loss - mean) excess, count(*) n from l join m using (bin) \
                 group by sample_id order by excess desc, sample_id limit {HARDEST}"
            ),
        );
    }
}

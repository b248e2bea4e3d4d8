//! The sections of the page; one that has nothing to show is left out.

use maud::{Markup, html};
use serde_json::Value;

use crate::chart::{Frame, Line, bars, lines, smoothed};
use crate::data::{BINS, Data, ROWS};
use crate::facts::{Run, Stage, Status};
use crate::pictures::{Pictures, Shown};
use crate::text::{bytes, count, duration, foreign, many};

/// Colours of lines that belong in an order, from the style sheet.
const RAMP: [&str; 8] = ["r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7"];

pub(crate) fn stages(run: &Run) -> Markup {
    let longest = run.stages.iter().map(|stage| stage.seconds).fold(1e-9, f64::max);
    html! {
        div.scroll {
            table.stages {
                thead { tr { th { "stage" } th.n { "time" } th.n { "in" } th.n { "out" } th.n { "refused" } th.n { "held" } th.n { "size" } } }
                tbody {
                    @for stage in &run.stages { (stage_row(stage, longest)) }
                }
            }
        }
    }
}

fn stage_row(stage: &Stage, longest: f64) -> Markup {
    let ran = matches!(stage.status, Status::Made | Status::Failed | Status::Interrupted);
    html! {
        tr {
            td {
                i.mark.(stage.status.class()) {} b { (stage.name) } " " span.word { (stage.status.word()) }
                small { @if !matches!(stage.status, Status::Cached | Status::NotRun) { (foreign(&stage.reason, 200)) } }
            }
            td.n {
                @if ran {
                    (duration(stage.seconds))
                    span.share style={ "width:" (format!("{:.0}", (stage.seconds / longest * 100.0).clamp(2.0, 100.0))) "%" } {}
                } @else if let Some(result) = &stage.result {
                    span.muted title="when it was made" { "(" (duration(result.seconds)) ")" }
                }
            }
            @match &stage.result {
                Some(result) => {
                    td.n { (count(result.ledger.taken)) }
                    td.n { (count(result.ledger.out)) }
                    td.n.warn[result.ledger.rejected > 0] { (count(result.ledger.rejected)) }
                    td.n.warn[result.ledger.held > 0] { (count(result.ledger.held)) }
                    td.n { (bytes(result.bytes)) }
                }
                None => { td.n { "–" } td.n { "–" } td.n { "–" } td.n { "–" } td.n { "–" } }
            }
        }
    }
}

/// Weight of the past in a smoothed curve: the more points, the more.
fn keep(points: usize) -> f64 {
    (1.0 - 10.0 / points.max(1) as f64).clamp(0.6, 0.98)
}

/// First and last value of the smoothed loss.
pub(crate) fn loss_ends(data: &Data) -> Option<(f64, f64)> {
    let raw: Vec<_> = data.curve.iter().map(|point| (point.step as f64, point.loss)).collect();
    let smooth = smoothed(&raw, keep(raw.len()));
    // The first value is one step's alone; a few steps in, it is a mean.
    let first = smooth.iter().skip(raw.len().min(10) / 2).find_map(|(_, value)| *value);
    Some((first?, smooth.last()?.1?))
}

pub(crate) fn training(data: &Data) -> Markup {
    if data.curve.is_empty() {
        return html! {};
    }
    let curve = |of: fn(&crate::data::Point) -> Option<f64>| -> Vec<(f64, Option<f64>)> {
        data.curve.iter().map(|point| (point.step as f64, of(point))).collect()
    };
    let charts: Vec<Markup> = [loss(data, &curve(|p| p.loss)), per_sigma(data), validation(data)]
        .into_iter()
        .chain([("Learning rate", "a", curve(|p| p.lr), true), ("Gradient norm", "a", curve(|p| p.grad), true)].map(
            |(title, class, points, from_zero)| {
                let about = if title == "Gradient norm" { "before clipping" } else { "" };
                let frame = Frame { title, about, axis: "step", from_zero };
                lines(&frame, None, &[Line { name: title.to_lowercase(), class, points }])
            },
        ))
        .flatten()
        .collect();
    let totals = &data.totals;
    html! {
        section {
            h2 { "Training" }
            p.muted {
                (many(totals.steps as u64, "step"))
                @if let Some(epochs) = totals.epochs { " in " (many(epochs as u64, "epoch")) }
                @if let Some(samples) = totals.samples { " · " (many(samples as u64, "sample")) " seen" }
                @if let Some(seconds) = totals.seconds { " · " (duration(seconds)) }
            }
            div.charts { @for chart in &charts { (chart) } }
        }
    }
}

fn loss(data: &Data, raw: &[(f64, Option<f64>)]) -> Option<Markup> {
    let weight = keep(raw.len());
    let merged = data.totals.steps as usize > data.curve.len();
    let about = if merged {
        format!(
            "each point is the mean of about {} steps; the band spans them",
            data.totals.steps as usize / data.curve.len()
        )
    } else {
        String::new()
    };
    let band: Vec<_> = data.curve.iter().filter_map(|p| Some((p.step as f64, p.low?, p.high?))).collect();
    let smooth = Line { name: format!("smoothed ({weight:.2})"), class: "a", points: smoothed(raw, weight) };
    let raw = Line { name: "raw".to_owned(), class: "raw", points: raw.to_vec() };
    let frame = Frame { title: "Loss", about: &about, axis: "step", from_zero: false };
    lines(&frame, merged.then_some(&band), &[raw, smooth])
}

fn per_sigma(data: &Data) -> Option<Markup> {
    let label = |bin: i64| format!("{:.1}", bin as f64 / BINS as f64);
    let groups: Vec<_> =
        data.sigmas.iter().map(|bin| (label(bin.bin), many(bin.n as u64, "draw"), bin.early, bin.late)).collect();
    let frame = Frame {
        title: "Loss by noise level",
        about: "mean over the draws from each σ to the next",
        axis: "σ",
        from_zero: true,
    };
    bars(&frame, [("first half", "b"), ("second half", "a")], &groups)
}

fn validation(data: &Data) -> Option<Markup> {
    let mut levels: Vec<f64> = data.validation.iter().map(|round| round.sigma).collect();
    levels.sort_by(f64::total_cmp);
    levels.dedup();
    let mut steps: Vec<i64> = data.validation.iter().map(|round| round.step).collect();
    steps.sort_unstable();
    steps.dedup();
    let mean = |step: i64| {
        let losses: Vec<f64> = data.validation.iter().filter(|r| r.step == step).filter_map(|r| r.loss).collect();
        (!losses.is_empty()).then(|| losses.iter().sum::<f64>() / losses.len() as f64)
    };
    let of_level = |level: f64| {
        data.validation.iter().filter(|r| r.sigma == level).map(|r| (r.step as f64, r.loss)).collect::<Vec<_>>()
    };
    let mut drawn = Vec::new();
    if levels.len() > 1 && levels.len() <= RAMP.len() {
        for (i, level) in levels.iter().enumerate() {
            let class = RAMP[i * (RAMP.len() - 1) / (levels.len() - 1)];
            drawn.push(Line { name: format!("σ {level:.2}").replace("0.", "."), class, points: of_level(*level) });
        }
    }
    let points = steps.iter().map(|step| (*step as f64, mean(*step))).collect();
    drawn.push(Line { name: "mean".to_owned(), class: "strong", points });
    lines(
        &Frame { title: "Validation loss", about: "same samples and noise every time", axis: "step", from_zero: false },
        None,
        &drawn,
    )
}

pub(crate) fn pictures(data: &Data, pictures: &Pictures) -> Markup {
    let total = data.tables.get("images").copied().unwrap_or(0);
    html! {
        @if !pictures.generated.is_empty() || !pictures.sheets.is_empty() || !pictures.previews.is_empty() {
            section {
                h2 { "Pictures" }
                @if !pictures.previews.is_empty() {
                    h3 { "While training" }
                    div.strip {
                        @for (step, shown) in &pictures.previews {
                            div.round { small { "after step " (step) } @for picture in shown { (figure(picture)) } }
                        }
                    }
                }
                @if !pictures.generated.is_empty() {
                    h3 { "Generated" (shown_of(pictures.generated.len(), total)) }
                    div.gallery.medium { @for picture in &pictures.generated { (figure(picture)) } }
                }
                @for sheet in &pictures.sheets { div.sheet { (figure(sheet)) } }
            }
        }
    }
}

fn shown_of(shown: usize, total: u64) -> Markup {
    html! { @if total > shown as u64 { " " small { "the first " (shown) " of " (count(total)) } } }
}

fn figure(picture: &Shown) -> Markup {
    let caption = foreign(&picture.caption, 400);
    html! {
        figure.picture {
            @match &picture.data {
                Ok(data) => img src=(data) width=(picture.size.0) height=(picture.size.1) alt=(caption) loading="lazy";,
                Err(reason) => div.nopicture { (foreign(reason, 160)) },
            }
            @if !caption.is_empty() || !picture.detail.is_empty() {
                figcaption title=(caption) { bdi.says { (caption) } @if !picture.detail.is_empty() { small { bdi { (foreign(&picture.detail, 120)) } } } }
            }
        }
    }
}

pub(crate) fn samples(data: &Data, pictures: &Pictures) -> Markup {
    let total = data.tables.get("samples").copied().unwrap_or(0);
    let nothing =
        data.buckets.is_empty() && data.rejects.is_empty() && data.held.is_empty() && pictures.samples.is_empty();
    if nothing {
        return html! {};
    }
    html! {
        section {
            h2 { "Samples" }
            div.halves {
                (buckets(data))
                (refusals(data))
            }
            @if !pictures.hardest.is_empty() {
                h3 { "Hardest to learn " small { "loss above the mean of all samples at the same noise levels" } }
                div.gallery { @for picture in &pictures.hardest { (figure(picture)) } }
            }
            @if !pictures.samples.is_empty() {
                h3 { "Training pictures" (shown_of(pictures.samples.len(), total)) }
                div.gallery { @for picture in &pictures.samples { (figure(picture)) } }
            }
        }
    }
}

fn buckets(data: &Data) -> Markup {
    let most = data.buckets.iter().map(|bucket| bucket.n).max().unwrap_or(1).max(1);
    let enlarged: i64 = data.buckets.iter().map(|bucket| bucket.enlarged).sum();
    let rest = data.buckets.get(ROWS..).unwrap_or_default();
    html! {
        @if !data.buckets.is_empty() {
            div {
                h3 { "Buckets" }
                div.histogram {
                    @for bucket in data.buckets.iter().take(ROWS) {
                        @let side = 20.0 / bucket.width.max(bucket.height).max(1) as f64;
                        span.shape { i style={ "width:" (format!("{:.0}", bucket.width as f64 * side)) "px;height:" (format!("{:.0}", bucket.height as f64 * side)) "px" } {} }
                        span.name { (bucket.width) "×" (bucket.height) @if bucket.frames > 1 { "×" (bucket.frames) } }
                        span.bar { i style={ "width:" (format!("{:.1}", bucket.n as f64 / most as f64 * 100.0)) "%" } {} }
                        span.n { (count(bucket.n as u64)) }
                    }
                }
                @if !rest.is_empty() {
                    p.muted { "and " (many(rest.len() as u64, "smaller bucket")) " with " (many(rest.iter().map(|b| b.n as u64).sum(), "sample")) }
                }
                @if enlarged > 0 { p.muted { (many(enlarged as u64, "picture")) " smaller than the bucket, and so enlarged" } }
            }
        }
    }
}

fn refusals(data: &Data) -> Markup {
    html! {
        div {
            h3 { "Refused and held back" }
            @if data.rejects.is_empty() && data.held.is_empty() { p.muted { "nothing: every sample went through" } }
            @if !data.rejects.is_empty() {
                div.scroll { table {
                    thead { tr { th { "stage" } th { "reason" } th.n { "rows" } th { "such as" } } }
                    tbody { @for reject in &data.rejects {
                        tr {
                            td { (foreign(&reject.stage, 40)) } td { (foreign(&reject.reason, 60)) } td.n { (count(reject.n as u64)) }
                            td.small { bdi { (foreign(reject.source.as_deref().unwrap_or_default(), 80)) } " " span.muted { bdi { (foreign(reject.detail.as_deref().unwrap_or_default(), 200)) } } }
                        }
                    } }
                } }
                (more(data.rejects.len()))
            }
            @if !data.held.is_empty() {
                div.scroll { table {
                    thead { tr { th { "held back, because it" } th { "bucket" } th.n { "rows" } } }
                    tbody { @for held in &data.held {
                        tr { td { (foreign(&held.reason, 160)) } td { (foreign(&held.bucket, 40)) } td.n { (count(held.n as u64)) } }
                    } }
                } }
                (more(data.held.len()))
            }
        }
    }
}

fn more(rows: usize) -> Markup {
    html! { @if rows == ROWS { p.muted { "there may be more reasons; `pipeline sql` shows all" } } }
}

pub(crate) fn exact(run: &Run, data: &Data) -> Markup {
    html! {
        section {
            h2 { "Exactly" }
            p.muted { "pipeline " (run.version) " · what each stage depended on, and what came out" }
            @for stage in &run.stages { (details(stage)) }
            @if !run.text.is_empty() {
                details { summary { b { "recipe" } " as it was when this page was written" } pre { (foreign_lines(&run.text)) } }
            }
            @if !data.tables.is_empty() {
                details {
                    summary { b { "tables" } " " span.muted { "pipeline sql RECIPE \"select …\"" } }
                    table { tbody { @for (table, rows) in &data.tables { tr { td { code { (table) } } td.n { (many(*rows, "row")) } } } } }
                }
            }
        }
    }
}

fn details(stage: &Stage) -> Markup {
    html! {
        details {
            summary {
                b { (stage.name) }
                @if let Some(result) = &stage.result { " step version " (result.version) }
                " " code { (stage.key.get(..12).unwrap_or(&stage.key)) }
            }
            dl {
                @if !stage.key.is_empty() { dt { "key" } dd { code { (stage.key) } } }
                @if let Some(result) = &stage.result {
                    dt { "digest" } dd { code { (result.digest) } }
                    dt { "lies in" } dd { code { (result.path.display()) } }
                    dt { "files" } dd { (count(result.files.len() as u64)) ", " (bytes(result.bytes)) }
                    @if !result.summary.is_empty() { dt { "says" } dd { (foreign(&result.summary, 1000)) } }
                    @for source in &result.sources {
                        dt { (source.name) }
                        dd { (foreign(&source.location, 400)) @if let Some(commit) = &source.commit { " at " code { (commit) } } br; code { (source.digest) } }
                    }
                }
                @if stage.status != Status::NotRun { dt { "ran on" } dd { (stage.device) ", " (many(stage.threads as u64, "thread")) } }
                @for (input, from) in &stage.inputs { dt { (input) } dd { "from " (from) } }
                @for note in stage.notes.iter().take(60) { dt { "note" } dd { (foreign(note, 400)) } }
            }
            @if let Some(result) = &stage.result {
                h4 { "parameters" } pre { (pretty(&result.parameters)) }
                @if !result.info.is_null() { h4 { "facts" } pre { (pretty(&result.info)) } }
            }
        }
    }
}

/// JSON for people, at most as long as a page can bear.
fn pretty(value: &Value) -> String {
    const MOST: usize = 40_000;
    foreign_lines(&serde_json::to_string_pretty(value).unwrap_or_default().chars().take(MOST).collect::<String>())
}

fn foreign_lines(text: &str) -> String {
    text.lines().take(2000).map(|line| foreign(line, 2000)).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::number;

    #[test]
    fn the_past_weighs_more_in_longer_curves() {
        assert_eq!([keep(5), keep(100), keep(100_000)], [0.6, 0.9, 0.98]);
    }

    #[test]
    fn a_summary_of_loss_needs_a_loss() {
        assert_eq!(loss_ends(&Data::default()), None);
        let point =
            |step: i64| crate::data::Point { step, loss: Some(2.0), low: None, high: None, lr: None, grad: None };
        let data = Data { curve: (0..20).map(point).collect(), ..Data::default() };
        assert_eq!(loss_ends(&data).map(|(a, b)| (number(a), number(b))), Some(("2".into(), "2".into())));
    }
}

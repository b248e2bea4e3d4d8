//! The page as a whole: head, summary, and the sections in order.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::data::Data;
use crate::facts::{Run, Status};
use crate::graph;
use crate::pictures::Pictures;
use crate::sections;
use crate::text::{bytes, count, duration, foreign, number};

const STYLE: &str = include_str!("style.css");
/// Nothing is loaded from anywhere and nothing runs, whatever a caption says.
const POLICY: &str = "default-src 'none'; img-src data:; style-src 'unsafe-inline'";

pub(crate) fn render(run: &Run, data: &Data, pictures: &Pictures) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                title { (foreign(&run.recipe, 80)) " · run " (run.number) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    (head(run))
                    (tiles(run, data))
                    (troubles(run, data))
                    section {
                        h2 { "Stages" }
                        div.split {
                            div.scroll { (graph::draw(run)) }
                            (sections::stages(run))
                        }
                    }
                    (sections::training(data))
                    (sections::pictures(data, pictures))
                    (sections::samples(data, pictures))
                    (sections::exact(run, data))
                }
                footer { "pipeline " (run.version) " · this page is one file and loads nothing" }
            }
        }
    }
}

/// How the run ended: word and class.
fn outcome(run: &Run) -> (&'static str, &'static str) {
    let has = |status| run.stages.iter().any(|stage| stage.status == status);
    match run.exit {
        Some(0) if has(Status::Made) => ("done", "made"),
        Some(0) => ("all cached", "cached"),
        Some(130) => ("interrupted", "interrupted"),
        Some(_) => ("failed", "failed"),
        None => ("unfinished", "interrupted"),
    }
}

fn head(run: &Run) -> Markup {
    let (word, class) = outcome(run);
    html! {
        header {
            h1 { (foreign(&run.recipe, 80)) " " span.badge.(class) { (word) } }
            p.muted {
                "run " (run.number) " · " (run.started.replace('T', " ").trim_end_matches('Z')) " UTC · " (duration(run.seconds))
                @for text in &run.overrides { " · " code { (foreign(text, 120)) } }
            }
        }
    }
}

fn tiles(run: &Run, data: &Data) -> Markup {
    let mut tiles: Vec<(String, String, &str)> = Vec::new();
    let rows = |table: &str| data.tables.get(table).copied();
    let plural = |n: u64, one: &str| if n == 1 { one.to_owned() } else { format!("{one}s") };
    if let Some(n) = rows("samples") {
        tiles.push((count(n), plural(n, "sample"), ""));
    }
    let ledger = |of: fn(&crate::facts::Ledger) -> u64| {
        run.stages.iter().filter_map(|stage| stage.result.as_ref()).map(|result| of(&result.ledger)).sum::<u64>()
    };
    for (n, word) in [(ledger(|l| l.rejected), "refused"), (ledger(|l| l.held), "held back")] {
        if n > 0 {
            tiles.push((count(n), word.to_owned(), "warn"));
        }
    }
    if !data.buckets.is_empty() {
        let n = data.buckets.len() as u64;
        tiles.push((count(n), plural(n, "bucket"), ""));
    }
    if data.totals.steps > 0 {
        let n = data.totals.steps as u64;
        tiles.push((count(n), plural(n, "step"), ""));
        if let Some((first, last)) = sections::loss_ends(data) {
            tiles.push((format!("{} → {}", number(first), number(last)), "loss, smoothed".to_owned(), "wide"));
        }
        if let (Some(seconds), Some(samples)) = (data.totals.seconds.filter(|s| *s > 0.0), data.totals.samples) {
            tiles.push((number(samples as f64 / seconds), "samples per second".to_owned(), ""));
        }
        if let Some(memory) = data.totals.memory.filter(|memory| *memory > 0) {
            tiles.push((bytes(memory as u64), "peak memory of training".to_owned(), ""));
        }
    }
    if let Some(n) = rows("images").filter(|n| *n > 0) {
        tiles.push((count(n), plural(n, "picture"), ""));
    }
    html! {
        div.tiles {
            @for (value, word, class) in &tiles { div.tile.(*class) { b { (value) } span { (word) } } }
        }
    }
}

fn troubles(run: &Run, data: &Data) -> Markup {
    html! {
        @for stage in &run.stages {
            @if let Some(error) = &stage.error {
                p.callout.failed { b { (stage.name) } " " (foreign(error, 2000)) }
            }
        }
        @for stage in &run.stages {
            @for warning in stage.warnings.iter().take(12) { p.callout { b { (stage.name) } " " (foreign(warning, 600)) } }
            @if stage.warnings.len() > 12 {
                p.callout { b { (stage.name) } " and " (count(stage.warnings.len() as u64 - 12)) " more warnings" }
            }
        }
        @for problem in &data.problems { p.callout { b { "this page" } " leaves out " (foreign(problem, 600)) } }
    }
}

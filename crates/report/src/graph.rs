//! The graph of a run as SVG, from top to bottom: a stage stands below all it needs.

use std::collections::BTreeMap;

use maud::{Markup, html};

use crate::facts::{Run, Stage, Status};
use crate::text::{count, duration};

const WIDTH: f64 = 176.0;
const HEIGHT: f64 = 46.0;
const GAP: f64 = 22.0;
const DROP: f64 = 30.0;
const MARGIN: f64 = 4.0;
/// Distance of edges that pass stages by.
const LANE: f64 = 14.0;

struct Place {
    x: f64,
    y: f64,
    level: usize,
}

/// The drawing.
pub(crate) fn draw(run: &Run) -> Markup {
    let levels = levels(&run.stages);
    let mut rows: Vec<Vec<&str>> = Vec::new();
    for stage in &run.stages {
        let level = levels[stage.name.as_str()];
        rows.resize(rows.len().max(level + 1), Vec::new());
        rows[level].push(&stage.name);
    }
    let widest = rows.iter().map(Vec::len).max().unwrap_or(0);
    let span = |n: usize| n as f64 * (WIDTH + GAP) - GAP;
    let mut places = BTreeMap::new();
    for (level, row) in rows.iter().enumerate() {
        let left = MARGIN + (span(widest) - span(row.len())) / 2.0;
        for (i, name) in row.iter().enumerate() {
            let x = left + i as f64 * (WIDTH + GAP);
            places.insert(*name, Place { x, y: MARGIN + level as f64 * (HEIGHT + DROP), level });
        }
    }
    let edges: Vec<(&str, &str, &str)> = run
        .stages
        .iter()
        .flat_map(|stage| stage.inputs.iter().map(|(input, from)| (from.as_str(), stage.name.as_str(), input.as_str())))
        .collect();
    let passing = edges.iter().filter(|(from, to, _)| is_passing(&places, from, to)).count();
    let width = 2.0 * MARGIN + span(widest) + passing as f64 * LANE + if passing > 0 { 10.0 } else { 0.0 };
    let height = 2.0 * MARGIN + rows.len() as f64 * (HEIGHT + DROP) - DROP;
    let mut lane = MARGIN + span(widest) + 10.0;
    html! {
        svg.graph viewBox={ "0 0 " (width) " " (height) } width=(width) height=(height) role="img" aria-label="stages and what flows between them" {
            @for (from, to, input) in &edges {
                @let path = if is_passing(&places, from, to) {
                    let path = around(&places[from], &places[to], lane);
                    lane += LANE;
                    path
                } else {
                    straight(places.get(from), &places[to])
                };
                path.edge d=(path) { title { (from) " → " (to) ": " (input) } }
            }
            @for stage in &run.stages { (node(stage, &places[stage.name.as_str()])) }
        }
    }
}

fn node(stage: &Stage, place: &Place) -> Markup {
    let rows = stage.result.as_ref().map(|result| format!("{} rows", count(result.ledger.out)));
    let time = match stage.status {
        Status::NotRun => None,
        Status::Cached => Some("cached".to_owned()),
        Status::Made => Some(duration(stage.seconds)),
        Status::Failed | Status::Interrupted => Some(stage.status.word().to_owned()),
    };
    let line: Vec<String> = [time, rows].into_iter().flatten().collect();
    let line = if line.is_empty() { "not run".to_owned() } else { line.join(" · ") };
    html! {
        g.node.(stage.status.class()) transform={ "translate(" (place.x) " " (place.y) ")" } {
            title { (stage.name) ": " (stage.reason) }
            rect.box width=(WIDTH) height=(HEIGHT) rx="7" {}
            rect.mark width="4" height=(HEIGHT - 16.0) x="8" y="8" rx="2" {}
            text.name x="20" y="20" { (stage.name) }
            text.line x="20" y="36" { (line) }
        }
    }
}

/// Longest way from a stage without inputs.
fn levels(stages: &[Stage]) -> BTreeMap<&str, usize> {
    let mut levels = BTreeMap::new();
    for stage in stages {
        // Stages come in an order in which they can run.
        let above = stage.inputs.iter().filter_map(|(_, from)| levels.get(from.as_str()).map(|level| level + 1)).max();
        levels.insert(stage.name.as_str(), above.unwrap_or(0));
    }
    levels
}

fn is_passing(places: &BTreeMap<&str, Place>, from: &str, to: &str) -> bool {
    places.get(from).is_some_and(|from| places[to].level > from.level + 1)
}

fn straight(from: Option<&Place>, to: &Place) -> String {
    let Some(from) = from else { return String::new() };
    let (x1, y1, x2, y2) = (from.x + WIDTH / 2.0, from.y + HEIGHT, to.x + WIDTH / 2.0, to.y);
    let bend = (y2 - y1) / 2.0;
    format!("M{x1} {y1}C{x1} {} {x2} {} {x2} {y2}", y1 + bend, y2 - bend)
}

fn around(from: &Place, to: &Place, lane: f64) -> String {
    let (x1, y1, x2, y2) = (from.x + WIDTH, from.y + HEIGHT / 2.0, to.x + WIDTH, to.y + HEIGHT / 2.0);
    format!(
        "M{x1} {y1}C{lane} {y1} {lane} {y1} {lane} {}L{lane} {}C{lane} {y2} {lane} {y2} {x2} {y2}",
        y1 + 16.0,
        y2 - 16.0
    )
}

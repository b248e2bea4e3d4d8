//! Charts as inline SVG: lines and grouped bars, with axes of round numbers. Knows numbers and names only; colours are
//! classes of the style sheet.

use maud::{Markup, html};

use crate::text::{number, tick};

/// Units of the drawing; text is legible when a phone shows it at four fifths.
const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;
/// Places that tell their value when pointed at.
const HOVER: usize = 120;

/// A named curve; a point without a value interrupts it.
pub(crate) struct Line {
    pub(crate) name: String,
    /// Class of the style sheet.
    pub(crate) class: &'static str,
    pub(crate) points: Vec<(f64, Option<f64>)>,
}

/// What a chart says about itself.
pub(crate) struct Frame<'a> {
    pub(crate) title: &'a str,
    /// Below the title.
    pub(crate) about: &'a str,
    /// Of the horizontal axis.
    pub(crate) axis: &'a str,
    /// Whether the vertical axis begins at 0.
    pub(crate) from_zero: bool,
}

/// Round numbers from `low` to `high`, about four, and their distance.
fn ticks(low: f64, high: f64) -> (Vec<f64>, f64) {
    let rough = (high / 4.0 - low / 4.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|n| n * power).find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let first = (low / step - 1e-9).ceil() * step;
    let most = high + step * 1e-9;
    ((0..=20).map(|n| first + f64::from(n) * step).take_while(|value| *value <= most).collect(), step)
}

/// A range that is never empty, with a little air.
fn range(values: impl Iterator<Item = f64>, from_zero: bool) -> Option<(f64, f64)> {
    let (low, high) = values
        .filter(|v| v.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    if low > high {
        return None;
    }
    let air = ((high - low) * 0.06).max(high.abs() * 1e-3).max(1e-12);
    Some((if from_zero && low >= 0.0 { 0.0 } else { low - air }, high + air))
}

struct Scale {
    low: f64,
    high: f64,
    start: f64,
    end: f64,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let share = if self.high > self.low { (value - self.low) / (self.high - self.low) } else { 0.5 };
        self.start + share.clamp(0.0, 1.0) * (self.end - self.start)
    }
}

/// Lines over a common axis; `None` if no point has a value.
pub(crate) fn lines(frame: &Frame<'_>, band: Option<&[(f64, f64, f64)]>, lines: &[Line]) -> Option<Markup> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let values = points().filter_map(|(_, y)| *y).chain(band.iter().flat_map(|b| b.iter().flat_map(|p| [p.1, p.2])));
    let (low, high) = range(values, frame.from_zero)?;
    let (first, last) = points().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), (x, _)| (a.min(*x), b.max(*x)));
    let x = Scale { low: first, high: last, start: LEFT, end: WIDTH - RIGHT };
    let y = Scale { low, high, start: HEIGHT - BOTTOM, end: TOP };
    let body = html! {
        @if let Some(band) = band { path class="band" d=(area(band, &x, &y)) {} }
        @for line in lines {
            path class={ "line " (line.class) } d=(stroke(&line.points, &x, &y)) {}
            @if line.points.len() == 1 && let (at, Some(value)) = line.points[0] {
                circle class={ "dot " (line.class) } cx=(px(x.at(at))) cy=(px(y.at(value))) r="3" {}
            }
        }
        (hover(lines, frame.axis, &x))
    };
    Some(figure(frame, lines.iter().map(|line| (line.name.as_str(), line.class)), &x_axis(first, last, &x), &y, &body))
}

/// Bars of two series side by side: (label, note, first, second).
pub(crate) fn bars(
    frame: &Frame<'_>,
    names: [(&str, &'static str); 2],
    groups: &[(String, String, Option<f64>, Option<f64>)],
) -> Option<Markup> {
    let (low, high) = range(groups.iter().flat_map(|group| [group.2, group.3]).flatten(), true)?;
    let y = Scale { low, high, start: HEIGHT - BOTTOM, end: TOP };
    let slot = (WIDTH - LEFT - RIGHT) / groups.len() as f64;
    let bar = (slot * 0.36).min(26.0);
    let base = HEIGHT - BOTTOM;
    let body = html! {
        @for (i, (label, note, first, second)) in groups.iter().enumerate() {
            @let middle = LEFT + slot * (i as f64 + 0.5);
            @for (value, (name, class), left) in [(first, names[0], middle - bar - 0.5), (second, names[1], middle + 0.5)] {
                @if let Some(value) = value {
                    rect class={ "bar " (class) } x=(px(left)) width=(px(bar)) y=(px(y.at(*value)))
                        height=(px(base - y.at(*value))) rx="1.5" {
                        title { (name) ", " (label) ": " (number(*value)) " (" (note) ")" }
                    }
                }
            }
            text class="tick" x=(px(middle)) y=(px(base + 15.0)) text-anchor="middle" { (label) }
        }
    };
    Some(figure(frame, names.into_iter(), &html! {}, &y, &body))
}

fn figure<'a>(
    frame: &Frame<'_>,
    legend: impl Iterator<Item = (&'a str, &'static str)> + Clone,
    x_axis: &Markup,
    y: &Scale,
    body: &Markup,
) -> Markup {
    let (steps, step) = ticks(y.low, y.high);
    let several = legend.clone().count() > 1;
    html! {
        figure.chart {
            figcaption {
                strong { (frame.title) }
                @if several { span.legend { @for (name, class) in legend { span.key { i.(class) {} (name) } } } }
                small { (frame.about) }
            }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label=(frame.title) {
                @for value in steps {
                    line class="grid" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(px(y.at(value))) y2=(px(y.at(value))) {}
                    text class="tick" x=(LEFT - 6.0) y=(px(y.at(value) + 3.5)) text-anchor="end" { (tick(value, step)) }
                }
                (x_axis)
                (body)
                text class="tick axis" x=(WIDTH - RIGHT) y=(HEIGHT - 3.5) text-anchor="end" { (frame.axis) }
            }
        }
    }
}

fn x_axis(first: f64, last: f64, x: &Scale) -> Markup {
    let (steps, step) = ticks(first, last.max(first + 1.0));
    let shown = steps.iter().filter(|value| (first..=last).contains(*value) && x.at(**value) < WIDTH - RIGHT - 26.0);
    html! {
        @for value in shown {
            text class="tick" x=(px(x.at(*value))) y=(px(HEIGHT - BOTTOM + 15.0)) text-anchor="middle" { (tick(*value, step)) }
        }
    }
}

/// Strips that tell the values at their place.
fn hover(lines: &[Line], axis: &str, x: &Scale) -> Markup {
    let longest = lines.iter().map(|line| line.points.len()).max().unwrap_or(0);
    let every = longest.div_ceil(HOVER).max(1);
    let Some(guide) = lines.iter().find(|line| line.points.len() == longest) else { return html! {} };
    let width = (WIDTH - LEFT - RIGHT) / longest.div_ceil(every).max(1) as f64;
    html! {
        @for at in guide.points.iter().step_by(every).map(|(at, _)| *at) {
            rect class="hover" x=(px(x.at(at) - width / 2.0)) y=(TOP) width=(px(width)) height=(HEIGHT - TOP - BOTTOM) {
                title {
                    (axis) " " (at)
                    @for line in lines {
                        @if let Some((_, Some(value))) = line.points.iter().find(|(other, _)| *other == at) {
                            "\n" (line.name) " " (number(*value))
                        }
                    }
                }
            }
        }
    }
}

fn px(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}

fn stroke(points: &[(f64, Option<f64>)], x: &Scale, y: &Scale) -> String {
    let mut path = String::new();
    let mut pen_up = true;
    for (at, value) in points {
        let Some(value) = value.filter(|value| value.is_finite()) else {
            pen_up = true;
            continue;
        };
        path += &format!("{}{} {}", if pen_up { "M" } else { "L" }, px(x.at(*at)), px(y.at(value)));
        pen_up = false;
    }
    path
}

fn area(band: &[(f64, f64, f64)], x: &Scale, y: &Scale) -> String {
    let upper = band.iter().map(|(at, _, high)| (*at, *high));
    let lower = band.iter().rev().map(|(at, low, _)| (*at, *low));
    let corners: Vec<String> =
        upper.chain(lower).map(|(at, value)| format!("{} {}", px(x.at(at)), px(y.at(value)))).collect();
    format!("M{}Z", corners.join("L"))
}

/// Exponential moving average without the bias of its start: each value is a weighted mean of those seen so far.
pub(crate) fn smoothed(points: &[(f64, Option<f64>)], keep: f64) -> Vec<(f64, Option<f64>)> {
    let (mut sum, mut weight) = (0.0, 0.0);
    points
        .iter()
        .map(|(at, value)| {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                (sum, weight) = (keep * sum + (1.0 - keep) * value, keep * weight + (1.0 - keep));
            }
            (*at, (weight > 0.0).then(|| sum / weight))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(ticks(0.0, 1.0).0, [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(ticks(0.0, 59.0), (vec![0.0, 20.0, 40.0], 20.0));
        assert!(ticks(3.0, 3.0).0.len() <= 21 && ticks(-1e300, 1e300).0.len() <= 21);
    }

    #[test]
    fn smoothing_is_a_mean_of_what_came_before() {
        let points: Vec<_> = [2.0, 4.0].iter().enumerate().map(|(i, v)| (i as f64, Some(*v))).collect();
        let smooth = smoothed(&points, 0.5);
        assert_eq!(smooth[0].1, Some(2.0));
        // (0.25·2 + 0.5·4) / 0.75
        assert!((smooth[1].1.unwrap() - 10.0 / 3.0).abs() < 1e-12);
        assert_eq!(smoothed(&[(0.0, None), (1.0, Some(f64::NAN)), (2.0, Some(1.0))], 0.9)[1].1, None);
    }

    #[test]
    fn a_curve_is_interrupted_where_it_has_no_value() {
        let scale = |start, end| Scale { low: 0.0, high: 10.0, start, end };
        let points = [(0.0, Some(0.0)), (5.0, None), (10.0, Some(10.0))];
        assert_eq!(stroke(&points, &scale(0.0, 100.0), &scale(50.0, 0.0)), "M0 50M100 0");
    }

    #[test]
    fn nothing_to_draw_draws_nothing() {
        let frame = Frame { title: "t", about: "", axis: "step", from_zero: false };
        let line = Line { name: "l".into(), class: "a", points: vec![(0.0, None), (1.0, Some(f64::NAN))] };
        assert!(lines(&frame, None, &[line]).is_none());
        let one = Line { name: "l".into(), class: "a", points: vec![(3.0, Some(1.0))] };
        assert!(lines(&frame, None, &[one]).unwrap().into_string().contains("<circle"));
    }
}

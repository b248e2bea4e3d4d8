//! The four suits: their signs, and the cards one to ten.

use super::canvas::{BLACK, CREAM, Canvas, GOLD, Ink, PAPER, RED};
use super::frame::Panel;
use crate::shape::{V, around, crescent, disc, dome, polygon, slab, star, stroke};
use crate::words::{Light, Place};

/// A suit.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Suit {
    Cups,
    Swords,
    Coins,
    Wands,
}

impl Suit {
    pub(crate) const ALL: [Self; 4] = [Self::Cups, Self::Swords, Self::Coins, Self::Wands];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cups => "cups",
            Self::Swords => "swords",
            Self::Coins => "coins",
            Self::Wands => "wands",
        }
    }

    /// One sign, as a caption words it.
    pub(crate) fn one(self) -> &'static str {
        match self {
            Self::Cups => "golden cup",
            Self::Swords => "white sword",
            Self::Coins => "golden coin",
            Self::Wands => "golden wand",
        }
    }

    /// Light on card `rank` (from 0), so that every suit is seen in every light.
    pub(crate) fn light(self, rank: usize) -> Light {
        Light::ALL[(rank / 4 + 2 * rank + self as usize) % Light::ALL.len()]
    }

    /// Draws the sign, `r` high above and below its middle.
    pub(crate) fn sign(self, canvas: &mut Canvas, c: V, r: f32) {
        let at = |x: f32, y: f32| (c.0 + x * r, c.1 + y * r);
        match self {
            Self::Cups => {
                let bowl = dome(at(0.0, -0.75), (0.62 * r, -0.95 * r));
                let stem = polygon(&[at(-0.12, 0.0), at(0.12, 0.0), at(0.16, 0.7), at(-0.16, 0.7)]);
                canvas.draw(stem, GOLD);
                canvas.draw(dome(at(0.0, 0.95), (0.5 * r, 0.32 * r)), GOLD);
                canvas.draw(bowl, GOLD);
                canvas.draw(slab(at(0.0, -0.78), (0.68 * r, 0.1 * r), 0.1 * r), CREAM);
                canvas.draw(disc(at(0.0, -0.35), 0.17 * r), RED);
            }
            Self::Swords => {
                let blade = [at(0.0, -1.0), at(0.14, -0.78), at(0.14, 0.45), at(-0.14, 0.45), at(-0.14, -0.78)];
                canvas.draw(polygon(&blade), CREAM);
                canvas.fill(&stroke(at(0.0, -0.7), at(0.0, 0.4), 0.05 * r), BLACK);
                canvas.draw(slab(at(0.0, 0.5), (0.46 * r, 0.1 * r), 0.1 * r), GOLD);
                canvas.draw(slab(at(0.0, 0.72), (0.09 * r, 0.17 * r), 0.02 * r), BLACK);
                canvas.draw(disc(at(0.0, 0.94), 0.13 * r), GOLD);
            }
            Self::Coins => {
                canvas.draw(disc(c, 0.92 * r), GOLD);
                canvas.draw(disc(c, 0.68 * r), CREAM);
                canvas.draw(star(c, 0.62 * r, 0.26 * r, 5), RED);
            }
            Self::Wands => {
                canvas.draw(stroke(at(0.0, -0.85), at(0.0, 0.92), 0.24 * r), GOLD);
                for (i, y) in [-0.62, -0.2, 0.22].into_iter().enumerate() {
                    let side = if i % 2 == 0 { 1.0 } else { -1.0 };
                    let leaf = [
                        at(0.1 * side, y),
                        at(0.34 * side, y - 0.3),
                        at(0.62 * side, y - 0.28),
                        at(0.42 * side, y - 0.02),
                    ];
                    canvas.draw(polygon(&leaf), RED);
                }
                canvas.draw(disc(at(0.0, -0.9), 0.16 * r), CREAM);
            }
        }
    }
}

/// Something in the sky that tells equal numbers of different weeks apart, and how a caption words it.
pub(crate) fn heaven(canvas: &mut Canvas, panel: &Panel, which: usize) -> &'static str {
    let (x, y) = (panel.middle.0, panel.top());
    match which % 5 {
        0 => {
            canvas.draw(star((x, y + 12.0), 10.5, 6.2, 10), GOLD);
            "a sun"
        }
        1 => {
            canvas.draw(crescent((x, y + 12.0), 8.5), CREAM);
            "a moon"
        }
        2 => {
            for dx in [-22.0, 0.0, 22.0] {
                canvas.draw(star((x + dx, y + 9.0 + f32::abs(dx) / 9.0), 6.6, 2.9, 5), GOLD);
            }
            "three stars"
        }
        3 => {
            for (dx, dy) in [(-20.0, 12.0), (2.0, 8.0), (22.0, 13.0)] {
                let cloud = disc((x + dx - 5.0, y + dy), 3.6).or(disc((x + dx, y + dy - 2.0), 4.8));
                canvas.draw(cloud.or(disc((x + dx + 5.5, y + dy + 0.4), 3.2)), CREAM);
            }
            "clouds"
        }
        _ => {
            for i in 0..5 {
                let end = around((x, y), 17.0, 0.5 + (i as f32 - 2.0) * 0.08);
                canvas.fill(&stroke(around((x, y), 5.0, 0.5 + (i as f32 - 2.0) * 0.08), end, 2.0), GOLD);
            }
            "rays"
        }
    }
}

/// Land at the bottom of the panel, and how a caption words it.
pub(crate) fn land(canvas: &mut Canvas, panel: &Panel, which: usize) -> &'static str {
    let (x, y) = (panel.middle.0, panel.bottom());
    let mut hill = |base: V, half: V, ink: Ink| canvas.draw(dome(base, half).and(panel.shape()), ink);
    match which % 4 {
        0 => {
            hill((x - 20.0, y + 1.0), (30.0, 15.0), GOLD);
            hill((x + 22.0, y + 1.0), (34.0, 11.0), PAPER);
            Place::Hills.words()
        }
        1 => {
            let peaks =
                [(-40.0, 1.0), (-24.0, -19.0), (-12.0, -6.0), (4.0, -25.0), (18.0, -8.0), (28.0, -15.0), (40.0, 1.0)];
            let points: Vec<V> = peaks.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
            canvas.draw(polygon(&points).and(panel.shape()), PAPER);
            Place::Mountains.words()
        }
        2 => {
            canvas.draw(slab((x, y - 3.0), (41.0, 7.0), 0.0).and(panel.shape()), RED);
            for i in 0..5 {
                let at = x - 32.0 + 16.0 * i as f32;
                canvas.draw(dome((at, y - 9.5), (6.0, -4.0)).and(panel.shape()), CREAM);
            }
            Place::Terrace.words()
        }
        _ => {
            canvas.draw(slab((x, y - 3.0), (41.0, 9.0), 0.0).and(panel.shape()), CREAM);
            for row in 0..2 {
                for i in 0..4 {
                    let at = (x - 33.0 + 19.0 * i as f32 + 8.0 * row as f32, y - 5.0 + 5.0 * row as f32);
                    let wave = disc(at, 4.0).edge(1.6).and(slab((at.0, at.1 - 3.0), (6.0, 3.0), 0.0));
                    canvas.fill(&wave.and(panel.shape()), BLACK);
                }
            }
            Place::Sea.words()
        }
    }
}

const WORDS: [&str; 3] = ["a", "two", "three"];

/// Draws the card of rank `n`; the caption's scene. The first three show as many signs; on a small picture more would be
/// too small, so the others show a large one.
pub(crate) fn pips(canvas: &mut Canvas, panel: &Panel, suit: Suit, n: usize) -> String {
    let salt = suit as usize;
    let below = land(canvas, panel, n + salt);
    let above = heaven(canvas, panel, n + 2 * salt);
    let (places, size): (&[V], f32) = match n {
        2 => (&[(-0.45, 0.12), (0.45, 0.12)], 21.0),
        3 => (&[(0.0, -0.28), (-0.5, 0.42), (0.5, 0.42)], 17.0),
        _ => (&[(0.0, 0.16)], 32.0),
    };
    let fit = (panel.half.1 / 58.0).min(1.0) * if suit == Suit::Swords { 1.15 } else { 1.0 };
    for (x, y) in places {
        suit.sign(canvas, (panel.middle.0 + x * panel.half.0, panel.middle.1 + y * panel.half.1), size * fit);
    }
    let (word, plural) = (WORDS.get(n - 1).unwrap_or(&"a"), if matches!(n, 2 | 3) { "s" } else { "" });
    format!("{word} {}{plural} under {above} {below}", suit.one())
}

//! The court cards: a figure in a robe that holds the sign of its suit.

use super::canvas::{BLACK, CREAM, Canvas, GOLD, PAPER, RED};
use super::frame::Panel;
use super::suit::{Suit, heaven, land};
use crate::shape::{V, disc, dome, polygon, slab, star, stroke};
use crate::words::Light;

/// Names of the four courts.
const NAMES: [&str; 4] = ["page", "knight", "queen", "king"];

/// Draws the court card; the caption's scene.
pub(crate) fn court(canvas: &mut Canvas, panel: &Panel, suit: Suit, rank: usize, light: Light) -> String {
    let salt = suit as usize;
    let below = land(canvas, panel, rank + 2 * salt + 1);
    let above = heaven(canvas, panel, rank + salt);
    let fit = (panel.half.1 / 58.0).min(1.0);
    let foot: V = (panel.middle.0 - 9.0 * fit, panel.bottom() - 7.0 * fit);
    let at = |x: f32, y: f32| (foot.0 + x * fit, foot.1 + y * fit);
    let robe = if light == Light::Sunset { GOLD } else { RED };
    if rank == 3 {
        canvas.draw(slab(at(0.0, -38.0), (24.0 * fit, 38.0 * fit), 3.0 * fit), PAPER);
        canvas.draw(dome(at(0.0, -74.0), (24.0 * fit, 12.0 * fit)), GOLD);
    }
    // Robe, sleeves, collar.
    let wide = if rank >= 2 { 21.0 } else { 15.0 };
    canvas.draw(polygon(&[at(-8.0, -52.0), at(8.0, -52.0), at(wide, 0.0), at(-wide, 0.0)]), robe);
    canvas.draw(polygon(&[at(-3.0, -50.0), at(3.0, -50.0), at(5.0, 0.0), at(-5.0, 0.0)]), CREAM);
    canvas.draw(stroke(at(6.0, -46.0), at(22.0, -36.0), 6.5 * fit), robe);
    canvas.draw(stroke(at(-6.0, -46.0), at(-15.0, -28.0), 6.5 * fit), robe);
    canvas.draw(disc(at(23.0, -35.5), 3.2 * fit), CREAM);
    canvas.draw(disc(at(-15.5, -26.5), 3.2 * fit), CREAM);
    canvas.draw(slab(at(0.0, -52.0), (9.0 * fit, 2.4 * fit), 2.0 * fit), GOLD);
    // Head.
    if rank == 2 {
        canvas.draw(dome(at(0.0, -50.0), (13.0 * fit, 25.0 * fit)), BLACK);
    }
    canvas.draw(disc(at(0.0, -62.0), 8.5 * fit), CREAM);
    for side in [-1.0, 1.0] {
        canvas.fill(&disc(at(3.0 * side, -63.0), 1.0 * fit), BLACK);
    }
    canvas.fill(&stroke(at(-2.0, -58.2), at(2.0, -58.2), 0.8 * fit), RED);
    match rank {
        0 => {
            canvas.draw(dome(at(-1.0, -66.5), (10.0 * fit, 7.0 * fit)), RED);
            canvas.draw(stroke(at(6.0, -70.0), at(14.0, -78.0), 2.4 * fit), GOLD);
        }
        1 => {
            canvas.draw(dome(at(0.0, -64.5), (9.6 * fit, 11.0 * fit)), PAPER);
            canvas.draw(star(at(0.0, -77.0), 5.0 * fit, 2.0 * fit, 4), RED);
            canvas.draw(
                polygon(&[at(-26.0, -36.0), at(-8.0, -36.0), at(-8.0, -22.0), at(-17.0, -12.0), at(-26.0, -22.0)]),
                GOLD,
            );
            canvas.draw(star(at(-17.0, -26.0), 5.0 * fit, 2.2 * fit, 6), CREAM);
        }
        2 => {
            crown(canvas, at(0.0, -69.0), 8.5 * fit, 3);
        }
        _ => {
            canvas.draw(polygon(&[at(-5.0, -57.0), at(5.0, -57.0), at(0.0, -47.0)]), BLACK);
            crown(canvas, at(0.0, -69.0), 10.0 * fit, 5);
        }
    }
    suit.sign(canvas, at(25.0, -50.0), 19.0 * fit);
    format!("a {} with a {} under {above} {below}", NAMES[rank], suit.one())
}

/// A crown that sits on `base`, with so many points.
pub(crate) fn crown(canvas: &mut Canvas, base: V, half: f32, points: usize) {
    let mut line = vec![(base.0 - half, base.1), (base.0 - half, base.1 - half)];
    let step = 2.0 * half / (points - 1) as f32;
    for i in 1..points {
        let x = base.0 - half + step * i as f32;
        line.push((x - step / 2.0, base.1 - 0.45 * half));
        line.push((x, base.1 - half * if i + 1 == points { 1.0 } else { 1.35 }));
    }
    line.push((base.0 + half, base.1));
    canvas.draw(polygon(&line), GOLD);
    canvas.draw(slab(base, (half, 0.2 * half), 0.0), RED);
}

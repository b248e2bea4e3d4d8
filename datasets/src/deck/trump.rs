//! The twenty-two trumps: one large motif each.

use super::canvas::{BLACK, CREAM, Canvas, GOLD, Ink, PAPER, RED};
use super::court::crown;
use super::frame::Panel;
use super::suit::land;
use crate::shape::{V, around, crescent, disc, dome, polygon, slab, star, stroke};
use crate::words::Light;

/// A trump's scene as its caption words it, its light, whether land lies below, and how it is drawn.
pub(crate) struct Trump {
    scene: &'static str,
    pub(crate) light: Light,
    land: bool,
    draw: fn(&mut Pen<'_>),
}

/// A canvas with the motif's own coordinates: the middle is (0, 0), the motif lies within -1 to 1.
struct Pen<'a> {
    canvas: &'a mut Canvas,
    c: V,
    r: f32,
}

impl Pen<'_> {
    fn at(&self, x: f32, y: f32) -> V {
        (self.c.0 + x * self.r, self.c.1 + y * self.r)
    }
    fn disc(&mut self, x: f32, y: f32, r: f32, ink: Ink) {
        self.canvas.draw(disc(self.at(x, y), r * self.r), ink);
    }
    fn slab(&mut self, x: f32, y: f32, half: V, round: f32, ink: Ink) {
        self.canvas.draw(slab(self.at(x, y), (half.0 * self.r, half.1 * self.r), round * self.r), ink);
    }
    fn star(&mut self, x: f32, y: f32, outer: f32, inner: f32, n: usize, ink: Ink) {
        self.canvas.draw(star(self.at(x, y), outer * self.r, inner * self.r, n), ink);
    }
    fn poly(&mut self, points: &[V], ink: Ink) {
        let points: Vec<V> = points.iter().map(|(x, y)| self.at(*x, *y)).collect();
        self.canvas.draw(polygon(&points), ink);
    }
    fn stroke(&mut self, a: V, b: V, width: f32, ink: Ink) {
        self.canvas.draw(stroke(self.at(a.0, a.1), self.at(b.0, b.1), width * self.r), ink);
    }
    fn dome(&mut self, x: f32, y: f32, half: V, ink: Ink) {
        self.canvas.draw(dome(self.at(x, y), (half.0 * self.r, half.1 * self.r)), ink);
    }
    fn ring(&mut self, x: f32, y: f32, r: f32, width: f32, ink: Ink) {
        self.canvas.draw(disc(self.at(x, y), r * self.r).edge(width * self.r), ink);
    }
    fn eye(&mut self, x: f32, y: f32, half: f32, ink: Ink) {
        let (a, b) = (self.at(x, y + 0.75 * half), self.at(x, y - 0.75 * half));
        let r = 1.25 * half * self.r;
        self.canvas.draw(disc(a, r).and(disc(b, r)), CREAM);
        self.disc(x, y, 0.42 * half, ink);
        self.disc(x, y, 0.18 * half, BLACK);
    }
}

const fn trump(scene: &'static str, light: Light, land: bool, draw: fn(&mut Pen<'_>)) -> Trump {
    Trump { scene, light, land, draw }
}

/// All trumps, by number.
pub(crate) const ALL: [Trump; 22] = [
    trump("a staff with a red bundle", Light::Noon, true, |p| {
        p.poly(&[(-0.2, 1.2), (0.5, 1.2), (0.12, -0.1), (-0.02, -0.1)], GOLD);
        p.stroke((-0.75, 0.7), (0.5, -0.75), 0.1, BLACK);
        p.disc(0.55, -0.62, 0.34, RED);
        p.stroke((0.42, -0.8), (0.7, -0.98), 0.1, RED);
        for i in 0..6 {
            let (x, y) = around((-0.6, -0.62), 0.2, i as f32 / 6.0);
            p.disc(x, y, 0.14, CREAM);
        }
        p.disc(-0.6, -0.62, 0.13, GOLD);
    }),
    trump("a table with a cup and a sword", Light::Sunset, false, |p| {
        p.ring(-0.3, -0.85, 0.24, 0.13, GOLD);
        p.ring(0.3, -0.85, 0.24, 0.13, GOLD);
        p.slab(0.0, 0.55, (0.95, 0.12), 0.04, GOLD);
        p.slab(-0.7, 0.95, (0.09, 0.32), 0.0, BLACK);
        p.slab(0.7, 0.95, (0.09, 0.32), 0.0, BLACK);
        let (canvas, r) = (&mut *p.canvas, p.r);
        super::suit::Suit::Cups.sign(canvas, (p.c.0 - 0.6 * r, p.c.1 + 0.1 * r), 0.34 * r);
        super::suit::Suit::Coins.sign(canvas, (p.c.0, p.c.1 + 0.12 * r), 0.32 * r);
        super::suit::Suit::Swords.sign(canvas, (p.c.0 + 0.6 * r, p.c.1), 0.45 * r);
    }),
    trump("a curtain between two pillars under a moon", Light::Morning, false, |p| {
        p.slab(-0.75, 0.2, (0.17, 1.0), 0.03, BLACK);
        p.slab(0.75, 0.2, (0.17, 1.0), 0.03, CREAM);
        for i in 0..5 {
            let x = -0.46 + 0.23 * i as f32;
            p.slab(x, 0.3, (0.115, 0.85), 0.1, if i % 2 == 0 { RED } else { GOLD });
        }
        p.slab(0.0, -0.6, (0.98, 0.09), 0.09, GOLD);
        let (at, r) = (p.at(0.0, -0.98), 0.24 * p.r);
        p.canvas.draw(crescent(at, r), CREAM);
    }),
    trump("a red rose", Light::Noon, true, |p| {
        p.stroke((0.0, 0.1), (0.0, 1.1), 0.12, GOLD);
        p.poly(&[(0.0, 0.85), (0.35, 0.5), (0.75, 0.5), (0.45, 0.85)], GOLD);
        p.poly(&[(0.0, 0.7), (-0.35, 0.35), (-0.75, 0.4), (-0.45, 0.72)], GOLD);
        for (n, ring, r) in [(7, 0.5, 0.33), (5, 0.27, 0.26)] {
            for i in 0..n {
                let (x, y) = around((0.0, -0.35), ring, i as f32 / n as f32);
                p.disc(x, y, r, RED);
            }
        }
        p.disc(0.0, -0.35, 0.2, GOLD);
    }),
    trump("a white throne with a golden crown", Light::Sunset, true, |p| {
        p.slab(0.0, 0.1, (0.62, 1.0), 0.08, PAPER);
        p.dome(0.0, -0.9, (0.62, 0.3), PAPER);
        p.slab(0.0, 0.65, (0.85, 0.18), 0.05, CREAM);
        p.slab(-0.72, 0.75, (0.13, 0.42), 0.05, CREAM);
        p.slab(0.72, 0.75, (0.13, 0.42), 0.05, CREAM);
        p.slab(0.0, -0.15, (0.42, 0.55), 0.05, RED);
        let (at, r) = (p.at(0.0, 0.42), 0.34 * p.r);
        crown(p.canvas, at, r, 5);
    }),
    trump("two golden keys", Light::Noon, false, |p| {
        p.disc(0.0, 0.0, 0.85, RED);
        for s in [-1.0, 1.0] {
            p.stroke((0.55 * s, 0.75), (-0.42 * s, -0.48), 0.13, GOLD);
            p.ring(-0.56 * s, -0.66, 0.2, 0.13, GOLD);
            p.stroke((0.5 * s, 0.68), (0.72 * s, 0.5), 0.12, GOLD);
            p.stroke((0.35 * s, 0.49), (0.52 * s, 0.35), 0.12, GOLD);
        }
    }),
    trump("a red heart with an arrow", Light::Morning, false, |p| {
        p.star(0.0, 0.0, 1.1, 0.86, 24, GOLD);
        let (l, r) = (p.at(-0.32, -0.2), p.at(0.32, -0.2));
        let (a, b, c) = (p.at(-0.68, -0.02), p.at(0.68, -0.02), p.at(0.0, 0.75));
        let mid = p.at(0.0, -0.2);
        let heart = disc(l, 0.4 * p.r).or(disc(r, 0.4 * p.r)).or(polygon(&[a, mid, b, c]));
        p.canvas.draw(heart, RED);
        p.stroke((-0.95, 0.5), (0.9, -0.45), 0.08, BLACK);
        p.poly(&[(1.05, -0.53), (0.78, -0.55), (0.9, -0.28)], CREAM);
    }),
    trump("a golden wagon", Light::Night, true, |p| {
        p.slab(0.0, -0.8, (0.85, 0.16), 0.05, RED);
        for x in [-0.6, 0.0, 0.6] {
            p.star(x, -0.8, 0.12, 0.05, 5, GOLD);
        }
        p.slab(-0.7, -0.25, (0.06, 0.42), 0.0, CREAM);
        p.slab(0.7, -0.25, (0.06, 0.42), 0.0, CREAM);
        p.poly(&[(-0.85, 0.1), (0.85, 0.1), (0.7, 0.6), (-0.7, 0.6)], GOLD);
        for x in [-0.55, 0.55] {
            p.disc(x, 0.72, 0.36, CREAM);
            for i in 0..4 {
                let (a, b) = (around((x, 0.72), 0.3, i as f32 / 8.0), around((x, 0.72), 0.3, i as f32 / 8.0 + 0.5));
                p.stroke(a, b, 0.03, BLACK);
            }
            p.disc(x, 0.72, 0.09, RED);
        }
    }),
    trump("a golden lion", Light::Noon, false, |p| {
        p.star(0.0, 0.0, 1.05, 0.8, 18, RED);
        p.disc(-0.45, -0.5, 0.2, GOLD);
        p.disc(0.45, -0.5, 0.2, GOLD);
        p.disc(0.0, 0.0, 0.65, GOLD);
        p.disc(-0.2, 0.25, 0.22, CREAM);
        p.disc(0.2, 0.25, 0.22, CREAM);
        p.poly(&[(-0.14, 0.02), (0.14, 0.02), (0.0, 0.2)], BLACK);
        p.disc(-0.25, -0.2, 0.09, BLACK);
        p.disc(0.25, -0.2, 0.09, BLACK);
    }),
    trump("a golden lantern with a red star", Light::Night, true, |p| {
        p.ring(0.0, -0.9, 0.16, 0.08, GOLD);
        p.poly(&[(-0.4, -0.45), (0.4, -0.45), (0.0, -0.8)], GOLD);
        p.slab(0.0, 0.1, (0.46, 0.55), 0.06, CREAM);
        p.star(0.0, 0.1, 0.4, 0.17, 6, RED);
        for x in [-0.46, 0.46] {
            p.slab(x, 0.1, (0.05, 0.58), 0.0, GOLD);
        }
        p.slab(0.0, 0.7, (0.58, 0.1), 0.03, GOLD);
    }),
    trump("a golden wheel with white stars", Light::Sunset, false, |p| {
        p.ring(0.0, 0.0, 0.72, 0.2, GOLD);
        for i in 0..8 {
            let turn = i as f32 / 8.0;
            let end = around((0.0, 0.0), 0.62, turn);
            p.stroke((0.0, 0.0), end, 0.08, CREAM);
            let tip = around((0.0, 0.0), 0.98, turn);
            p.star(tip.0, tip.1, 0.17, 0.07, 5, CREAM);
        }
        p.disc(0.0, 0.0, 0.2, GOLD);
        p.disc(0.0, 0.0, 0.08, BLACK);
    }),
    trump("golden scales and a sword", Light::Noon, false, |p| {
        p.poly(&[(0.0, -1.1), (0.1, -0.9), (0.1, 0.75), (-0.1, 0.75), (-0.1, -0.9)], PAPER);
        p.slab(0.0, 0.82, (0.34, 0.07), 0.07, GOLD);
        p.slab(0.0, 1.0, (0.07, 0.14), 0.0, RED);
        p.stroke((-0.8, -0.5), (0.8, -0.5), 0.1, GOLD);
        for x in [-0.75, 0.75] {
            p.stroke((x, -0.5), (x - 0.25, 0.1), 0.02, BLACK);
            p.stroke((x, -0.5), (x + 0.25, 0.1), 0.02, BLACK);
            p.dome(x, 0.1, (0.34, -0.26), RED);
        }
    }),
    trump("three golden rings", Light::Morning, false, |p| {
        for i in 0..3 {
            let (x, y) = around((0.0, 0.0), 0.42, i as f32 / 3.0);
            p.ring(x, y, 0.55, 0.17, if i == 0 { RED } else { GOLD });
        }
        p.disc(0.0, 0.0, 0.14, CREAM);
    }),
    trump("a black scythe over wheat", Light::Morning, true, |p| {
        for i in 0..5 {
            let x = -0.7 + 0.35 * i as f32;
            p.stroke((x, 1.1), (x, 0.25), 0.05, CREAM);
            for k in 0..3 {
                p.disc(x, 0.3 - 0.16 * k as f32, 0.1, CREAM);
            }
        }
        p.stroke((0.55, 1.1), (0.1, -0.85), 0.1, RED);
        let (a, b, r) = (p.at(-0.1, -0.1), p.at(-0.05, 0.18), p.r);
        let blade = disc(a, 0.85 * r).minus(disc(b, 0.95 * r));
        p.canvas.draw(blade, BLACK);
    }),
    trump("water poured into a red jug", Light::Noon, true, |p| {
        let (a, b) = ((-0.35, -0.55), (0.4, 0.45));
        p.stroke((a.0 + 0.1, a.1 + 0.2), (b.0 - 0.05, b.1 - 0.2), 0.16, CREAM);
        for (c, ink) in [(a, GOLD), (b, RED)] {
            p.ring(c.0 - 0.36, c.1, 0.2, 0.09, ink);
            p.disc(c.0, c.1, 0.38, ink);
            p.slab(c.0, c.1 - 0.42, (0.16, 0.14), 0.0, ink);
            p.slab(c.0, c.1 - 0.56, (0.25, 0.06), 0.06, CREAM);
            p.slab(c.0, c.1, (0.38, 0.06), 0.0, CREAM);
        }
    }),
    trump("a red mask with golden horns", Light::Night, false, |p| {
        for s in [-1.0, 1.0] {
            let (a, b, r) = (p.at(0.5 * s, -0.55), p.at(0.3 * s, -0.68), p.r);
            p.canvas.draw(disc(a, 0.52 * r).minus(disc(b, 0.45 * r)), GOLD);
        }
        p.poly(&[(-0.7, -0.4), (0.0, -0.55), (0.7, -0.4), (0.6, 0.35), (0.0, 1.0), (-0.6, 0.35)], RED);
        p.eye(-0.3, -0.08, 0.22, GOLD);
        p.eye(0.3, -0.08, 0.22, GOLD);
        p.poly(&[(-0.28, 0.45), (0.28, 0.45), (0.0, 0.62)], CREAM);
        p.poly(&[(-0.08, 0.08), (0.08, 0.08), (0.0, 0.34)], GOLD);
    }),
    trump("a white tower and golden lightning", Light::Night, true, |p| {
        p.poly(&[(-0.45, -0.5), (0.35, -0.5), (0.5, 1.15), (-0.6, 1.15)], PAPER);
        for x in [-0.42, -0.12, 0.18] {
            p.slab(x + 0.07, -0.6, (0.11, 0.14), 0.0, PAPER);
        }
        for (x, y) in [(-0.15, -0.15), (0.12, 0.3), (-0.2, 0.7)] {
            p.slab(x, y, (0.09, 0.15), 0.08, RED);
        }
        p.poly(&[(0.95, -1.1), (0.45, -0.55), (0.66, -0.5), (0.3, -0.05), (0.9, -0.62), (0.68, -0.68)], GOLD);
        for (x, y) in [(-0.85, -0.3), (0.85, 0.3), (-0.8, 0.45)] {
            p.star(x, y, 0.16, 0.07, 4, RED);
        }
    }),
    trump("a golden star", Light::Night, true, |p| {
        p.star(0.0, -0.15, 0.72, 0.27, 8, GOLD);
        p.star(0.0, -0.15, 0.34, 0.14, 8, CREAM);
        for i in 0..7 {
            let (x, y) = around((0.0, -0.1), 0.98, (i as f32 - 3.0) * 0.12);
            p.star(x, y, 0.15, 0.06, 6, CREAM);
        }
    }),
    trump("a white moon", Light::Night, true, |p| {
        let (at, r) = (p.at(0.0, -0.25), 0.8 * p.r);
        p.canvas.draw(crescent(at, r), CREAM);
        p.stroke((-0.6, -0.3), (-0.42, -0.26), 0.03, BLACK);
        p.stroke((-0.5, 0.05), (-0.38, 0.0), 0.03, RED);
        for (x, y) in [(-0.6, 0.85), (-0.2, 0.72), (0.2, 0.85), (0.6, 0.7), (0.0, 1.08)] {
            p.poly(&[(x - 0.08, y), (x, y - 0.22), (x + 0.08, y), (x, y + 0.1)], GOLD);
        }
    }),
    trump("a golden sun", Light::Noon, true, |p| {
        p.star(0.0, -0.15, 1.1, 0.6, 16, RED);
        p.star(0.0, -0.15, 0.9, 0.56, 12, GOLD);
        p.disc(0.0, -0.15, 0.56, GOLD);
        for s in [-1.0, 1.0] {
            p.disc(0.2 * s, -0.25, 0.07, BLACK);
            p.disc(0.32 * s, -0.02, 0.08, RED);
        }
        p.stroke((-0.14, 0.08), (0.0, 0.13), 0.03, BLACK);
        p.stroke((0.0, 0.13), (0.14, 0.08), 0.03, BLACK);
    }),
    trump("a golden bell over red houses", Light::Morning, false, |p| {
        for (x, y, w) in [(-0.65, 0.75, 0.42), (0.1, 0.85, 0.45), (0.75, 0.7, 0.38)] {
            p.slab(x, y + 0.42, (0.8 * w, 0.3), 0.0, CREAM);
            p.poly(&[(x - w, y + 0.15), (x, y - 0.3), (x + w, y + 0.15)], RED);
        }
        p.disc(0.0, 0.2, 0.14, BLACK);
        p.dome(0.0, -0.05, (0.55, 0.85), GOLD);
        p.poly(&[(-0.55, -0.08), (0.55, -0.08), (0.72, 0.14), (-0.72, 0.14)], GOLD);
        p.ring(0.0, -0.98, 0.12, 0.07, GOLD);
        p.slab(0.0, -0.25, (0.5, 0.05), 0.0, RED);
    }),
    trump("a white globe in a golden wreath", Light::Sunset, false, |p| {
        for i in 0..24 {
            let (x, y) = around((0.0, 0.0), 0.88, i as f32 / 24.0);
            p.disc(x, y, 0.13, if i % 6 == 0 { CREAM } else { GOLD });
        }
        p.disc(0.0, 0.0, 0.66, CREAM);
        let (c, r) = (p.c, p.r);
        let globe = || disc(c, 0.66 * r);
        p.canvas.draw(disc((c.0 - 0.3 * r, c.1 - 0.25 * r), 0.34 * r).and(globe()), GOLD);
        p.canvas.draw(disc((c.0 + 0.35 * r, c.1 + 0.2 * r), 0.3 * r).and(globe()), GOLD);
        p.canvas.draw(slab(c, (0.66 * r, 0.04 * r), 0.0).and(globe()), BLACK);
        for (x, y) in [(-0.95, -1.2), (0.95, -1.2), (-0.95, 1.2), (0.95, 1.2)] {
            p.star(x, y, 0.2, 0.08, 4, GOLD);
        }
    }),
];

/// Draws a trump; the caption's scene.
pub(crate) fn draw(canvas: &mut Canvas, panel: &Panel, number: usize) -> String {
    let trump = &ALL[number];
    let below = if trump.land { format!(" {}", land(canvas, panel, number)) } else { String::new() };
    let r = 33.0_f32.min(panel.half.1 * 0.72);
    let lift = if trump.land { 7.0 } else { 0.0 };
    (trump.draw)(&mut Pen { canvas, c: (panel.middle.0, panel.middle.1 - lift * r / 33.0), r });
    format!("{}{below}", trump.scene)
}

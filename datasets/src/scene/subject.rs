//! Things: each a list of solid parts, painted from back to front. Silhouettes are those of the deck where it has the thing.

use super::colour::{Rgb, rgb};
use crate::shape::{Shape, V, around, crescent, disc, dome, polygon, slab, star, stroke};

/// How a part is painted.
#[derive(Clone, Copy)]
pub(super) enum Paint {
    /// In the thing's colour, brighter or darker.
    Main(f32),
    /// In a colour of its own.
    Own(Rgb),
}

/// A solid: a shape whose edge is rounded towards the viewer.
pub(super) struct Part {
    pub(super) shape: Shape,
    pub(super) paint: Paint,
    /// Width of the rounding, in units.
    pub(super) bevel: f32,
}

/// A thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    Cup,
    Sword,
    Coin,
    Wand,
    Bell,
    Crown,
    Heart,
    Star,
    Moon,
    Rose,
    Tower,
    House,
    Tree,
    Boat,
    Bird,
    Mushroom,
}

const MAIN: Paint = Paint::Main(1.0);
const SHADED: Paint = Paint::Main(0.62);
const WOOD: Paint = Paint::Own(rgb(112, 74, 44));
const LEAF: Paint = Paint::Own(rgb(52, 118, 48));
const DARK: Paint = Paint::Own(rgb(46, 36, 32));
const CLOTH: Paint = Paint::Own(rgb(236, 226, 206));
const METAL: Paint = Paint::Own(rgb(120, 112, 104));

/// Collects parts around `foot` (the middle of where the thing stands), in units of its half height.
struct Maker {
    foot: V,
    r: f32,
    parts: Vec<Part>,
}

impl Maker {
    fn at(&self, x: f32, y: f32) -> V {
        (self.foot.0 + x * self.r, self.foot.1 + (y - 1.0) * self.r)
    }
    fn push(&mut self, shape: Shape, paint: Paint, bevel: f32) {
        self.parts.push(Part { shape, paint, bevel: bevel * self.r });
    }
    fn poly(&mut self, points: &[V], paint: Paint, bevel: f32) {
        let points: Vec<V> = points.iter().map(|(x, y)| self.at(*x, *y)).collect();
        self.push(polygon(&points), paint, bevel);
    }
    fn disc(&mut self, x: f32, y: f32, r: f32, paint: Paint, bevel: f32) {
        self.push(disc(self.at(x, y), r * self.r), paint, bevel);
    }
    fn slab(&mut self, x: f32, y: f32, half: V, round: f32, paint: Paint, bevel: f32) {
        self.push(slab(self.at(x, y), (half.0 * self.r, half.1 * self.r), round * self.r), paint, bevel);
    }
    fn stroke(&mut self, a: V, b: V, width: f32, paint: Paint) {
        self.push(stroke(self.at(a.0, a.1), self.at(b.0, b.1), width * self.r), paint, width / 2.0);
    }
    fn dome(&mut self, x: f32, y: f32, half: V, paint: Paint, bevel: f32) {
        self.push(dome(self.at(x, y), (half.0 * self.r, half.1 * self.r)), paint, bevel);
    }
}

impl Subject {
    pub(super) const ALL: [Self; 16] = [
        Self::Cup,
        Self::Sword,
        Self::Coin,
        Self::Wand,
        Self::Bell,
        Self::Crown,
        Self::Heart,
        Self::Star,
        Self::Moon,
        Self::Rose,
        Self::Tower,
        Self::House,
        Self::Tree,
        Self::Boat,
        Self::Bird,
        Self::Mushroom,
    ];

    /// As a caption words it.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Cup => "cup",
            Self::Sword => "sword",
            Self::Coin => "coin",
            Self::Wand => "wand",
            Self::Bell => "bell",
            Self::Crown => "crown",
            Self::Heart => "heart",
            Self::Star => "star",
            Self::Moon => "moon",
            Self::Rose => "rose",
            Self::Tower => "tower",
            Self::House => "house",
            Self::Tree => "tree",
            Self::Boat => "boat",
            Self::Bird => "bird",
            Self::Mushroom => "mushroom",
        }
    }

    /// Half its width where it stands, for its shadow, in half heights.
    pub(super) fn stance(self) -> f32 {
        match self {
            Self::Sword | Self::Wand | Self::Rose => 0.16,
            Self::Heart | Self::Star | Self::Tree | Self::Mushroom | Self::Bird => 0.3,
            Self::Cup | Self::Coin | Self::Moon => 0.45,
            Self::Tower => 0.55,
            Self::Bell | Self::Crown | Self::House | Self::Boat => 0.75,
        }
    }

    /// Its parts, standing on `foot`, `2 r` high.
    pub(super) fn parts(self, foot: V, r: f32) -> Vec<Part> {
        let mut m = Maker { foot, r, parts: Vec::new() };
        match self {
            Self::Cup => {
                m.poly(&[(-0.11, -0.1), (0.11, -0.1), (0.15, 0.8), (-0.15, 0.8)], SHADED, 0.13);
                m.dome(0.0, 1.0, (0.5, 0.3), MAIN, 0.2);
                m.dome(0.0, -0.8, (0.66, -1.0), MAIN, 0.5);
                m.slab(0.0, -0.82, (0.7, 0.1), 0.1, MAIN, 0.1);
            }
            Self::Sword => {
                let blade = [(0.0, 1.0), (-0.13, 0.75), (-0.13, -0.45), (0.13, -0.45), (0.13, 0.75)];
                m.poly(&blade, MAIN, 0.14);
                m.slab(0.0, -0.52, (0.46, 0.09), 0.09, METAL, 0.09);
                m.slab(0.0, -0.72, (0.08, 0.17), 0.04, WOOD, 0.08);
                m.disc(0.0, -0.92, 0.13, MAIN, 0.13);
            }
            Self::Coin => {
                m.disc(0.0, 0.12, 0.88, MAIN, 0.16);
                m.disc(0.0, 0.12, 0.66, SHADED, 0.06);
                let c = m.at(0.0, 0.12);
                m.push(star(c, 0.56 * r, 0.24 * r, 5), MAIN, 0.14);
            }
            Self::Wand => {
                m.stroke((0.0, -0.8), (0.0, 0.9), 0.22, MAIN);
                for (i, y) in [-0.5, -0.1, 0.3].into_iter().enumerate() {
                    let side = if i % 2 == 0 { 1.0 } else { -1.0 };
                    let leaf =
                        [(0.08 * side, y), (0.32 * side, y - 0.28), (0.58 * side, y - 0.26), (0.4 * side, y - 0.02)];
                    m.poly(&leaf, LEAF, 0.12);
                }
                m.disc(0.0, -0.84, 0.2, MAIN, 0.2);
            }
            Self::Bell => {
                m.disc(0.0, 0.84, 0.16, DARK, 0.16);
                m.disc(0.0, -0.86, 0.14, SHADED, 0.12);
                m.dome(0.0, 0.5, (0.6, 1.3), MAIN, 0.5);
                m.poly(&[(-0.6, 0.45), (0.6, 0.45), (0.82, 0.78), (-0.82, 0.78)], MAIN, 0.16);
            }
            Self::Crown => {
                let mut line = vec![(-0.8, 0.8), (-0.86, -0.45)];
                for i in 1..=4 {
                    let x = -0.86 + 0.43 * i as f32;
                    line.push((x - 0.215, 0.1));
                    line.push((x, if i == 2 { -0.75 } else { -0.45 }));
                }
                line.push((0.8, 0.8));
                m.poly(&line, MAIN, 0.22);
                m.slab(0.0, 0.8, (0.84, 0.18), 0.08, SHADED, 0.12);
                for (x, y) in [(-0.86, -0.5), (-0.43, -0.5), (0.0, -0.8), (0.43, -0.5), (0.86, -0.5)] {
                    m.disc(x, y, 0.11, MAIN, 0.11);
                }
                for x in [-0.5, 0.0, 0.5] {
                    m.disc(x, 0.8, 0.1, CLOTH, 0.1);
                }
            }
            Self::Heart => {
                let lobes = disc(m.at(-0.42, -0.36), 0.48 * r).or(disc(m.at(0.42, -0.36), 0.48 * r));
                let tip = [(-0.85, -0.15), (-0.4, -0.5), (0.4, -0.5), (0.85, -0.15), (0.0, 1.0)];
                let tip: Vec<V> = tip.iter().map(|(x, y)| m.at(*x, *y)).collect();
                m.push(lobes.or(polygon(&tip)), MAIN, 0.42);
            }
            Self::Star => {
                let c = m.at(0.0, 0.08);
                m.push(star(c, 1.02 * r, 0.44 * r, 5), MAIN, 0.3);
            }
            Self::Moon => {
                let c = m.at(0.12, 0.06);
                m.push(crescent(c, 0.94 * r), MAIN, 0.3);
            }
            Self::Rose => {
                m.stroke((0.0, 0.0), (0.0, 0.97), 0.1, LEAF);
                m.poly(&[(0.0, 0.75), (0.3, 0.42), (0.66, 0.42), (0.4, 0.75)], LEAF, 0.14);
                m.poly(&[(0.0, 0.62), (-0.3, 0.3), (-0.66, 0.34), (-0.4, 0.64)], LEAF, 0.14);
                for (n, ring, size, paint) in [(7, 0.42, 0.27, SHADED), (5, 0.22, 0.25, MAIN)] {
                    for i in 0..n {
                        let (x, y) = around((0.0, -0.42), ring, i as f32 / n as f32);
                        m.disc(x, y, size, paint, 0.2);
                    }
                }
                m.disc(0.0, -0.42, 0.16, MAIN, 0.16);
            }
            Self::Tower => {
                m.poly(&[(-0.42, -0.5), (0.42, -0.5), (0.52, 1.0), (-0.52, 1.0)], MAIN, 0.34);
                m.slab(0.0, -0.56, (0.56, 0.14), 0.0, MAIN, 0.12);
                for x in [-0.45, -0.15, 0.15, 0.45] {
                    m.slab(x, -0.82, (0.11, 0.16), 0.0, MAIN, 0.08);
                }
                for (x, y) in [(-0.14, -0.15), (0.16, 0.2)] {
                    m.slab(x, y, (0.09, 0.14), 0.09, DARK, 0.02);
                }
                m.dome(0.0, 1.0, (0.17, 0.42), DARK, 0.02);
            }
            Self::House => {
                m.slab(0.5, -0.62, (0.1, 0.28), 0.0, WOOD, 0.06);
                m.slab(0.0, 0.45, (0.72, 0.55), 0.0, MAIN, 0.1);
                m.poly(&[(-0.95, 0.0), (0.0, -0.95), (0.95, 0.0)], SHADED, 0.2);
                m.slab(-0.26, 0.68, (0.17, 0.32), 0.02, DARK, 0.02);
                m.slab(0.34, 0.4, (0.17, 0.17), 0.02, Paint::Own(rgb(250, 226, 150)), 0.03);
            }
            Self::Tree => {
                m.poly(&[(-0.13, 0.1), (0.13, 0.1), (0.2, 1.0), (-0.2, 1.0)], WOOD, 0.14);
                for (x, y, size) in [
                    (-0.38, 0.02, 0.4),
                    (0.38, 0.02, 0.4),
                    (-0.24, -0.46, 0.42),
                    (0.26, -0.46, 0.42),
                    (0.0, -0.1, 0.46),
                ] {
                    m.disc(x, y, size, MAIN, 0.36);
                }
            }
            Self::Boat => {
                m.stroke((0.0, -0.95), (0.0, 0.5), 0.07, WOOD);
                m.poly(&[(0.07, -0.9), (0.8, 0.36), (0.07, 0.36)], CLOTH, 0.16);
                m.poly(&[(-0.07, -0.6), (-0.07, 0.36), (-0.55, 0.36)], CLOTH, 0.14);
                m.poly(&[(-1.0, 0.46), (1.0, 0.46), (0.66, 1.0), (-0.62, 1.0)], MAIN, 0.26);
            }
            Self::Bird => {
                for x in [-0.12, 0.14] {
                    m.stroke((x, 0.6), (x, 0.96), 0.06, WOOD);
                }
                m.poly(&[(-0.45, 0.1), (-1.0, 0.42), (-0.86, 0.62), (-0.3, 0.5)], SHADED, 0.12);
                let body = dome(m.at(0.0, 0.25), (0.62 * r, 0.48 * r)).or(dome(m.at(0.0, 0.25), (0.62 * r, -0.44 * r)));
                m.push(body, MAIN, 0.4);
                m.disc(0.42, -0.3, 0.36, MAIN, 0.34);
                m.poly(&[(0.72, -0.4), (1.02, -0.26), (0.72, -0.18)], Paint::Own(rgb(240, 150, 40)), 0.08);
                m.disc(0.52, -0.38, 0.07, DARK, 0.07);
                m.dome(-0.1, 0.3, (0.38, -0.34), SHADED, 0.2);
            }
            Self::Mushroom => {
                m.poly(&[(-0.2, 0.0), (0.2, 0.0), (0.28, 1.0), (-0.28, 1.0)], CLOTH, 0.22);
                m.dome(0.0, 0.12, (0.86, 1.0), MAIN, 0.5);
                for (x, y, size) in [(-0.36, -0.2, 0.13), (0.1, -0.5, 0.14), (0.42, -0.12, 0.12), (0.0, -0.06, 0.09)] {
                    m.disc(x, y, size, Paint::Own(rgb(246, 242, 232)), 0.1);
                }
            }
        }
        m.parts
    }
}

//! Shapes as signed distances: negative inside, in units of one hundredth of the card's width. The formulas are those of
//! Inigo Quilez's collection of 2D distance functions.

use std::f32::consts::{PI, TAU};

/// A point or a vector: right, down.
pub(crate) type V = (f32, f32);

/// A shape and a box around it.
pub(crate) struct Shape {
    distance: Box<dyn Fn(V) -> f32>,
    /// Left, top, right, bottom.
    pub(crate) bounds: [f32; 4],
}

impl Shape {
    fn new(bounds: [f32; 4], distance: impl Fn(V) -> f32 + 'static) -> Self {
        Self { distance: Box::new(distance), bounds }
    }

    /// Signed distance of a point.
    pub(crate) fn distance(&self, p: V) -> f32 {
        (self.distance)(p)
    }

    /// Both shapes.
    pub(crate) fn or(self, other: Self) -> Self {
        let (a, b) = (self.bounds, other.bounds);
        let bounds = [a[0].min(b[0]), a[1].min(b[1]), a[2].max(b[2]), a[3].max(b[3])];
        Self::new(bounds, move |p| self.distance(p).min(other.distance(p)))
    }

    /// What both have in common.
    pub(crate) fn and(self, other: Self) -> Self {
        Self::new(self.bounds, move |p| self.distance(p).max(other.distance(p)))
    }

    /// This without the other.
    pub(crate) fn minus(self, other: Self) -> Self {
        Self::new(self.bounds, move |p| self.distance(p).max(-other.distance(p)))
    }

    /// Only its edge, `width` wide.
    pub(crate) fn edge(self, width: f32) -> Self {
        let [l, t, r, b] = self.bounds;
        let half = width / 2.0;
        Self::new([l - half, t - half, r + half, b + half], move |p| self.distance(p).abs() - half)
    }
}

/// A disc.
pub(crate) fn disc(c: V, r: f32) -> Shape {
    Shape::new([c.0 - r, c.1 - r, c.0 + r, c.1 + r], move |p| (p.0 - c.0).hypot(p.1 - c.1) - r)
}

/// An upright rectangle by its middle and half sides, with corners rounded by `round`.
pub(crate) fn slab(c: V, half: V, round: f32) -> Shape {
    let bounds = [c.0 - half.0, c.1 - half.1, c.0 + half.0, c.1 + half.1];
    Shape::new(bounds, move |p| {
        let (x, y) = ((p.0 - c.0).abs() - half.0 + round, (p.1 - c.1).abs() - half.1 + round);
        x.max(0.0).hypot(y.max(0.0)) + x.max(y).min(0.0) - round
    })
}

/// A stroke with round ends.
pub(crate) fn stroke(a: V, b: V, width: f32) -> Shape {
    let r = width / 2.0;
    let bounds = [a.0.min(b.0) - r, a.1.min(b.1) - r, a.0.max(b.0) + r, a.1.max(b.1) + r];
    Shape::new(bounds, move |p| segment(p, a, b).0 - r)
}

/// Distance to a segment, and the vector to its nearest point.
fn segment(p: V, a: V, b: V) -> (f32, V) {
    let (dx, dy) = (b.0 - a.0, b.1 - a.1);
    let along = ((p.0 - a.0) * dx + (p.1 - a.1) * dy) / (dx * dx + dy * dy).max(1e-9);
    let t = along.clamp(0.0, 1.0);
    let to = (p.0 - a.0 - dx * t, p.1 - a.1 - dy * t);
    (to.0.hypot(to.1), to)
}

/// A closed polygon.
pub(crate) fn polygon(points: &[V]) -> Shape {
    let fold = |start: f32, pick: fn(f32, f32) -> f32, of: fn(&V) -> f32| points.iter().map(of).fold(start, pick);
    let bounds = [
        fold(f32::MAX, f32::min, |p| p.0),
        fold(f32::MAX, f32::min, |p| p.1),
        fold(f32::MIN, f32::max, |p| p.0),
        fold(f32::MIN, f32::max, |p| p.1),
    ];
    let points = points.to_vec();
    Shape::new(bounds, move |p| {
        let (mut nearest, mut inside) = (f32::MAX, false);
        for (i, &a) in points.iter().enumerate() {
            let b = points[(i + 1) % points.len()];
            nearest = nearest.min(segment(p, a, b).0);
            if (a.1 > p.1) != (b.1 > p.1) && p.0 < (b.0 - a.0) * (p.1 - a.1) / (b.1 - a.1) + a.0 {
                inside = !inside;
            }
        }
        if inside { -nearest } else { nearest }
    })
}

/// A star of `n` points, the first one up.
pub(crate) fn star(c: V, outer: f32, inner: f32, n: usize) -> Shape {
    let points: Vec<V> =
        (0..2 * n).map(|i| around(c, if i % 2 == 0 { outer } else { inner }, i as f32 / (2 * n) as f32)).collect();
    polygon(&points)
}

/// The point at `turn` (in turns, clockwise from the top) on a circle.
pub(crate) fn around(c: V, r: f32, turn: f32) -> V {
    let angle = turn * TAU - PI / 2.0;
    (c.0 + r * angle.cos(), c.1 + r * angle.sin())
}

/// A crescent, open to the right.
pub(crate) fn crescent(c: V, r: f32) -> Shape {
    disc(c, r).minus(disc((c.0 + 0.45 * r, c.1 - 0.12 * r), 0.82 * r))
}

/// A smooth blob between two y, such as a hill: the part of an ellipse of half width `half.0` and height `half.1` above its middle.
pub(crate) fn dome(base: V, half: V) -> Shape {
    let points: Vec<V> = (0..=32)
        .map(|i| {
            let angle = PI * i as f32 / 32.0;
            (base.0 - half.0 * angle.cos(), base.1 - half.1 * angle.sin())
        })
        .collect();
    polygon(&points)
}

//! What all cards share: border, panel, number in Roman strokes.

use crate::canvas::{BLACK, CREAM, Canvas, GOLD, Ink, PAPER, RED};
use crate::shape::{Shape, V, slab, star, stroke};

/// The part of the card that a scene fills: middle and half sides.
pub(crate) struct Panel {
    pub(crate) middle: V,
    pub(crate) half: V,
}

impl Panel {
    /// The panel as a shape, to keep scenes inside.
    pub(crate) fn shape(&self) -> Shape {
        slab(self.middle, self.half, 3.0)
    }

    pub(crate) fn bottom(&self) -> f32 {
        self.middle.1 + self.half.1
    }

    pub(crate) fn top(&self) -> f32 {
        self.middle.1 - self.half.1
    }
}

/// Paints the card's ground and returns the panel.
pub(crate) fn ground(canvas: &mut Canvas, sky: Ink) -> Panel {
    let h = canvas.height;
    let middle = (50.0, h / 2.0);
    canvas.fill(&slab(middle, (48.0, h / 2.0 - 2.0), 4.0), BLACK);
    canvas.fill(&slab(middle, (47.0, h / 2.0 - 3.0), 3.4), CREAM);
    canvas.draw(slab(middle, (44.5, h / 2.0 - 5.5), 2.5), RED);
    canvas.draw(slab(middle, (42.0, h / 2.0 - 8.0), 2.5), CREAM);
    let panel = Panel { middle: (50.0, h / 2.0 - 5.0), half: (38.5, h / 2.0 - 17.0) };
    canvas.draw(panel.shape(), sky);
    panel
}

/// Paints corner stars and the number over the scene.
pub(crate) fn finish(canvas: &mut Canvas, panel: &Panel, number: usize) {
    let h = canvas.height;
    canvas.fill(&panel.shape().edge(1.4), BLACK);
    for corner in [(6.75, 6.75), (93.25, 6.75), (6.75, h - 6.75), (93.25, h - 6.75)] {
        canvas.draw(star(corner, 4.2, 1.7, 4), GOLD);
    }
    let y = (panel.bottom() + h - 8.0) / 2.0;
    canvas.draw(slab((50.0, y), (24.0, 4.6), 4.6), PAPER);
    for side in [-1.0, 1.0] {
        canvas.draw(star((50.0 + side * 31.0, y), 3.4, 1.3, 4), RED);
    }
    roman(canvas, (50.0, y), number);
}

/// A number as Roman strokes; zero is a ring of nothing, as on the Fool.
fn roman(canvas: &mut Canvas, middle: V, number: usize) {
    let text = numeral(number);
    let width = |c: char| if c == 'I' { 2.2 } else { 4.6 };
    let total: f32 = text.chars().map(width).sum();
    let mut x = middle.0 - total / 2.0;
    let (top, bottom) = (middle.1 - 2.6, middle.1 + 2.6);
    for c in text.chars() {
        let (l, m, r) = (x + 0.6, x + width(c) / 2.0, x + width(c) - 0.6);
        let strokes: &[(V, V)] = match c {
            'I' => &[((m, top), (m, bottom))],
            'V' => &[((l, top), (m, bottom)), ((r, top), (m, bottom))],
            'X' => &[((l, top), (r, bottom)), ((r, top), (l, bottom))],
            _ => &[((m, middle.1), (m, middle.1))],
        };
        for (a, b) in strokes {
            canvas.fill(&stroke(*a, *b, 0.95), BLACK);
        }
        x += width(c);
    }
}

/// Roman numerals up to 39; `o` for zero.
pub(crate) fn numeral(number: usize) -> String {
    if number == 0 {
        return "o".to_owned();
    }
    let mut rest = number;
    let mut text = String::new();
    for (value, letters) in [(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")] {
        while rest >= value {
            text.push_str(letters);
            rest -= value;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::numeral;

    #[test]
    fn numerals() {
        let of = |numbers: &[usize]| numbers.iter().map(|n| numeral(*n)).collect::<Vec<_>>().join(" ");
        assert_eq!(of(&[0, 1, 4, 9, 14, 19, 21]), "o I IV IX XIV XIX XXI");
    }
}

//! What all cards share: border, panel, number in Roman strokes.

use super::canvas::{BLACK, CREAM, Canvas, Ink, PAPER, RED};
use crate::shape::{Shape, V, slab, stroke};
use crate::words::Light;

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

/// The sky of a card.
fn sky(light: Light) -> Ink {
    match light {
        Light::Morning => PAPER,
        Light::Noon => CREAM,
        Light::Sunset => RED,
        Light::Night => BLACK,
    }
}

/// Paints the card's ground and returns the panel.
pub(crate) fn ground(canvas: &mut Canvas, light: Light) -> Panel {
    let h = canvas.height;
    let middle = (50.0, h / 2.0);
    canvas.draw(slab(middle, (48.0, h / 2.0 - 2.0), 4.0), RED);
    canvas.draw(slab(middle, (43.5, h / 2.0 - 6.5), 2.5), CREAM);
    let panel = Panel { middle: (50.0, h / 2.0 - 5.0), half: (38.5, h / 2.0 - 16.5) };
    canvas.draw(panel.shape(), sky(light));
    panel
}

/// Paints the panel's frame over the scene, and the number below it.
pub(crate) fn finish(canvas: &mut Canvas, panel: &Panel, number: usize) {
    canvas.fill(&panel.shape().edge(2.2), BLACK);
    roman(canvas, (50.0, (panel.bottom() + canvas.height - 6.5) / 2.0), number);
}

/// A number as Roman strokes; zero is a ring of nothing, as on the Fool.
fn roman(canvas: &mut Canvas, middle: V, number: usize) {
    let text = numeral(number);
    let width = |c: char| if c == 'I' { 3.4 } else { 6.0 };
    let total: f32 = text.chars().map(width).sum();
    let mut x = middle.0 - total / 2.0;
    let (top, bottom) = (middle.1 - 3.0, middle.1 + 3.0);
    for c in text.chars() {
        let (l, m, r) = (x + 0.9, x + width(c) / 2.0, x + width(c) - 0.9);
        let strokes: &[(V, V)] = match c {
            'I' => &[((m, top), (m, bottom))],
            'V' => &[((l, top), (m, bottom)), ((r, top), (m, bottom))],
            'X' => &[((l, top), (r, bottom)), ((r, top), (l, bottom))],
            _ => &[((m, middle.1), (m, middle.1))],
        };
        for (a, b) in strokes {
            canvas.fill(&stroke(*a, *b, 1.6), BLACK);
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

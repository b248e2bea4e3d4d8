//! How much a picture looks like printed cards of a few colours: one number in [0, 1], without any model.
//!
//! The mean of three parts, each 0 for a photograph of other colours and 1 for a flat, outlined print in the palette:
//!
//! | part | of the picture's pixels |
//! | --- | --- |
//! | palette | 1 - mean(min(d, 50)) / 50, where d is the CIELAB distance (CIE 1976) to the nearest colour of the palette |
//! | flatness | share that lies in the 6 fullest of 512 boxes of colour (8 × 8 × 8 in RGB): prints have few colours |
//! | outlines | share next to a hard dark line (in the 3 × 3 around it, lightness L* falls below 30 and rises above 60), 20 % counting as 1 |
//!
//! Lightness and distances are those of sRGB under D65. The palette is given, so the score is about *a* style; the constants
//! are not tuned to any model.

use crate::Picture;

/// Colour boxes that count as a print's.
const BOXES: usize = 6;

/// Distance from which a colour is as foreign as can be.
const FOREIGN: f64 = 50.0;

/// Lightness of a line at most, and of what it outlines at least.
const LINE: [f64; 2] = [30.0, 60.0];

/// Share of pixels beside lines that counts as fully outlined.
const OUTLINED: f64 = 0.2;

/// L*, a*, b*.
type Lab = [f64; 3];

/// The reference.
#[derive(Debug, Clone, PartialEq)]
pub struct Style {
    palette: Vec<Lab>,
}

/// The parts of a score, each in [0, 1].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StyleScore {
    /// Nearness to the palette.
    pub palette: f64,
    /// How few colours there are.
    pub flatness: f64,
    /// How much is outlined.
    pub outlines: f64,
}

impl StyleScore {
    /// The mean of the parts.
    pub fn mean(self) -> f64 {
        (self.palette + self.flatness + self.outlines) / 3.0
    }
}

impl Style {
    /// A style with these colours, in sRGB; `None` if there are none.
    pub fn new(palette: &[[u8; 3]]) -> Option<Self> {
        (!palette.is_empty()).then(|| Self { palette: palette.iter().map(|rgb| lab(*rgb)).collect() })
    }

    /// The score of a picture; all parts are 0 for an empty one.
    pub fn score(&self, picture: &Picture) -> StyleScore {
        let pixels: Vec<Lab> = picture.rgb.chunks_exact(3).map(|p| lab([p[0], p[1], p[2]])).collect();
        let count = pixels.len().max(1) as f64;
        let far: f64 = pixels.iter().map(|pixel| self.distance(pixel).min(FOREIGN)).sum();
        let palette = if pixels.is_empty() { 0.0 } else { 1.0 - far / count / FOREIGN };

        let mut boxes = vec![0u32; 512];
        for p in picture.rgb.chunks_exact(3) {
            boxes[(usize::from(p[0] >> 5) << 6) | (usize::from(p[1] >> 5) << 3) | usize::from(p[2] >> 5)] += 1;
        }
        boxes.sort_unstable_by(|a, b| b.cmp(a));
        let flatness = f64::from(boxes[..BOXES].iter().sum::<u32>()) / count;

        let outlined = lines(&pixels, picture.width as usize, picture.height as usize) as f64 / count;
        StyleScore { palette, flatness, outlines: (outlined / OUTLINED).min(1.0) }
    }

    fn distance(&self, pixel: &Lab) -> f64 {
        let to = |colour: &Lab| colour.iter().zip(pixel).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        self.palette.iter().map(to).fold(f64::INFINITY, f64::min).sqrt()
    }
}

/// Pixels beside a line.
fn lines(pixels: &[Lab], width: usize, height: usize) -> usize {
    let near = |x: usize, y: usize| {
        let rows = y.saturating_sub(1)..(y + 2).min(height);
        rows.flat_map(move |row| (x.saturating_sub(1)..(x + 2).min(width)).map(move |column| row * width + column))
    };
    let beside = |x: usize, y: usize| {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for at in near(x, y) {
            low = low.min(pixels[at][0]);
            high = high.max(pixels[at][0]);
        }
        low < LINE[0] && high > LINE[1]
    };
    (0..height).flat_map(|y| (0..width).map(move |x| (x, y))).filter(|(x, y)| beside(*x, *y)).count()
}

/// sRGB to CIELAB under D65 (IEC 61966-2-1, CIE 15).
fn lab(rgb: [u8; 3]) -> Lab {
    let [r, g, b] = rgb.map(|byte| {
        let v = f64::from(byte) / 255.0;
        if v <= 0.04045 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) }
    });
    let xyz = [
        (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047,
        0.2126729 * r + 0.7151522 * g + 0.0721750 * b,
        (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883,
    ];
    let [x, y, z] = xyz.map(|t| if t > 216.0 / 24389.0 { t.cbrt() } else { (24389.0 / 27.0 * t + 16.0) / 116.0 });
    [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREAM: [u8; 3] = [246, 234, 207];
    const RED: [u8; 3] = [178, 44, 40];
    const BLACK: [u8; 3] = [32, 26, 25];

    fn style() -> Style {
        Style::new(&[CREAM, RED, BLACK]).unwrap()
    }

    #[test]
    fn lab_is_that_of_the_standard() {
        // Bruce Lindbloom's calculator, D65, sRGB.
        for (rgb, expected) in [
            ([255, 255, 255], [100.0, 0.0, 0.0]),
            ([0, 0, 0], [0.0, 0.0, 0.0]),
            ([255, 0, 0], [53.24, 80.09, 67.20]),
            ([0, 0, 255], [32.30, 79.19, -107.86]),
        ] {
            for (ours, theirs) in lab(rgb).iter().zip(expected) {
                assert!((ours - theirs).abs() < 0.02, "{rgb:?}: {:?}", lab(rgb));
            }
        }
    }

    #[test]
    fn a_print_in_the_palette_scores_high_and_a_gradient_of_other_colours_low() {
        let mut print = Picture::filled(60, 60, CREAM);
        for i in 0..5 {
            print.paste(&Picture::filled(50, 2, BLACK), 5, 5 + 11 * i);
            print.paste(&Picture::filled(50, 5, RED), 5, 7 + 11 * i);
        }
        let mut photo = Picture::filled(60, 60, [0; 3]);
        for (i, pixel) in photo.rgb.chunks_exact_mut(3).enumerate() {
            let (x, y) = (i % 60, i / 60);
            pixel.copy_from_slice(&[60 + x as u8, 120 + y as u8, 200 - x as u8]);
        }
        let (print, photo) = (style().score(&print), style().score(&photo));
        assert!(print.palette > 0.999 && print.flatness > 0.999 && print.outlines > 0.7, "{print:?}");
        assert!(photo.outlines == 0.0 && photo.mean() < 0.4, "{photo:?}");
    }

    #[test]
    fn one_plain_colour_of_the_palette_has_no_outlines() {
        let score = style().score(&Picture::filled(8, 8, RED));
        assert!(score.palette > 0.999 && score.flatness == 1.0 && score.outlines == 0.0, "{score:?}");
        assert!((score.mean() - 2.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn degenerate_pictures_have_scores_too() {
        assert!(Style::new(&[]).is_none());
        let empty = style().score(&Picture { width: 0, height: 0, rgb: Vec::new() });
        assert_eq!(empty.mean(), 0.0);
        assert!(style().score(&Picture::filled(1, 1, CREAM)).mean() > 0.6);
    }
}

//! Paints shapes with smooth edges.

use image::RgbImage;

use crate::shape::{Shape, V};

/// A colour.
pub(crate) type Ink = [u8; 3];

pub(crate) const CREAM: Ink = [246, 234, 207];
pub(crate) const PAPER: Ink = [235, 215, 173];
pub(crate) const RED: Ink = [178, 44, 40];
pub(crate) const GOLD: Ink = [221, 166, 58];
pub(crate) const BLACK: Ink = [32, 26, 25];

/// Width of outlines.
const LINE: f32 = 1.8;

/// A picture that is 100 units wide.
pub(crate) struct Canvas {
    image: RgbImage,
    /// Pixels per unit.
    scale: f32,
    /// Units down.
    pub(crate) height: f32,
}

impl Canvas {
    pub(crate) fn new(width: u32, height: u32, ground: Ink) -> Self {
        let scale = width as f32 / 100.0;
        Self { image: RgbImage::from_pixel(width, height, image::Rgb(ground)), scale, height: height as f32 / scale }
    }

    /// Fills a shape; an edge covers a pixel by the part that lies inside.
    pub(crate) fn fill(&mut self, shape: &Shape, ink: Ink) {
        let [left, top, right, bottom] = shape.bounds.map(|v| v * self.scale);
        let (width, height) = self.image.dimensions();
        let from = |v: f32| (v - 1.0).floor().max(0.0) as u32;
        let to = |v: f32, most: u32| ((v + 1.0).ceil().max(0.0) as u32).min(most);
        for y in from(top)..to(bottom, height) {
            for x in from(left)..to(right, width) {
                let p: V = ((x as f32 + 0.5) / self.scale, (y as f32 + 0.5) / self.scale);
                let cover = (0.5 - shape.distance(p) * self.scale).clamp(0.0, 1.0);
                if cover > 0.0 {
                    let pixel = self.image.get_pixel_mut(x, y);
                    for (old, new) in pixel.0.iter_mut().zip(ink) {
                        *old = (f32::from(*old) + (f32::from(new) - f32::from(*old)) * cover).round() as u8;
                    }
                }
            }
        }
    }

    /// Fills a shape and draws its outline in black.
    pub(crate) fn draw(&mut self, shape: Shape, ink: Ink) {
        self.fill(&shape, ink);
        self.fill(&shape.edge(LINE), BLACK);
    }

    /// The picture.
    pub(crate) fn into_image(self) -> RgbImage {
        self.image
    }
}

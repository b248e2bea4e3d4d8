//! Labels on pictures, in a bitmap font of fixed width (Latin-1; other characters show as `?`).

use embedded_graphics::mono_font::iso_8859_1::FONT_7X13;
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::*;
use embedded_graphics::text::{Baseline, Text};

use crate::Picture;

const FONT: &MonoFont<'_> = &FONT_7X13;

/// Pixels from one line to the next.
pub(crate) const LINE: u32 = 15;

/// Lines of at most `width` pixels, broken at spaces; a longer word stands alone and is cut when drawn.
pub(crate) fn wrap(text: &str, width: u32) -> Vec<String> {
    let room = (width / FONT.character_size.width).max(1) as usize;
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Pixels across a line.
pub(crate) fn width(line: &str) -> u32 {
    line.chars().count() as u32 * FONT.character_size.width
}

/// Writes a line in black with its top left corner at (`left`, `top`); what reaches beyond the picture is cut.
pub(crate) fn write(picture: &mut Picture, line: &str, left: u32, top: u32) {
    let style = MonoTextStyle::new(FONT, Rgb888::BLACK);
    let at = Point::new(left as i32, top as i32);
    let Ok(_) = Text::with_baseline(line, at, style, Baseline::Top).draw(&mut Paper(picture));
}

/// A picture that can be drawn on.
struct Paper<'a>(&'a mut Picture);

impl OriginDimensions for Paper<'_> {
    fn size(&self) -> Size {
        Size::new(self.0.width, self.0.height)
    }
}

impl DrawTarget for Paper<'_> {
    type Color = Rgb888;
    type Error = core::convert::Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> Result<(), Self::Error> {
        for Pixel(at, colour) in pixels {
            if let (Ok(x), Ok(y)) = (u32::try_from(at.x), u32::try_from(at.y))
                && x < self.0.width
                && y < self.0.height
            {
                let start = 3 * (y as usize * self.0.width as usize + x as usize);
                self.0.rgb[start..start + 3].copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_spaces() {
        assert_eq!(wrap("a golden cup by the sea", 7 * 12), ["a golden cup", "by the sea"]);
        assert_eq!(wrap("unbreakable word", 7 * 4), ["unbreakable", "word"]);
        assert!(wrap(" ", 70).is_empty());
    }

    #[test]
    fn text_is_ink_and_is_cut_at_the_edge() {
        let mut picture = Picture::filled(20, 12, [255; 3]);
        write(&mut picture, "WWWWWW", 10, 5);
        let dark = picture.rgb.chunks_exact(3).filter(|pixel| **pixel == [0; 3]).count();
        assert!((10..60).contains(&dark), "{dark}");
        assert_eq!(width("WWW"), 21);
    }
}

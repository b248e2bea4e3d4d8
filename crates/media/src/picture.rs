//! A picture in memory.

/// RGB8 pixels, row-major, no padding, orientation applied, no alpha.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// `3 * width * height` bytes.
    pub rgb: Vec<u8>,
}

impl Picture {
    /// A picture of one colour.
    pub fn filled(width: u32, height: u32, colour: [u8; 3]) -> Self {
        Self { width, height, rgb: colour.repeat(width as usize * height as usize) }
    }

    /// The pixel at column `x`, row `y`.
    pub fn pixel(&self, x: u32, y: u32) -> [u8; 3] {
        let at = 3 * (y as usize * self.width as usize + x as usize);
        [self.rgb[at], self.rgb[at + 1], self.rgb[at + 2]]
    }

    /// The `width` x `height` part whose top left corner is at (`left`, `top`), which must lie inside.
    #[must_use]
    pub fn cropped(&self, left: u32, top: u32, width: u32, height: u32) -> Self {
        assert!(left + width <= self.width && top + height <= self.height, "a crop lies inside its picture");
        let (stride, row) = (3 * self.width as usize, 3 * width as usize);
        let rgb = (top..top + height)
            .flat_map(|y| {
                let start = y as usize * stride + 3 * left as usize;
                &self.rgb[start..start + row]
            })
            .copied()
            .collect();
        Self { width, height, rgb }
    }

    /// Writes `other` over this picture with its top left corner at (`left`, `top`); it must fit.
    pub fn paste(&mut self, other: &Self, left: u32, top: u32) {
        assert!(left + other.width <= self.width && top + other.height <= self.height, "a pasted picture fits");
        let (stride, row) = (3 * self.width as usize, 3 * other.width as usize);
        for (y, line) in other.rgb.chunks_exact(row).enumerate() {
            let start = (top as usize + y) * stride + 3 * left as usize;
            self.rgb[start..start + row].copy_from_slice(line);
        }
    }
}

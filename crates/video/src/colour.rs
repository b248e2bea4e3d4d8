//! Between RGB and the luma and colour differences of video, 8 bits each (ITU-R BT.601, BT.709, BT.2020).

/// How luma is weighted, and whether it spans 16 to 235 or all of 0 to 255.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Matrix {
    red: f32,
    blue: f32,
    full_range: bool,
}

impl Matrix {
    /// What files mean that say nothing.
    pub(crate) const BT601: Self = Self { red: 0.299, blue: 0.114, full_range: false };
    /// High definition.
    pub(crate) const BT709: Self = Self { red: 0.2126, blue: 0.0722, full_range: false };
    /// Ultra-high definition.
    pub(crate) const BT2020: Self = Self { red: 0.2627, blue: 0.0593, full_range: false };

    pub(crate) fn full(self, full_range: bool) -> Self {
        Self { full_range, ..self }
    }

    /// Least luma, its span, and the span of the differences.
    fn spans(self) -> (f32, f32, f32) {
        if self.full_range { (0.0, 255.0, 255.0) } else { (16.0, 219.0, 224.0) }
    }

    pub(crate) fn rgb(self, [y, u, v]: [u8; 3]) -> [u8; 3] {
        let (least, luma, difference) = self.spans();
        let y = (f32::from(y) - least) / luma;
        let (u, v) = ((f32::from(u) - 128.0) / difference, (f32::from(v) - 128.0) / difference);
        let (r, b) = (y + 2.0 * (1.0 - self.red) * v, y + 2.0 * (1.0 - self.blue) * u);
        let g = (y - self.red * r - self.blue * b) / (1.0 - self.red - self.blue);
        [r, g, b].map(|value| (value * 255.0).round().clamp(0.0, 255.0) as u8)
    }

    pub(crate) fn yuv(self, rgb: [u8; 3]) -> [u8; 3] {
        let (least, luma, difference) = self.spans();
        let [r, g, b] = rgb.map(|value| f32::from(value) / 255.0);
        let y = self.red * r + (1.0 - self.red - self.blue) * g + self.blue * b;
        let (u, v) = ((b - y) / (2.0 * (1.0 - self.blue)), (r - y) / (2.0 * (1.0 - self.red)));
        [least + y * luma, 128.0 + u * difference, 128.0 + v * difference]
            .map(|value| value.round().clamp(0.0, 255.0) as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_colours_have_their_published_codes() {
        assert_eq!(Matrix::BT601.yuv([255, 255, 255]), [235, 128, 128]);
        assert_eq!(Matrix::BT601.yuv([255, 0, 0]), [81, 90, 240]);
        assert_eq!(Matrix::BT709.yuv([0, 255, 0]), [173, 42, 26]);
        assert_eq!(Matrix::BT709.full(true).yuv([0, 0, 0]), [0, 128, 128]);
        assert_eq!(Matrix::BT709.rgb([16, 128, 128]), [0, 0, 0]);
    }

    #[test]
    fn there_and_back_is_off_by_rounding() {
        for matrix in [Matrix::BT601, Matrix::BT709, Matrix::BT2020, Matrix::BT709.full(true)] {
            for rgb in [[0, 0, 0], [255, 255, 255], [200, 30, 90], [12, 240, 3], [1, 2, 250]] {
                let back = matrix.rgb(matrix.yuv(rgb));
                assert!(rgb.iter().zip(back).all(|(a, b)| a.abs_diff(b) <= 2), "{matrix:?} {rgb:?} {back:?}");
            }
        }
    }
}

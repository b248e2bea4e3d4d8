//! How a player turns the frames of a file before it shows them.

use media::Picture;

/// Flips and a transposition: first columns and rows change places, then sides are mirrored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Orientation {
    transpose: bool,
    mirror_x: bool,
    mirror_y: bool,
}

impl Orientation {
    /// From a display matrix of nine 16.16 numbers `a b u c d v x y w`: (x, y) is shown at (a x + c y, b x + d y).
    pub(crate) fn of_matrix(bytes: &[u8]) -> Option<Self> {
        let number = |i: usize| Some(i32::from_ne_bytes(bytes.get(4 * i..4 * i + 4)?.try_into().ok()?));
        let (a, b, c, d) = (number(0)?, number(1)?, number(3)?, number(4)?);
        Some(if a.unsigned_abs() >= b.unsigned_abs() {
            Self { transpose: false, mirror_x: a < 0, mirror_y: d < 0 }
        } else {
            Self { transpose: true, mirror_x: c < 0, mirror_y: b < 0 }
        })
    }

    /// Size after turning.
    pub(crate) fn size(self, width: u32, height: u32) -> (u32, u32) {
        if self.transpose { (height, width) } else { (width, height) }
    }

    /// The picture as it is shown.
    pub(crate) fn apply(self, picture: Picture) -> Picture {
        if self == Self::default() {
            return picture;
        }
        let (width, height) = self.size(picture.width, picture.height);
        let mut rgb = Vec::with_capacity(picture.rgb.len());
        for y in 0..height {
            for x in 0..width {
                let x = if self.mirror_x { width - 1 - x } else { x };
                let y = if self.mirror_y { height - 1 - y } else { y };
                let (x, y) = if self.transpose { (y, x) } else { (x, y) };
                rgb.extend(picture.pixel(x, y));
            }
        }
        Picture { width, height, rgb }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turned(matrix: [i32; 4]) -> (u32, u32, Vec<u8>) {
        let [a, b, c, d] = matrix.map(|n| n << 16);
        let bytes: Vec<u8> = [a, b, 0, c, d, 0, 0, 0, 1 << 30].iter().flat_map(|n| n.to_ne_bytes()).collect();
        // Two across, three down, numbered in reading order.
        let rgb = (0..6).flat_map(|n| [n; 3]).collect();
        let shown = Orientation::of_matrix(&bytes).unwrap().apply(Picture { width: 2, height: 3, rgb });
        (shown.width, shown.height, shown.rgb.iter().step_by(3).copied().collect())
    }

    #[test]
    fn turns_and_mirrors_are_told_from_the_matrix() {
        assert_eq!(turned([1, 0, 0, 1]), (2, 3, vec![0, 1, 2, 3, 4, 5]));
        assert_eq!(turned([-1, 0, 0, -1]), (2, 3, vec![5, 4, 3, 2, 1, 0]));
        // Clockwise by a quarter, as a telephone held upright writes it.
        assert_eq!(turned([0, 1, -1, 0]), (3, 2, vec![4, 2, 0, 5, 3, 1]));
        assert_eq!(turned([0, -1, 1, 0]), (3, 2, vec![1, 3, 5, 0, 2, 4]));
        assert_eq!(turned([-1, 0, 0, 1]), (2, 3, vec![1, 0, 3, 2, 5, 4]));
        assert_eq!(Orientation::of_matrix(&[0; 12]), None);
    }
}

//! Many pictures on one sheet.

use crate::Picture;

/// Pixels between pictures and at the edge.
const GAP: u32 = 8;

/// A grid in reading order on white. Cells are as large as the largest picture; smaller ones lie in the middle of theirs.
pub fn contact_sheet(pictures: &[Picture], columns: usize) -> Picture {
    let columns = columns.clamp(1, pictures.len().max(1));
    let rows = pictures.len().div_ceil(columns);
    let width = pictures.iter().map(|p| p.width).max().unwrap_or(0);
    let height = pictures.iter().map(|p| p.height).max().unwrap_or(0);
    let extent = |cells: usize, side: u32| GAP + cells as u32 * (side + GAP);
    let mut sheet = Picture::filled(extent(columns, width), extent(rows, height), [255; 3]);
    for (i, picture) in pictures.iter().enumerate() {
        let left = extent(i % columns, width) + (width - picture.width) / 2;
        let top = extent(i / columns, height) + (height - picture.height) / 2;
        sheet.paste(picture, left, top);
    }
    sheet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_lie_in_reading_order_with_gaps() {
        let colours = [[255, 0, 0], [0, 255, 0], [0, 0, 255]];
        let pictures: Vec<_> = colours.iter().map(|c| Picture::filled(10, 20, *c)).collect();
        let sheet = contact_sheet(&pictures, 2);
        assert_eq!((sheet.width, sheet.height), (3 * GAP + 20, 3 * GAP + 40));
        assert_eq!(sheet.pixel(GAP, GAP), colours[0]);
        assert_eq!(sheet.pixel(2 * GAP + 10, GAP + 19), colours[1]);
        assert_eq!(sheet.pixel(GAP + 9, 2 * GAP + 20), colours[2]);
        assert_eq!(sheet.pixel(GAP + 10, GAP), [255; 3]);
        assert_eq!(sheet.pixel(2 * GAP + 10, 2 * GAP + 20), [255; 3], "the last cell is empty");
    }
}

//! Many pictures on one sheet.

use crate::{Picture, text};

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

/// Columns side by side before a sheet with labels goes on below.
const BAND: usize = 8;

/// Pixels of the longest line of a row's label.
const MARGIN: u32 = 100;

/// A table of pictures of one size: `rows` are labelled on the left, `columns` above; `cells` come column by column. Wide
/// tables go on below. Panics unless there is a cell for each row of each column.
pub fn labelled_sheet(rows: &[String], columns: &[String], cells: &[Picture]) -> Picture {
    assert_eq!(rows.len() * columns.len(), cells.len(), "a cell for each row of each column");
    let (width, height) = cells.first().map_or((0, 0), |cell| (cell.width, cell.height));
    let heads: Vec<Vec<String>> = columns.iter().map(|column| text::wrap(column, width)).collect();
    let sides: Vec<Vec<String>> = rows.iter().map(|row| text::wrap(row, MARGIN)).collect();
    let margin = sides.iter().flatten().map(|line| text::width(line)).max().unwrap_or(0) + 2 * GAP;
    let across = BAND.min(columns.len());
    let bands: Vec<(usize, u32)> = heads
        .chunks(BAND)
        .enumerate()
        .map(|(band, heads)| (band * BAND, heads.iter().map(Vec::len).max().unwrap_or(0) as u32 * text::LINE + GAP))
        .collect();
    let body = rows.len() as u32 * (height + GAP);
    let total = bands.iter().map(|(_, head)| GAP + head + body).sum();
    let mut sheet = Picture::filled(margin + across as u32 * (width + GAP), total, [255; 3]);
    let mut top = GAP;
    for (first, head) in bands {
        for (i, lines) in heads[first..].iter().take(BAND).enumerate() {
            let left = margin + i as u32 * (width + GAP);
            // Labels end just above their column.
            let start = top + head - GAP - lines.len() as u32 * text::LINE;
            for (line, at) in lines.iter().zip((start..).step_by(text::LINE as usize)) {
                text::write(&mut sheet, line, left, at);
            }
            for (row, cell) in cells[(first + i) * rows.len()..].iter().take(rows.len()).enumerate() {
                sheet.paste(cell, left, top + head + row as u32 * (height + GAP));
            }
        }
        for (row, lines) in sides.iter().enumerate() {
            let middle = top + head + row as u32 * (height + GAP) + height / 2;
            let start = middle.saturating_sub(lines.len() as u32 * text::LINE / 2);
            for (line, at) in lines.iter().zip((start..).step_by(text::LINE as usize)) {
                text::write(&mut sheet, line, GAP, at);
            }
        }
        top += head + body + GAP;
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

    #[test]
    fn a_table_has_labels_beside_its_cells_and_goes_on_below() {
        let rows = ["before".to_owned(), "after".to_owned()];
        let columns: Vec<String> = (0..9).map(|i| format!("prompt {i}")).collect();
        let cells: Vec<_> = (0..18).map(|i| Picture::filled(60, 40, [i as u8 * 10, 0, 200])).collect();
        let sheet = labelled_sheet(&rows, &columns, &cells);
        let margin = 6 * 7 + 2 * GAP;
        let band = 2 * GAP + text::LINE + 2 * (40 + GAP);
        assert_eq!((sheet.width, sheet.height), (margin + 8 * (60 + GAP), 2 * band));
        let at = |band_number: u32, column: u32, row: u32| {
            let head = GAP + text::LINE + GAP;
            sheet.pixel(margin + column * (60 + GAP) + 30, band_number * band + head + row * (40 + GAP) + 20)
        };
        assert_eq!(at(0, 0, 1), [10, 0, 200]);
        assert_eq!(at(0, 7, 0), [140, 0, 200]);
        assert_eq!(at(1, 0, 1), [170, 0, 200]);
        assert_eq!(at(1, 1, 0), [255; 3], "nothing follows the last column");
        let ink = |left: u32, top: u32, width: u32, height: u32| {
            sheet.cropped(left, top, width, height).rgb.chunks_exact(3).any(|pixel| pixel == [0; 3])
        };
        assert!(ink(0, GAP + text::LINE + GAP, margin, 40), "a row's label");
        assert!(ink(margin, GAP, 60, text::LINE), "a column's label");
    }
}

//! Which rows share a file, as a function of the rows' names alone: a file ends after a row whose name says so. So a row that
//! comes, goes or changes touches one or two files, and all others stay the same bytes, stored once.

/// Ends of files, as row numbers: `names` are the rows' names in the order of the table. A file has about `mean` rows, at
/// least a quarter of that, but for the last, and at most four times as many.
pub fn cuts<'a>(names: impl Iterator<Item = &'a str>, mean: usize) -> Vec<usize> {
    let mean = mean.max(1);
    let (least, most) = (mean.div_ceil(4), mean.saturating_mul(4));
    let (mut ends, mut length, mut count) = (Vec::new(), 0, 0);
    for (row, name) in names.enumerate() {
        length += 1;
        count = row + 1;
        if length >= most || (length >= least && draw(name).is_multiple_of(mean as u64)) {
            ends.push(count);
            length = 0;
        }
    }
    if length > 0 {
        ends.push(count);
    }
    ends
}

/// Evenly distributed, a function of the name.
fn draw(name: &str) -> u64 {
    let bytes = blake3::hash(name.as_bytes());
    bytes.as_bytes()[..8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

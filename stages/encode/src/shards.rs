//! From rows wherever they lie to the files of the artifact. Which rows share a file is a function of the rows alone: a file
//! ends after a row whose key says so. So a changed item changes one file, and the others are those of the earlier artifact,
//! the same bytes stored once.

use std::path::Path;

use stage::{Events, Failure};
use tables::Location;

use crate::stock::{File, Place, Stock, Table};
use crate::unusable;

/// Bytes of rows that a file has on average.
const FILE_BYTES: usize = 64 << 20;
/// Rows that a file has on average at most.
const FILE_ROWS: usize = 1 << 16;

/// Ends of files, as row numbers: `names` are the rows' names in the order of the table, `row_bytes` the size of one.
pub(crate) fn ends<'a>(names: impl Iterator<Item = &'a str>, row_bytes: usize) -> Vec<usize> {
    tables::cuts(names, (FILE_BYTES / row_bytes.max(1)).clamp(1, FILE_ROWS))
}

/// Writes `folder/part-NNNNN.parquet`: the rows at `places`, each changed by `adapt(row number, row)`, in files that end at
/// `ends`. `same` tells whether the rows from a number on are, as they are to be, all of an earlier file; then it is taken
/// over as it is.
#[expect(clippy::too_many_arguments, reason = "each is named where it is called")]
pub(crate) fn write<T: Table>(
    folder: &Path,
    meta: &T::Meta,
    stock: &Stock<T>,
    places: &[Place],
    ends: &[usize],
    same: impl Fn(usize, &File) -> bool,
    adapt: impl Fn(usize, &mut T::Row),
    events: &Events,
) -> Result<(), Failure> {
    fs_err::create_dir_all(folder)?;
    let mut first = 0;
    for (part, &end) in ends.iter().enumerate() {
        events.check_interrupted(crate::KEPT)?;
        let path = folder.join(format!("part-{part:05}.parquet"));
        let rows = &places[first..end];
        let whole = whole_file(stock, rows).filter(|file| T::meta(&file.path).is_ok_and(|found| found == *meta));
        let linked = whole.is_some_and(|file| same(first, file) && fs_err::hard_link(&file.path, &path).is_ok());
        if !linked {
            copy::<T>(&path, meta, stock, rows, |number, row| adapt(first + number, row))?;
        }
        first = end;
    }
    Ok(())
}

/// The published file that has exactly these rows, in this order.
fn whole_file<'s, T: Table>(stock: &'s Stock<T>, rows: &[Place]) -> Option<&'s File> {
    let number = rows.first()?.file;
    let file = stock.files.get(number).filter(|file| file.published && file.table.len() == rows.len())?;
    rows.iter().enumerate().all(|(row, place)| place.file == number && place.at.row() == row).then_some(file)
}

fn copy<T: Table>(
    path: &Path,
    meta: &T::Meta,
    stock: &Stock<T>,
    rows: &[Place],
    adapt: impl Fn(usize, &mut T::Row),
) -> Result<(), Failure> {
    let mut writer = T::create(path, meta).map_err(unusable)?;
    // Rows of a published file come in its order: one pass over it. Those of unfinished tries are read one by one.
    let mut streams: Vec<_> = (stock.files.iter().enumerate())
        .map(|(number, file)| {
            let wanted: Vec<Location> =
                rows.iter().filter(|place| place.file == number).map(|place| place.at).collect();
            wanted.is_sorted().then(|| file.table.select::<T::Row>(wanted).peekable())
        })
        .collect();
    for (number, place) in rows.iter().enumerate() {
        // A row that several samples share comes by once.
        let is_here = |next: &tables::Result<(Location, T::Row)>| next.as_ref().map_or(true, |(at, _)| *at == place.at);
        let next = streams[place.file].as_mut().and_then(|stream| stream.next_if(is_here));
        let mut row = match next.transpose().map_err(unusable)? {
            Some((_, row)) => row,
            None => stock.files[place.file].table.get(place.at).map_err(unusable)?,
        };
        adapt(number, &mut row);
        T::push(&mut writer, row).map_err(unusable)?;
    }
    T::finish(writer).map_err(unusable)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use store::Digest;

    use super::*;

    /// Rows of each file.
    fn files(names: &[String], row_bytes: usize) -> Vec<Vec<String>> {
        let mut first = 0;
        let ends = ends(names.iter().map(String::as_str), row_bytes);
        ends.into_iter().map(|end| names[std::mem::replace(&mut first, end)..end].to_vec()).collect()
    }

    fn names(n: usize) -> Vec<String> {
        let mut names: Vec<_> = (0..n).map(|i| Digest::of_bytes(&i.to_le_bytes()).to_string()).collect();
        names.sort();
        names
    }

    proptest! {
        #[test]
        fn one_changed_row_changes_few_files(at in 0..2000usize, remove in any::<bool>()) {
            let before = names(2000);
            let mut after = before.clone();
            if remove { drop(after.remove(at)) } else { after.insert(at, format!("{}-2", before[at])) }
            let (before, after) = (files(&before, FILE_BYTES / 50), files(&after, FILE_BYTES / 50));
            prop_assert!(before.len() > 10);
            let changed = after.iter().filter(|file| !before.contains(file)).count();
            prop_assert!(changed <= 4, "{changed} of {}", after.len());
        }

        #[test]
        fn every_row_is_in_one_file_of_bounded_size(n in 0..800usize, row_bytes in 1..FILE_BYTES * 2) {
            let all = names(n);
            let files = files(&all, row_bytes);
            prop_assert_eq!(files.concat(), all);
            let mean = (FILE_BYTES / row_bytes).clamp(1, FILE_ROWS);
            prop_assert!(files.iter().all(|file| !file.is_empty() && file.len() <= 4 * mean));
        }
    }
}

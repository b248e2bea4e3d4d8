//! A grid for reading, written as rows come: columns are as wide as the first rows need, and a wider value later on pushes
//! its line out.

use std::io::Write;

use arrow::array::RecordBatch;
use arrow::datatypes::Schema;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use unicode_width::UnicodeWidthStr;

use crate::error::{Error, Result};
use crate::render::failed;

/// Rows that decide how wide columns are.
const MEASURED: usize = 1000;

/// A grid under way.
pub(crate) struct Grid<'w> {
    out: &'w mut dyn Write,
    widths: Vec<usize>,
    /// Header and rows that are not written yet.
    waiting: Vec<Vec<String>>,
    begun: bool,
}

impl<'w> Grid<'w> {
    pub(crate) fn new(schema: &Schema, out: &'w mut dyn Write) -> Self {
        let header = schema.fields().iter().map(|field| tame(field.name())).collect();
        Self { out, widths: vec![0; schema.fields().len()], waiting: vec![header], begun: false }
    }

    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        let options = FormatOptions::default().with_null("NULL").with_display_error(true);
        let columns = batch.columns().iter().map(|column| ArrayFormatter::try_new(column, &options));
        let columns = columns.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        for row in 0..batch.num_rows() {
            let cells = columns.iter().map(|column| tame(&column.value(row).to_string())).collect();
            self.waiting.push(cells);
            if self.begun || self.waiting.len() > MEASURED {
                self.flush()?;
            }
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.rule()?;
        self.out.flush().map_err(Error::Output)
    }

    fn flush(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        let begins = !std::mem::replace(&mut self.begun, true);
        if begins {
            for row in &waiting {
                for (width, cell) in self.widths.iter_mut().zip(row) {
                    *width = (*width).max(cell.width());
                }
            }
            self.rule()?;
        }
        for (i, row) in waiting.iter().enumerate() {
            let mut line = String::from("|");
            for (width, cell) in self.widths.iter().zip(row) {
                line += &format!(" {cell}{} |", " ".repeat(width.saturating_sub(cell.width())));
            }
            writeln!(self.out, "{line}").map_err(Error::Output)?;
            if begins && i == 0 {
                self.rule()?;
            }
        }
        Ok(())
    }

    fn rule(&mut self) -> Result<()> {
        let line: Vec<String> = self.widths.iter().map(|width| "-".repeat(width + 2)).collect();
        writeln!(self.out, "+{}+", line.join("+")).map_err(Error::Output)
    }
}

/// One line, and nothing in it that a terminal obeys.
fn tame(text: &str) -> String {
    if !text.contains(char::is_control) {
        return text.to_owned();
    }
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_cannot_speak_to_the_terminal() {
        assert_eq!(tame("red \u{1b}[31m\nnext"), "red \\u{1b}[31m\\nnext");
        assert_eq!(tame("日本 ü"), "日本 ü");
    }
}

//! The deck: which cards there are, their captions, and the folder they are written to.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use image::RgbImage;

use crate::canvas::{CREAM, Canvas};
use crate::frame::{finish, ground};
use crate::suit::{Suit, pips};
use crate::{court, trump};

/// Word that stands for the deck's style in every caption.
const TRIGGER: &str = "trtcrd";

const NUMBERS: [&str; 10] = ["ace", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];

/// Draws card `index` (0 to 77): its file name, picture and caption.
pub(crate) fn card(index: usize, width: u32, height: u32) -> (String, RgbImage, String) {
    let mut canvas = Canvas::new(width, height, CREAM);
    let (file, name, scene) = if let Some(trump) = trump::ALL.get(index) {
        let panel = ground(&mut canvas, trump.sky);
        let scene = trump::draw(&mut canvas, &panel, index);
        finish(&mut canvas, &panel, index);
        (format!("t{index:02}.png"), trump.name.to_owned(), scene)
    } else {
        let minor = index - trump::ALL.len();
        let (suit, rank) = (Suit::ALL[minor / 14], minor % 14);
        let panel = ground(&mut canvas, suit.sky().0);
        let (rank_name, scene) = match NUMBERS.get(rank) {
            Some(name) => (*name, pips(&mut canvas, &panel, suit, rank + 1)),
            None => (court::NAMES[rank - 10], court::court(&mut canvas, &panel, suit, rank - 10)),
        };
        finish(&mut canvas, &panel, rank + 1);
        let initial = &suit.name()[..2];
        (format!("{initial}{:02}.png", rank + 1), format!("{rank_name} of {}", suit.name()), scene)
    };
    (file, canvas.into_image(), format!("a {TRIGGER} of {scene}, \"{name}\""))
}

/// Writes the first `count` cards and `metadata.jsonl`.
pub(crate) fn write(out: &Path, count: u8, width: u32, height: u32) -> io::Result<()> {
    fs_err::create_dir_all(out)?;
    let mut lines = String::new();
    for index in 0..usize::from(count) {
        let (file, picture, caption) = card(index, width, height);
        picture
            .save(out.join(&file))
            .map_err(|error| io::Error::other(format!("{}: {error}", out.join(&file).display())))?;
        let line = serde_json::json!({ "file_name": file, "caption": caption });
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "{line}");
    }
    fs_err::write(out.join("metadata.jsonl"), lines)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_cards_differ_and_every_caption_begins_with_the_trigger() {
        let cards: Vec<_> = (0..78).map(|index| card(index, 100, 175)).collect();
        let distinct = |keys: Vec<Vec<u8>>| keys.into_iter().collect::<BTreeSet<_>>().len();
        assert_eq!(distinct(cards.iter().map(|card| card.0.clone().into_bytes()).collect()), 78);
        assert_eq!(distinct(cards.iter().map(|card| card.1.as_raw().clone()).collect()), 78);
        assert_eq!(distinct(cards.iter().map(|card| card.2.clone().into_bytes()).collect()), 78);
        assert!(cards.iter().all(|card| card.2.starts_with("a trtcrd of ")));
        assert!(cards.iter().all(|card| card.1.dimensions() == (100, 175)));
    }

    #[test]
    fn odd_sizes_are_drawn_too() {
        for (width, height) in [(16, 16), (300, 100), (33, 200)] {
            assert_eq!(card(40, width, height).1.dimensions(), (width, height));
        }
    }
}

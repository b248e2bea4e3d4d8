//! The deck: which cards there are and how captions word them. Flat, outlined, in cream, red, black and gold.

mod canvas;
mod court;
mod frame;
mod suit;
mod trump;

use canvas::{CREAM, Canvas};
use frame::{finish, ground};
use suit::{Suit, pips};

use crate::folder::Item;

/// Word that stands for the deck's style in every caption.
const TRIGGER: &str = "trtcrd";

/// Cards of the deck.
pub const CARDS: u8 = 78;

/// Draws the first `count` cards.
pub fn cards(count: u8, width: u32, height: u32) -> impl Iterator<Item = Item> {
    (0..usize::from(count.min(CARDS))).map(move |index| card(index, width, height))
}

/// Draws card `index` (0 to 77).
fn card(index: usize, width: u32, height: u32) -> Item {
    let mut canvas = Canvas::new(width, height, CREAM);
    let (file, scene, light) = if let Some(trump) = trump::ALL.get(index) {
        let panel = ground(&mut canvas, trump.light);
        let scene = trump::draw(&mut canvas, &panel, index);
        finish(&mut canvas, &panel, index);
        (format!("t{index:02}.png"), scene, trump.light)
    } else {
        let minor = index - trump::ALL.len();
        let (suit, rank) = (Suit::ALL[minor / 14], minor % 14);
        let light = suit.light(rank);
        let panel = ground(&mut canvas, light);
        let scene = match rank {
            0..10 => pips(&mut canvas, &panel, suit, rank + 1),
            _ => court::court(&mut canvas, &panel, suit, rank - 10, light),
        };
        finish(&mut canvas, &panel, rank + 1);
        (format!("{}{:02}.png", &suit.name()[..2], rank + 1), scene, light)
    };
    Item { file, picture: canvas.into_image(), caption: format!("a {TRIGGER} of {scene} {}", light.words()) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_cards_differ_and_every_caption_begins_with_the_trigger() {
        let cards: Vec<_> = cards(CARDS, 100, 150).collect();
        let distinct = |keys: Vec<Vec<u8>>| keys.into_iter().collect::<BTreeSet<_>>().len();
        assert_eq!(distinct(cards.iter().map(|card| card.file.clone().into_bytes()).collect()), 78);
        assert_eq!(distinct(cards.iter().map(|card| card.picture.as_raw().clone()).collect()), 78);
        assert_eq!(distinct(cards.iter().map(|card| card.caption.clone().into_bytes()).collect()), 78);
        assert!(cards.iter().all(|card| card.caption.starts_with("a trtcrd of ")));
        let words = |caption: &str| caption.split(' ').count();
        assert!(cards.iter().all(|card| words(&card.caption) <= 19), "the mini model reads 20 tokens");
        assert!(cards.iter().all(|card| card.picture.dimensions() == (100, 150)));
    }

    #[test]
    fn odd_sizes_are_drawn_too() {
        for (width, height) in [(16, 16), (300, 100), (33, 200)] {
            assert_eq!(card(40, width, height).picture.dimensions(), (width, height));
        }
    }
}

//! Scenes in a photographic look: one solid thing in a landscape, lit, shaded, with shadow, haze and grain.
//! Subject × colour × place × light, evenly, so that a model can learn to follow each word.

mod colour;
mod light;
mod noise;
mod place;
mod render;
mod subject;

use colour::Colour;
use noise::Dice;
use render::View;
use subject::Subject;

use crate::folder::Item;
use crate::words::{Light, Place};

/// What a scene shows.
#[derive(Debug)]
struct Plan {
    subject: Subject,
    colour: Colour,
    place: Place,
    light: Light,
}

impl Plan {
    /// All there are.
    const COUNT: usize = Subject::ALL.len() * Colour::ALL.len() * Place::ALL.len() * Light::ALL.len();

    /// The plan with this number.
    fn numbered(number: usize) -> Self {
        let (subject, rest) = (number % Subject::ALL.len(), number / Subject::ALL.len());
        let (colour, rest) = (rest % Colour::ALL.len(), rest / Colour::ALL.len());
        let (place, light) = (rest % Place::ALL.len(), rest / Place::ALL.len());
        Self {
            subject: Subject::ALL[subject],
            colour: Colour::ALL[colour],
            place: Place::ALL[place],
            light: Light::ALL[light % Light::ALL.len()],
        }
    }

    fn words(&self) -> String {
        let Self { subject, colour, place, light } = self;
        let article = if colour.words().starts_with('o') { "an" } else { "a" };
        format!("{article} {} {} {} {}", colour.words(), subject.words(), place.words(), light.words())
    }
}

/// `count` scenes. Every combination comes once before one comes twice; every second caption begins with "a photo of".
pub fn scenes(count: u32, seed: u64, width: u32, height: u32) -> impl Iterator<Item = Item> {
    let mut dice = Dice::new(&[seed]);
    let mut order: Vec<usize> = (0..Plan::COUNT).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, dice.below(i + 1));
    }
    (0..count).map(move |index| {
        let mut dice = Dice::new(&[seed, u64::from(index) + 1]);
        let plan = Plan::numbered(order[index as usize % Plan::COUNT]);
        let picture = render::render(&plan, &View::chance(&mut dice), width, height);
        let prefix = if dice.chance(0.5) { "a photo of " } else { "" };
        Item { file: format!("s{index:05}.png"), picture, caption: format!("{prefix}{}", plan.words()) }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_combination_has_its_own_words() {
        let words: BTreeSet<String> = (0..Plan::COUNT).map(|number| Plan::numbered(number).words()).collect();
        assert_eq!(words.len(), Plan::COUNT);
        assert!(words.contains("an orange boat by the sea at sunset"));
        assert!(words.iter().all(|words| words.split(' ').count() + 3 <= 19), "the mini model reads 20 tokens");
    }

    #[test]
    fn equal_arguments_give_equal_scenes_and_seeds_differ() {
        let draw =
            |seed| scenes(3, seed, 48, 72).map(|item| (item.caption, item.picture.into_raw())).collect::<Vec<_>>();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn a_longer_run_begins_like_a_shorter_one() {
        let pictures = |count| scenes(count, 5, 24, 36).map(|item| item.picture.into_raw()).collect::<Vec<_>>();
        assert_eq!(pictures(4)[..2], pictures(2));
    }
}

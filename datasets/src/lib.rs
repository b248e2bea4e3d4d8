//! Data sets of our own, drawn from shapes: a deck of cards, and scenes in a photographic look. Both share words for
//! places and light, so that what is learned from one meets the other. Equal arguments give equal files.

pub mod deck;
pub mod folder;
pub mod scene;
mod shape;
mod words;

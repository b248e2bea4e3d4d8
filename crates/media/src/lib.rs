//! pictures: decode to RGB8, resize, crop, write PNG.

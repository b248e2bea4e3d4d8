//! Resize so that a picture covers a size, then crop the middle. What is cut off is said, so that it can be recorded.

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};

use crate::Picture;

/// A picture of exactly the asked size, and how it came about.
#[derive(Debug, Clone, PartialEq)]
pub struct Cropped {
    /// The result.
    pub picture: Picture,
    /// Factor from source to resized pixels: `max(width / source width, height / source height)`; above 1 is an enlargement.
    pub scale: f32,
    /// Columns cut off at the left of the resized picture.
    pub left: u32,
    /// Rows cut off at its top.
    pub top: u32,
}

/// Size of the resized picture: one side is the target's exactly, the other is its nearest whole number and not below the target.
fn cover_size(source: (u32, u32), target: (u32, u32)) -> (u32, u32) {
    let nearest = |length: u32, numerator: u32, denominator: u32| {
        let (l, n, d) = (u64::from(length), u64::from(numerator), u64::from(denominator));
        ((2 * l * n + d) / (2 * d)) as u32
    };
    let ((w, h), (tw, th)) = (source, target);
    if u64::from(tw) * u64::from(h) >= u64::from(th) * u64::from(w) {
        (tw, nearest(h, tw, w))
    } else {
        (nearest(w, th, h), th)
    }
}

/// Resizes with Lanczos3 (the filter widened by the factor when shrinking, as PIL does) to cover `width` x `height` and
/// crops the middle, rounding the offsets down. A picture that already has the size passes unchanged.
pub fn cover_crop(picture: &Picture, width: u32, height: u32) -> Cropped {
    assert!(width > 0 && height > 0 && picture.width > 0 && picture.height > 0, "sizes are positive");
    let scale = (f64::from(width) / f64::from(picture.width)).max(f64::from(height) / f64::from(picture.height)) as f32;
    let (rw, rh) = cover_size((picture.width, picture.height), (width, height));
    let (left, top) = ((rw - width) / 2, (rh - height) / 2);
    let resized = resize(picture, rw, rh);
    let picture = if (rw, rh) == (width, height) { resized } else { resized.cropped(left, top, width, height) };
    Cropped { picture, scale, left, top }
}

/// Across first, then down, each to whole 8-bit values, as PIL does: the order shows where a filter overshoots and is clipped.
fn resize(picture: &Picture, width: u32, height: u32) -> Picture {
    resize_once(resize_once(picture.clone(), width, picture.height), width, height)
}

fn resize_once(picture: Picture, width: u32, height: u32) -> Picture {
    if (picture.width, picture.height) == (width, height) {
        return picture;
    }
    let source = TypedImageRef::<U8x3>::from_buffer(picture.width, picture.height, &picture.rgb);
    let source = source.expect("a picture has 3 * width * height bytes");
    let mut rgb = vec![0; 3 * width as usize * height as usize];
    let mut target = TypedImage::<U8x3>::from_buffer(width, height, &mut rgb).expect("as many bytes as pixels need");
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Lanczos3));
    Resizer::new().resize_typed(&source, &mut target, &options).expect("the whole picture is a valid crop box");
    Picture { width, height, rgb }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn one_side_is_exact_and_the_other_covers(w in 1u32..5000, h in 1u32..5000, tw in 1u32..2000, th in 1u32..2000) {
            let (rw, rh) = cover_size((w, h), (tw, th));
            prop_assert!(rw >= tw && rh >= th);
            prop_assert!(rw == tw || rh == th);
            // Within half a pixel of the exact proportional size.
            let scale = (f64::from(tw) / f64::from(w)).max(f64::from(th) / f64::from(h));
            prop_assert!((f64::from(rw) - scale * f64::from(w)).abs() <= 0.5 + 1e-6);
            prop_assert!((f64::from(rh) - scale * f64::from(h)).abs() <= 0.5 + 1e-6);
        }

        #[test]
        fn the_result_has_the_asked_size_and_a_flat_colour_stays(
            w in 1u32..60, h in 1u32..60, tw in 1u32..60, th in 1u32..60, colour: [u8; 3]
        ) {
            let out = cover_crop(&Picture::filled(w, h, colour), tw, th);
            prop_assert_eq!(out.picture, Picture::filled(tw, th, colour));
        }

        #[test]
        fn a_picture_of_the_asked_size_is_unchanged(w in 1u32..40, h in 1u32..40, seed: u8) {
            let rgb = (0..3 * w * h).map(|i| (i as u8).wrapping_mul(37).wrapping_add(seed)).collect();
            let picture = Picture { width: w, height: h, rgb };
            let out = cover_crop(&picture, w, h);
            prop_assert_eq!((out.scale, out.left, out.top), (1.0, 0, 0));
            prop_assert_eq!(out.picture, picture);
        }
    }

    #[test]
    fn a_wide_picture_loses_both_sides_alike() {
        let out = cover_crop(&Picture::filled(200, 100, [1, 2, 3]), 50, 50);
        assert_eq!((out.scale, out.left, out.top), (0.5, 25, 0));
        // An odd remainder is rounded down at the left.
        assert_eq!(cover_crop(&Picture::filled(101, 50, [0; 3]), 50, 50).left, 25);
    }
}

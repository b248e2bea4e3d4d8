//! Colours of things, and arithmetic on linear-looking RGB in [0, 1].

/// Red, green, blue.
pub(super) type Rgb = [f32; 3];

/// Of bytes.
pub(super) const fn rgb(r: u8, g: u8, b: u8) -> Rgb {
    [r as f32 / 255.0, g as f32 / 255.0, b as f32 / 255.0]
}

/// `a` at 0, `b` at 1.
pub(super) fn mix(a: Rgb, b: Rgb, t: f32) -> Rgb {
    std::array::from_fn(|i| a[i] + (b[i] - a[i]) * t.clamp(0.0, 1.0))
}

/// Channel by channel.
pub(super) fn times(a: Rgb, b: Rgb) -> Rgb {
    std::array::from_fn(|i| a[i] * b[i])
}

/// Brighter or darker.
pub(super) fn scaled(a: Rgb, by: f32) -> Rgb {
    a.map(|v| v * by)
}

/// Sum.
pub(super) fn plus(a: Rgb, b: Rgb) -> Rgb {
    std::array::from_fn(|i| a[i] + b[i])
}

/// 0 at `from`, 1 at `to`, smooth between.
pub(super) fn smooth(from: f32, to: f32, v: f32) -> f32 {
    let t = ((v - from) / (to - from)).clamp(0.0, 1.0);
    t * t * (3.0 - 2.0 * t)
}

/// What a thing is painted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Colour {
    Red,
    Orange,
    Golden,
    Green,
    Blue,
    Purple,
    White,
}

impl Colour {
    pub(super) const ALL: [Self; 7] =
        [Self::Red, Self::Orange, Self::Golden, Self::Green, Self::Blue, Self::Purple, Self::White];

    /// As a caption words it.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Red => "red",
            Self::Orange => "orange",
            Self::Golden => "golden",
            Self::Green => "green",
            Self::Blue => "blue",
            Self::Purple => "purple",
            Self::White => "white",
        }
    }

    /// Under white light.
    pub(super) fn albedo(self) -> Rgb {
        match self {
            Self::Red => rgb(206, 38, 36),
            Self::Orange => rgb(238, 122, 30),
            Self::Golden => rgb(232, 184, 56),
            Self::Green => rgb(48, 146, 64),
            Self::Blue => rgb(38, 86, 204),
            Self::Purple => rgb(132, 58, 170),
            Self::White => rgb(238, 238, 234),
        }
    }
}

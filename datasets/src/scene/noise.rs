//! Chance as a function of numbers: dice for choices, value noise for textures.

/// The finaliser of SplitMix64 (Steele et al. 2014).
fn scramble(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A stream of draws.
pub(super) struct Dice(u64);

impl Dice {
    /// The stream of these names.
    pub(super) fn new(names: &[u64]) -> Self {
        Self(names.iter().fold(0x9E37_79B9_7F4A_7C15, |state, name| scramble(state ^ scramble(*name))))
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        scramble(self.0)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 16_777_216.0
    }

    pub(super) fn between(&mut self, from: f32, to: f32) -> f32 {
        from + (to - from) * self.unit()
    }

    /// In 0..n.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(super) fn chance(&mut self, p: f32) -> bool {
        self.unit() < p
    }
}

/// In [-1, 1), for a lattice point.
fn lattice(salt: u64, x: i64, y: i64) -> f32 {
    let bits = scramble(salt ^ scramble((x as u64).wrapping_mul(0x9E37_79B9) ^ (y as u64).wrapping_shl(32)));
    (bits >> 40) as f32 / 8_388_608.0 - 1.0
}

/// Smooth noise in [-1, 1] with unit period.
pub(super) fn value(salt: u64, x: f32, y: f32) -> f32 {
    let (ix, iy) = (x.floor(), y.floor());
    let ease = |t: f32| t * t * (3.0 - 2.0 * t);
    let (u, v) = (ease(x - ix), ease(y - iy));
    let at = |dx: i64, dy: i64| lattice(salt, ix as i64 + dx, iy as i64 + dy);
    let (top, low) = (at(0, 0) + (at(1, 0) - at(0, 0)) * u, at(0, 1) + (at(1, 1) - at(0, 1)) * u);
    top + (low - top) * v
}

/// Four octaves of [`value`], in about [-1, 1].
pub(super) fn clouds(salt: u64, x: f32, y: f32) -> f32 {
    let octave = |i: u64| {
        let f = (1u32 << i) as f32;
        value(salt.wrapping_add(i), x * f, y * f) / f
    };
    (octave(0) + octave(1) + octave(2) + octave(3)) / 1.6
}

/// White noise in [-1, 1) of a pixel.
pub(super) fn grain(salt: u64, x: u32, y: u32) -> f32 {
    lattice(salt, i64::from(x), i64::from(y))
}

//! Random numbers as pure functions of a seed and words.
//!
//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): no state beyond a counter, so any
//! rank, resume or batch split draws the same numbers. Knows nothing about samples, epochs or steps.

use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// One word of a stream's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word<'a> {
    /// A number, such as an epoch.
    Number(u64),
    /// A text, such as a purpose or a sample's id.
    Text(&'a str),
}

impl From<u64> for Word<'_> {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl<'a> From<&'a str> for Word<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl<'a> From<&'a String> for Word<'a> {
    fn from(text: &'a String) -> Self {
        Self::Text(text)
    }
}

/// An endless sequence of random numbers with a name.
#[derive(Debug, Clone)]
pub struct Stream {
    key: [u32; 2],
    high: [u32; 2],
    /// Blocks made so far.
    blocks: u64,
    block: [u32; 4],
    /// Numbers of `block` already handed out.
    taken: usize,
}

impl Stream {
    /// The stream named by `seed` and `words`. Names that differ in any word, its kind, or the words' number give
    /// independent streams (the name's BLAKE3 digest selects key and upper counter).
    pub fn new(seed: u64, words: &[Word<'_>]) -> Self {
        let mut name = blake3::Hasher::new();
        name.update(b"nn::rng 1").update(&seed.to_le_bytes());
        for word in words {
            match word {
                Word::Number(number) => name.update(b"n").update(&number.to_le_bytes()),
                Word::Text(text) => {
                    name.update(b"t").update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes())
                }
            };
        }
        let digest = name.finalize();
        let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|byte| digest.as_bytes()[4 * i + byte]));
        Self { key: [word(0), word(1)], high: [word(2), word(3)], blocks: 0, block: [0; 4], taken: 4 }
    }

    /// 32 uniform bits.
    pub fn bits32(&mut self) -> u32 {
        if self.taken == self.block.len() {
            self.block = self.at(self.blocks);
            self.blocks += 1;
            self.taken = 0;
        }
        self.taken += 1;
        self.block[self.taken - 1]
    }

    /// 32 uniform bits for each place `[n]` i64, 0 or more, i32 `[n]` on the same device: the number that [`bits32`](Self::bits32)
    /// of a new stream gives there.
    pub fn bits_at(&self, places: &Tensor) -> Result<Tensor> {
        if places.device() == Device::Cpu { self.bits_at_host(places) } else { self.bits_at_device(places) }
    }

    fn bits_at_host(&self, places: &Tensor) -> Result<Tensor> {
        let places = Vec::<i64>::try_from(places)?;
        let mut last = (u64::MAX, [0; 4]);
        let bits = places.iter().map(|place| {
            let place = *place as u64;
            if last.0 != place / 4 {
                last = (place / 4, self.at(place / 4));
            }
            last.1[(place % 4) as usize] as i32
        });
        Ok(Tensor::f_from_slice(&bits.collect::<Vec<_>>())?)
    }

    /// The same by operators on tensors: i64 multiplies modulo 2^64, which keeps all bits of a product of two words.
    fn bits_at_device(&self, places: &Tensor) -> Result<Tensor> {
        const WORD: i64 = 0xFFFF_FFFF;
        let low = |x: &Tensor| x.f_bitwise_and(WORD);
        let high = |x: &Tensor| x.f_bitwise_right_shift_tensor_scalar(32)?.f_bitwise_and(WORD);
        let blocks = places.f_bitwise_right_shift_tensor_scalar(2)?;
        let word = |word: u32| blocks.f_full_like(i64::from(word));
        let mut counter = [low(&blocks)?, high(&blocks)?, word(self.high[0])?, word(self.high[1])?];
        let mut key = self.key;
        for _ in 0..10 {
            let (a, b) = (counter[0].f_mul_scalar(MULTIPLIERS[0])?, counter[2].f_mul_scalar(MULTIPLIERS[1])?);
            let keyed = |high: Tensor, other: &Tensor, key: u32| {
                high.f_bitwise_xor_tensor(other)?.f_bitwise_xor(i64::from(key))
            };
            counter =
                [keyed(high(&b)?, &counter[1], key[0])?, low(&b)?, keyed(high(&a)?, &counter[3], key[1])?, low(&a)?];
            key = next_key(key);
        }
        let lanes = Tensor::f_stack(&counter, -1)?;
        let bits = lanes.f_gather(-1, &places.f_bitwise_and(3)?.f_unsqueeze(-1)?, false)?;
        Ok(bits.f_squeeze_dim(-1)?.f_to_kind(Kind::Int)?)
    }

    fn at(&self, block: u64) -> [u32; 4] {
        let [high0, high1] = self.high;
        philox4x32_10([block as u32, (block >> 32) as u32, high0, high1], self.key)
    }

    /// 64 uniform bits.
    pub fn bits64(&mut self) -> u64 {
        u64::from(self.bits32()) | u64::from(self.bits32()) << 32
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    pub fn uniform(&mut self) -> f64 {
        (self.bits64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// `count` uniform numbers in [0, 1).
    pub fn uniforms(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.uniform()).collect()
    }

    /// Two independent standard normal numbers (Box-Muller in f64).
    fn normal_pair(&mut self) -> [f64; 2] {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt(); // 1 - u is in (0, 1]
        let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        [radius * cos, radius * sin]
    }

    /// A standard normal number.
    pub fn normal(&mut self) -> f64 {
        self.normal_pair()[0]
    }

    /// `count` standard normal numbers. The first ones do not depend on `count`.
    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(count + 1);
        while values.len() < count {
            values.extend(self.normal_pair().map(|z| z as f32));
        }
        values.truncate(count);
        values
    }

    /// Uniform in 0..bound, without bias (Lemire, "Fast random integer generation in an interval", 2019). 0 for bound 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        loop {
            let product = u128::from(self.bits64()) * u128::from(bound);
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }

    /// 0..count in random order (Fisher-Yates).
    pub fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<_> = (0..count).collect();
        for i in (1..count).rev() {
            let j = self.below(i as u64 + 1) as usize;
            order.swap(i, j);
        }
        order
    }
}

/// One block of Philox4x32 with 10 rounds.
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let wide = u64::from(a) * u64::from(b);
        ((wide >> 32) as u32, wide as u32)
    };
    for _ in 0..10 {
        let (high0, low0) = product(MULTIPLIERS[0] as u32, counter[0]);
        let (high1, low1) = product(MULTIPLIERS[1] as u32, counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = next_key(key);
    }
    counter
}

const MULTIPLIERS: [i64; 2] = [0xD251_1F53, 0xCD9E_8D57];

fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

#[cfg(test)]
#[path = "rng_tests.rs"]
mod tests;

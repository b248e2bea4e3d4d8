//! How a moment of AdamW is kept: in f32, in bf16, or in eight bits.
//!
//! Narrow kinds are rounded at random, up or down so that the mean is the number itself: to the nearest, an average that
//! moves by less than half a step would stand still (a second moment in bf16 with beta 0.999 always does). The random numbers
//! are those of the element's place in the whole tensor, so no split changes a result.
//!
//! Eight bits: block-wise dynamic quantisation (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"), blocks
//! of 256 elements scaled by their largest, and levels that are denser towards zero. Other than there, the levels of the
//! second moment are squares, those of its root, so that it reaches as far down as the first; a second moment that is not
//! zero is never rounded to zero, as in Li et al. 2023, "Memory Efficient Optimizers with 4-bit States", for its root divides.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::part::{BLOCK, LARGE};
use crate::share::Share;
use crate::weights::Weights;

/// How a moment is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keeping {
    /// Four bytes an element.
    #[default]
    Float32,
    /// Two bytes.
    BFloat16,
    /// One byte, and four for each block of 256; tensors of fewer than 4096 elements are kept in f32.
    #[serde(rename = "8bit")]
    EightBit,
}

impl Keeping {
    /// What a tensor of so many elements, wherever they are, is kept as.
    fn of(self, elements: usize) -> Self {
        if self == Self::EightBit && elements < LARGE { Self::Float32 } else { self }
    }

    /// Bytes for `held` elements of a tensor that has `elements` in all.
    pub fn bytes(self, held: usize, elements: usize) -> usize {
        match self.of(elements) {
            Self::Float32 => 4 * held,
            Self::BFloat16 => 2 * held,
            Self::EightBit => held + 4 * held.div_ceil(BLOCK),
        }
    }

    /// Fails if a tensor of which `share` is held cannot be kept so: a block of it is divided.
    pub fn check(self, name: &str, share: &Share) -> Result<()> {
        let elements = share.whole_shape().iter().product::<i64>() as usize;
        if self.of(elements) == Self::EightBit {
            share.blocks().map_err(|error| Error::Invalid(format!("8-bit state of `{name}`: {error}")))?;
        }
        Ok(())
    }
}

/// Which moment: of gradients, which have signs, or of their squares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    First,
    Second,
}

impl Order {
    /// What the names end in, after a dot: of the numbers, and of the blocks' scales.
    pub(crate) fn suffixes(self) -> [&'static str; 2] {
        match self {
            Self::First => ["exp_avg", "exp_avg_scale"],
            Self::Second => ["exp_avg_sq", "exp_avg_sq_scale"],
        }
    }

    /// 255 levels from least to greatest: 0, and for each power of ten twice as many, evenly spread, as for the one below.
    fn levels(self) -> Vec<f32> {
        let decades = |first: i32| {
            (0..7).flat_map(move |decade: i32| {
                let count = first << decade;
                (1..=count).map(move |i| 10f64.powi(decade - 6) * (0.1 + 0.9 * f64::from(i) / f64::from(count)))
            })
        };
        let levels: Vec<f64> = match self {
            Self::First => {
                let above: Vec<f64> = decades(1).collect();
                above.iter().rev().map(|level| -level).chain([0.0]).chain(above.iter().copied()).collect()
            }
            Self::Second => std::iter::once(0.0).chain(decades(2).map(|root| root * root)).collect(),
        };
        levels.into_iter().map(|level| level as f32).collect()
    }
}

/// One moment of one parameter.
#[derive(Debug)]
pub(crate) struct Moment {
    order: Order,
    values: Values,
}

#[derive(Debug)]
enum Values {
    /// In f32 or bf16, of the parameter's shape.
    Plain(Tensor),
    Codes {
        /// Places among the levels, u8 of the parameter's shape.
        codes: Tensor,
        /// What the levels of a block are multiples of, f32 `[blocks]`.
        scales: Tensor,
        /// f32 `[255]`.
        levels: Tensor,
    },
}

impl Moment {
    /// Zero for `parameter`, which is `share` of a tensor.
    pub(crate) fn zero(order: Order, keeping: Keeping, parameter: &Tensor, share: &Share) -> Result<Self> {
        let (shape, device) = (parameter.size(), parameter.device());
        let zeros = |shape: &[i64], kind| Tensor::f_zeros(shape, (kind, device));
        let values = match keeping.of(share.whole_shape().iter().product::<i64>() as usize) {
            Keeping::Float32 => Values::Plain(zeros(&shape, Kind::Float)?),
            Keeping::BFloat16 => Values::Plain(zeros(&shape, Kind::BFloat16)?),
            Keeping::EightBit => {
                let levels = order.levels();
                let zero = levels.iter().position(|level| *level == 0.0).unwrap_or_default() as i64;
                Values::Codes {
                    codes: Tensor::f_full(&shape, zero, (Kind::Uint8, device))?,
                    scales: zeros(&[parameter.numel().div_ceil(BLOCK) as i64], Kind::Float)?,
                    levels: Tensor::f_from_slice(&levels)?.f_to_device(device)?,
                }
            }
        };
        Ok(Self { order, values })
    }

    /// Itself, if it is kept in f32.
    pub(crate) fn in_f32(&self) -> Option<&Tensor> {
        match &self.values {
            Values::Plain(tensor) if tensor.kind() == Kind::Float => Some(tensor),
            _ => None,
        }
    }

    /// Some of the elements, f32 `[n]`: those of `range`, which begins a block. Of a moment in f32, the memory itself.
    pub(crate) fn open(&self, range: &Range<i64>) -> Result<Tensor> {
        let some = |tensor: &Tensor| tensor.f_view([-1])?.f_narrow(0, range.start, range.end - range.start);
        match &self.values {
            Values::Plain(tensor) => Ok(some(tensor)?.f_to_kind(Kind::Float)?),
            Values::Codes { codes, scales, levels } => {
                let values = levels.f_index_select(0, &some(codes)?.f_to_kind(Kind::Int)?)?;
                by_blocks(&values, |values| Ok(values.f_mul(&block_scales(scales, range)?)?))
            }
        }
    }

    /// Sets what [`open`](Self::open) gave to `values`. `chance` i32 `[n]`: 16 random bits for each.
    pub(crate) fn close(&self, range: &Range<i64>, values: &Tensor, chance: &Tensor) -> Result<()> {
        let place = |tensor: &Tensor| tensor.f_view([-1])?.f_narrow(0, range.start, range.end - range.start);
        match &self.values {
            Values::Plain(tensor) if tensor.kind() == Kind::Float => {}
            Values::Plain(tensor) => {
                // bf16 is the upper half of f32: what is cut off is carried over as often as its size says.
                let carried = values.f_view_dtype(Kind::Int)?.f_add(chance)?.f_bitwise_and(-65_536)?;
                place(tensor)?.f_copy_(&carried.f_view_dtype(Kind::Float)?)?;
            }
            Values::Codes { codes, scales, levels } => {
                let mut largest = Tensor::new();
                let scaled = by_blocks(values, |values| {
                    largest = values.f_abs()?.f_amax(1, true)?;
                    // Without a block's largest there is nothing to scale.
                    Ok(values.f_div(&largest.f_where_self(&largest.f_gt(0.0)?, &largest.f_ones_like()?)?)?)
                })?;
                block_scales(scales, range)?.f_copy_(&largest)?;
                let above = scaled.f_bucketize(levels, true, false)?.f_clamp(0, levels.size()[0] - 1)?;
                let below = above.f_sub_scalar(1)?.f_clamp_min(0)?;
                let level = |codes: &Tensor| levels.f_index_select(0, codes);
                let (from, to) = (level(&below)?, level(&above)?);
                let share = scaled.f_sub(&from)?.f_div(&to.f_sub(&from)?)?;
                let drawn = chance.f_to_kind(Kind::Float)?.f_mul_scalar(1.0 / 65_536.0)?;
                let mut chosen = below.f_add(&drawn.f_lt_tensor(&share)?.f_to_kind(Kind::Int)?)?;
                if self.order == Order::Second {
                    chosen = chosen.f_maximum(&values.f_gt(0.0)?.f_to_kind(Kind::Int)?)?;
                }
                place(codes)?.f_copy_(&chosen)?;
            }
        }
        Ok(())
    }

    /// What of it is saved: suffix and tensor.
    pub(crate) fn state(&self) -> Vec<(&'static str, Tensor)> {
        let [numbers, scaling] = self.order.suffixes();
        match &self.values {
            Values::Plain(tensor) => vec![(numbers, tensor.shallow_clone())],
            Values::Codes { codes, scales, .. } => {
                vec![(numbers, codes.shallow_clone()), (scaling, scales.shallow_clone())]
            }
        }
    }

    /// Takes up what was saved of it under the parameter's `name`, kept alike or otherwise (then rounded to the nearest).
    /// How many tensors that was.
    pub(crate) fn load(&self, saved: &Weights, name: &str) -> Result<usize> {
        let [key, scale_key] = self.order.suffixes().map(|suffix| format!("{name}.{suffix}"));
        let (Values::Plain(own) | Values::Codes { codes: own, .. }) = &self.values;
        let read =
            |key: &str, shape: &[i64]| Ok::<_, Error>(saved.tensor_of_shape(key, shape)?.f_to_device(own.device())?);
        let numbers = read(&key, &own.size())?;
        let copy = |to: &Tensor, from: &Tensor| -> Result<()> { Ok(to.shallow_clone().f_copy_(from)?) };
        if numbers.kind() != Kind::Uint8 {
            match &self.values {
                Values::Plain(own) => copy(own, &numbers)?,
                Values::Codes { .. } => self.set(&numbers)?,
            }
            return Ok(1);
        }
        let blocks = [numbers.numel().div_ceil(BLOCK) as i64];
        let scales = read(&scale_key, &blocks)?;
        match &self.values {
            Values::Codes { codes, scales: own, .. } => {
                copy(codes, &numbers)?;
                copy(own, &scales)?;
            }
            Values::Plain(_) => {
                let levels = Tensor::f_from_slice(&self.order.levels())?.f_to_device(own.device())?;
                let kept = Self { order: self.order, values: Values::Codes { codes: numbers, scales, levels } };
                copy(own, &kept.open(&(0..own.numel() as i64))?.f_view_as(own)?)?;
            }
        }
        Ok(2)
    }

    /// Sets it to `values`, each rounded to the nearest.
    fn set(&self, values: &Tensor) -> Result<()> {
        let values = values.f_to_kind(Kind::Float)?.f_reshape([-1])?;
        let half = Tensor::f_full(values.size(), 1 << 15, (Kind::Int, values.device()))?;
        self.close(&(0..values.numel() as i64), &values, &half)
    }
}

/// Applies `act` to `values`, shape `[n]`, by blocks, shape `[blocks, 256]`, the last one filled up with zeros.
fn by_blocks(values: &Tensor, act: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let (count, block) = (values.size()[0], BLOCK as i64);
    let filled = (block - count % block) % block;
    let padded = if filled > 0 { values.f_constant_pad_nd([0, filled])? } else { values.shallow_clone() };
    Ok(act(&padded.f_view([-1, block])?)?.f_view([-1])?.f_narrow(0, 0, count)?)
}

/// The scales of the blocks of `range`, [blocks, 1].
fn block_scales(scales: &Tensor, range: &Range<i64>) -> Result<Tensor> {
    let block = BLOCK as i64;
    let first = range.start / block;
    Ok(scales.f_narrow(0, first, (range.end - range.start + block - 1) / block)?.f_unsqueeze(-1)?)
}

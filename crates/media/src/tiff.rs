//! TIFF, read through the `tiff` crate itself: the general decoder knows no palettes, no grey with alpha, no YCbCr, no
//! premultiplied alpha and no planes of CMYK. Samples are widened to 16 bits and rounded once.

use std::borrow::Cow;
use std::io::Cursor;

use ::tiff::decoder::{BufferLayoutPreference, Decoder, DecodingResult, Limits};
use ::tiff::tags::Tag;
use ::tiff::{ColorType, TiffError};
use image::metadata::Orientation;

use crate::decode::{MAX_PIXELS, check_size, narrow, over16};
use crate::{Error, Picture};

const ONE: u16 = u16::MAX;
/// Photometric interpretation `palette` and `black is zero` (TIFF 6.0, section 8).
const PALETTE: u16 = 3;
const BLACK_IS_ZERO: u16 = 1;

/// What the fourth (or second) sample of a pixel means (TIFF 6.0, `ExtraSamples`).
#[derive(Clone, Copy, PartialEq)]
enum Extra {
    None,
    /// Colour is already multiplied by it.
    Premultiplied,
    Alpha,
}

/// An opened first page.
pub(crate) struct Page<'a> {
    decoder: Decoder<Cursor<Cow<'a, [u8]>>>,
    palette: Option<Vec<u16>>,
    /// Pixels across, before orientation.
    pub(crate) width: u32,
    /// Pixels down, before orientation.
    pub(crate) height: u32,
    /// How to turn it.
    pub(crate) orientation: Orientation,
}

impl<'a> Page<'a> {
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, Error> {
        let (bytes, has_palette) = palette_as_grey(bytes);
        let mut limits = Limits::default();
        limits.decoding_buffer_size = 8 * MAX_PIXELS as usize;
        limits.intermediate_buffer_size = 8 * MAX_PIXELS as usize;
        let mut decoder = Decoder::new(Cursor::new(bytes))?.with_limits(limits);
        let (width, height) = decoder.dimensions()?;
        check_size(width, height)?;
        let orientation = decoder.find_tag_unsigned::<u8>(Tag::Orientation).ok().flatten();
        let orientation = orientation.and_then(Orientation::from_exif).unwrap_or(Orientation::NoTransforms);
        let palette = if has_palette { Some(decoder.get_tag_u16_vec(Tag::ColorMap)?) } else { None };
        Ok(Self { decoder, palette, width, height, orientation })
    }

    /// Decodes it, before orientation.
    pub(crate) fn decode(mut self, background: [u8; 3]) -> Result<Picture, Error> {
        let colour = self.decoder.colortype()?;
        let extra = self.decoder.find_tag_unsigned_vec::<u16>(Tag::ExtraSamples).ok().flatten().unwrap_or_default();
        let extra = match extra.first() {
            Some(1) => Extra::Premultiplied,
            Some(2) => Extra::Alpha,
            _ => Extra::None, // of no stated meaning, so not transparency
        };
        let mut buffer = DecodingResult::U8(Vec::new());
        let layout = self.decoder.read_image_to_buffer(&mut buffer)?;
        let samples = Samples::new(&buffer, &layout, colour.bit_depth(), self.width)?;
        let count = self.width as usize * self.height as usize;
        let mut rgb = Vec::with_capacity(3 * count);
        for y in 0..self.height as usize {
            for x in 0..self.width as usize {
                let at = |channel: usize| samples.at(x, y, channel);
                let ([r, g, b], alpha) = match (colour, &self.palette) {
                    (ColorType::Gray(bits), Some(palette)) => {
                        rgb.extend(looked_up(palette, samples.raw(x, y), bits)?);
                        continue;
                    }
                    (ColorType::Gray(_) | ColorType::Multiband { num_samples: 1, .. }, None) => ([at(0); 3], None),
                    (ColorType::GrayA(_) | ColorType::Multiband { num_samples: 2, .. }, None) => ([at(0); 3], Some(1)),
                    (ColorType::RGB(_), None) => ([at(0), at(1), at(2)], None),
                    (ColorType::RGBA(_), None) => ([at(0), at(1), at(2)], Some(3)),
                    (ColorType::CMYK(_), None) => ([0, 1, 2].map(|ink| subtract(at(ink), at(3))), None),
                    (ColorType::YCbCr(_), None) => (ycbcr(at(0), at(1), at(2)), None),
                    (other, _) => return Err(Error::Unsupported(format!("TIFF pixels of kind {other:?}"))),
                };
                let pixel = match (alpha, extra) {
                    (None, _) | (_, Extra::None) => [r, g, b].map(narrow),
                    (Some(channel), Extra::Alpha) => {
                        let a = at(channel);
                        [over16(r, a, background[0]), over16(g, a, background[1]), over16(b, a, background[2])]
                    }
                    (Some(channel), Extra::Premultiplied) => {
                        let a = at(channel);
                        let add = |c: u16, b: u8| {
                            let rest = (u32::from(b) * 257 * u32::from(ONE - a) + u32::from(ONE) / 2) / u32::from(ONE);
                            narrow(c.saturating_add(rest as u16))
                        };
                        [add(r, background[0]), add(g, background[1]), add(b, background[2])]
                    }
                };
                rgb.extend(pixel);
            }
        }
        Ok(Picture { width: self.width, height: self.height, rgb })
    }
}

/// Access to samples of any supported type, interleaved or in planes.
struct Samples<'a> {
    buffer: &'a DecodingResult,
    bits: usize,
    /// In samples.
    row: usize,
    /// In samples; 0 when interleaved.
    plane: usize,
    channels: usize,
}

impl<'a> Samples<'a> {
    fn new(buffer: &'a DecodingResult, layout: &BufferLayoutPreference, bits: u8, width: u32) -> Result<Self, Error> {
        let bits = usize::from(bits);
        let stored = match buffer {
            DecodingResult::U8(_) => bits.min(8),
            DecodingResult::U16(_) if bits == 16 => 16,
            DecodingResult::U32(_) | DecodingResult::F32(_) if bits == 32 => 32,
            DecodingResult::F64(_) if bits == 64 => 64,
            _ => return Err(Error::Unsupported(format!("TIFF samples of {bits} bits, {:?}", layout.sample_format))),
        };
        let row_bytes = layout.row_stride.map_or(0, std::num::NonZero::get);
        let planar = layout.planes > 1;
        if planar && stored < 8 {
            return Err(Error::Unsupported(format!("TIFF planes of {bits} bits")));
        }
        let row = 8 * row_bytes / stored;
        // Rows of less than a byte per sample are padded, and have one sample per pixel.
        let channels =
            if planar { layout.planes } else { (row / width as usize).min(if stored < 8 { 1 } else { usize::MAX }) };
        let plane = if planar { 8 * layout.plane_stride.map_or(0, std::num::NonZero::get) / stored } else { 0 };
        Ok(Self { buffer, bits, row, plane, channels })
    }

    fn index(&self, x: usize, y: usize, channel: usize) -> usize {
        if self.plane > 0 {
            channel * self.plane + y * self.row + x
        } else {
            y * self.row + x * self.channels + channel
        }
    }

    /// The sample as stored, for palettes.
    fn raw(&self, x: usize, y: usize) -> usize {
        match self.buffer {
            DecodingResult::U8(v) => usize::from(packed(v, self.index(x, y, 0), self.bits)),
            DecodingResult::U16(v) => usize::from(v[self.index(x, y, 0)]),
            _ => usize::MAX,
        }
    }

    /// The sample scaled to 0..=65535.
    fn at(&self, x: usize, y: usize, channel: usize) -> u16 {
        let i = self.index(x, y, channel);
        let unit = |v: f64| (v.clamp(0.0, 1.0) * f64::from(ONE)).round() as u16;
        match self.buffer {
            DecodingResult::U8(v) => {
                let most = (1_u32 << self.bits.min(8)) - 1;
                ((u32::from(packed(v, i, self.bits)) * u32::from(ONE) + most / 2) / most) as u16
            }
            DecodingResult::U16(v) => v[i],
            DecodingResult::U32(v) => unit(f64::from(v[i]) / f64::from(u32::MAX)),
            DecodingResult::F32(v) => unit(f64::from(v[i])),
            DecodingResult::F64(v) => unit(v[i]),
            _ => unreachable!("Samples::new refuses other types"),
        }
    }
}

/// Sample `i` of rows that are padded to whole bytes, most significant bits first.
fn packed(bytes: &[u8], i: usize, bits: usize) -> u8 {
    if bits >= 8 {
        return bytes[i];
    }
    let bit = i * bits;
    (bytes[bit / 8] >> (8 - bits - bit % 8)) & ((1 << bits) - 1)
}

/// Palette entries have 16 bits; writers fill them with `v * 256` or `v * 257`, so the upper byte is what was meant.
fn looked_up(palette: &[u16], index: usize, bits: u8) -> Result<[u8; 3], Error> {
    let entries = 1_usize << bits.min(16);
    match (palette.get(index), palette.get(entries + index), palette.get(2 * entries + index)) {
        (Some(r), Some(g), Some(b)) if index < entries => Ok([*r, *g, *b].map(|v| (v >> 8) as u8)),
        _ => Err(Error::Decode(format!("colour {index} is not in the TIFF's palette"))),
    }
}

/// Ink and black to light, as PIL: `(1 - ink)(1 - black)`.
fn subtract(ink: u16, black: u16) -> u16 {
    let one = u32::from(ONE);
    ((u64::from(one - u32::from(ink)) * u64::from(one - u32::from(black)) + u64::from(one / 2)) / u64::from(one)) as u16
}

/// ITU-R BT.601, full range (TIFF 6.0, section 21, with its default reference values).
fn ycbcr(y: u16, cb: u16, cr: u16) -> [u16; 3] {
    let (y, cb, cr) = (f64::from(y), f64::from(cb) - 32_896.0, f64::from(cr) - 32_896.0); // 128 * 257
    [y + 1.402 * cr, y - 0.344_136 * cb - 0.714_136 * cr, y + 1.772 * cb]
        .map(|v| v.clamp(0.0, f64::from(ONE)).round() as u16)
}

/// The `tiff` crate refuses palettes but reads indices well when they are called grey: turn that one tag, in a copy.
fn palette_as_grey(bytes: &[u8]) -> (Cow<'_, [u8]>, bool) {
    match photometric(bytes) {
        Some((at, little)) => {
            let mut copy = bytes.to_vec();
            let value = if little { BLACK_IS_ZERO.to_le_bytes() } else { BLACK_IS_ZERO.to_be_bytes() };
            copy[at..at + 2].copy_from_slice(&value);
            (Cow::Owned(copy), true)
        }
        None => (Cow::Borrowed(bytes), false),
    }
}

/// Where the first directory says `palette`, and whether the file is little-endian; `None` if it says something else.
fn photometric(bytes: &[u8]) -> Option<(usize, bool)> {
    let little = bytes.starts_with(b"II");
    let read = |at: usize, length: usize| -> Option<usize> {
        let part = bytes.get(at..at.checked_add(length)?)?;
        let fold = |value: usize, byte: &u8| (value << 8) | usize::from(*byte);
        Some(if little { part.iter().rev().fold(0, fold) } else { part.iter().fold(0, fold) })
    };
    let big = read(2, 2)? == 43;
    let (directory, count_bytes, entry_bytes, value_at) =
        if big { (read(8, 8)?, 8, 20, 12) } else { (read(4, 4)?, 2, 12, 8) };
    for i in 0..read(directory, count_bytes)?.min(4096) {
        let entry = directory.checked_add(count_bytes + i * entry_bytes)?;
        if read(entry, 2)? == usize::from(Tag::PhotometricInterpretation.to_u16()) {
            let at = entry + value_at;
            return (read(at, 2)? == usize::from(PALETTE)).then_some((at, little));
        }
    }
    None
}

impl From<TiffError> for Error {
    fn from(error: TiffError) -> Self {
        match error {
            TiffError::LimitsExceeded => Self::TooLarge(error.to_string()),
            TiffError::UnsupportedError(_) => Self::Unsupported(error.to_string()),
            TiffError::IoError(ref io) if io.kind() == std::io::ErrorKind::UnexpectedEof => {
                Self::Decode("the file ends too early (truncated)".to_owned())
            }
            _ => Self::Decode(error.to_string()),
        }
    }
}

//! Any common picture file to RGB8: the format is found by content, the orientation tag is applied, alpha is composited
//! on a stated background, and sizes are limited before anything is allocated.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

use crate::{Error, Picture, jpeg, tiff};

/// Longest side that is decoded, in pixels.
pub const MAX_SIDE: u32 = 65_535;
/// Most pixels that are decoded: 134 megapixels, so at most 1 GiB for 16-bit RGBA.
pub const MAX_PIXELS: u64 = 1 << 27;

/// File formats that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// JPEG, baseline or progressive: grey, YCbCr, RGB, CMYK, YCCK.
    Jpeg,
    /// PNG of any colour type and depth.
    Png,
    /// WebP, lossy or lossless; the first frame of an animation.
    WebP,
    /// GIF; its first frame.
    Gif,
    /// Windows bitmap.
    Bmp,
    /// TIFF; its first page.
    Tiff,
}

impl Format {
    /// Finds the format by the first bytes, whatever the file is called.
    pub fn of(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.is_empty() {
            return Err(Error::Empty);
        }
        match image::guess_format(bytes) {
            Ok(ImageFormat::Jpeg) => Ok(Self::Jpeg),
            Ok(ImageFormat::Png) => Ok(Self::Png),
            Ok(ImageFormat::WebP) => Ok(Self::WebP),
            Ok(ImageFormat::Gif) => Ok(Self::Gif),
            Ok(ImageFormat::Bmp) => Ok(Self::Bmp),
            Ok(ImageFormat::Tiff) => Ok(Self::Tiff),
            Ok(other) => Err(Error::Unsupported(format!("{other:?} pictures are not read"))),
            Err(_) => Err(Error::Unsupported("not a picture: the first bytes are of no known format".to_owned())),
        }
    }

    /// Name, as in the column `media`: `jpeg`, `png`, `webp`, `gif`, `bmp` or `tiff`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Jpeg => "jpeg",
            Self::Png => "png",
            Self::WebP => "webp",
            Self::Gif => "gif",
            Self::Bmp => "bmp",
            Self::Tiff => "tiff",
        }
    }

    fn codec(self) -> ImageFormat {
        match self {
            Self::Jpeg => ImageFormat::Jpeg,
            Self::Png => ImageFormat::Png,
            Self::WebP => ImageFormat::WebP,
            Self::Gif => ImageFormat::Gif,
            Self::Bmp => ImageFormat::Bmp,
            Self::Tiff => ImageFormat::Tiff,
        }
    }
}

/// Decodes a picture; transparent parts show `background`.
pub fn decode(bytes: &[u8], background: [u8; 3]) -> Result<Picture, Error> {
    let format = Format::of(bytes)?;
    if format == Format::Jpeg {
        jpeg::check_complete(bytes).map_err(|reason| Error::Decode(reason.to_owned()))?;
    }
    if format == Format::Tiff {
        let page = tiff::Page::open(bytes)?;
        let orientation = page.orientation;
        return Ok(oriented(page.decode(background)?, orientation));
    }
    let mut decoder = open(bytes, format)?;
    let orientation = decoder.orientation()?;
    let picture = flatten(&DynamicImage::from_decoder(decoder)?, background)?;
    Ok(oriented(picture, orientation))
}

/// Width and height after orientation, and the format, from the header alone.
pub fn probe(bytes: &[u8]) -> Result<(u32, u32, Format), Error> {
    let format = Format::of(bytes)?;
    if format == Format::Tiff {
        let page = tiff::Page::open(bytes)?;
        let (width, height) = turned(page.width, page.height, page.orientation);
        return Ok((width, height, format));
    }
    let mut decoder = open(bytes, format)?;
    let (width, height) = decoder.dimensions();
    let (width, height) = turned(width, height, decoder.orientation()?);
    Ok((width, height, format))
}

fn open(bytes: &[u8], format: Format) -> Result<impl ImageDecoder + '_, Error> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format.codec());
    let mut limits = Limits::no_limits();
    limits.max_image_width = Some(MAX_SIDE);
    limits.max_image_height = Some(MAX_SIDE);
    limits.max_alloc = Some(8 * MAX_PIXELS);
    reader.limits(limits);
    let decoder = reader.into_decoder()?;
    let (width, height) = decoder.dimensions();
    check_size(width, height)?;
    Ok(decoder)
}

pub(crate) fn check_size(width: u32, height: u32) -> Result<(), Error> {
    if width == 0 || height == 0 {
        return Err(Error::Decode(format!("a picture of {width}x{height} pixels")));
    }
    if width > MAX_SIDE || height > MAX_SIDE || u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(Error::TooLarge(format!(
            "{width}x{height} pixels; the most is {MAX_PIXELS} pixels and {MAX_SIDE} on a side"
        )));
    }
    Ok(())
}

/// Rounds once from 16-bit colour over an 8-bit background: `c` and `a` in 0..=65535.
pub(crate) fn over16(c: u16, a: u16, background: u8) -> u8 {
    const ONE: u64 = 65_535;
    let (c, a) = (u64::from(c), u64::from(a));
    let sum = c * a + u64::from(background) * 257 * (ONE - a); // scaled by ONE * ONE
    ((sum * 255 + ONE * ONE / 2) / (ONE * ONE)) as u8
}

fn over8(c: u8, a: u8, background: u8) -> u8 {
    let (c, a, background) = (u32::from(c), u32::from(a), u32::from(background));
    ((c * a + background * (255 - a) + 127) / 255) as u8
}

/// 16 bits to 8, to the nearest.
pub(crate) fn narrow(v: u16) -> u8 {
    ((u32::from(v) * 255 + 32_767) / 65_535) as u8
}

fn flatten(image: &DynamicImage, background: [u8; 3]) -> Result<Picture, Error> {
    use DynamicImage as D;
    let (width, height) = (image.width(), image.height());
    let [r0, g0, b0] = background;
    let rgb: Vec<u8> = match image {
        D::ImageRgb8(image) => image.as_raw().clone(),
        D::ImageLuma8(image) => image.iter().flat_map(|v| [*v; 3]).collect(),
        D::ImageLumaA8(image) => image
            .pixels()
            .flat_map(|p| {
                let [v, a] = p.0;
                [over8(v, a, r0), over8(v, a, g0), over8(v, a, b0)]
            })
            .collect(),
        D::ImageRgba8(image) => image
            .pixels()
            .flat_map(|p| {
                let [r, g, b, a] = p.0;
                [over8(r, a, r0), over8(g, a, g0), over8(b, a, b0)]
            })
            .collect(),
        D::ImageLuma16(image) => image.iter().flat_map(|v| [narrow(*v); 3]).collect(),
        D::ImageLumaA16(image) => image
            .pixels()
            .flat_map(|p| {
                let [v, a] = p.0;
                [over16(v, a, r0), over16(v, a, g0), over16(v, a, b0)]
            })
            .collect(),
        D::ImageRgb16(image) => image.iter().map(|v| narrow(*v)).collect(),
        D::ImageRgba16(image) => image
            .pixels()
            .flat_map(|p| {
                let [r, g, b, a] = p.0;
                [over16(r, a, r0), over16(g, a, g0), over16(b, a, b0)]
            })
            .collect(),
        other => return Err(Error::Unsupported(format!("pixels of kind {:?}", other.color()))),
    };
    Ok(Picture { width, height, rgb })
}

fn turned(width: u32, height: u32, orientation: Orientation) -> (u32, u32) {
    match orientation {
        Orientation::Rotate90 | Orientation::Rotate270 | Orientation::Rotate90FlipH | Orientation::Rotate270FlipH => {
            (height, width)
        }
        Orientation::NoTransforms
        | Orientation::Rotate180
        | Orientation::FlipHorizontal
        | Orientation::FlipVertical => (width, height),
    }
}

fn oriented(picture: Picture, orientation: Orientation) -> Picture {
    if orientation == Orientation::NoTransforms {
        return picture;
    }
    let (width, height) = turned(picture.width, picture.height, orientation);
    let image = image::RgbImage::from_raw(picture.width, picture.height, picture.rgb);
    let mut image = DynamicImage::ImageRgb8(image.expect("a picture has 3 * width * height bytes"));
    image.apply_orientation(orientation);
    Picture { width, height, rgb: image.into_bytes() }
}

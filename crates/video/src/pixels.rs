//! From a decoded frame to RGB: swscale brings its planes to one size, and the matrix that the frame names turns them.
//!
//! swscale decides by the format alone whether numbers span 16 to 235 or all of 0 to 255, and squeezes what spans all into what
//! does not. So it is asked for the span that it sees: it then leaves the numbers alone, and the frame says what they mean.

use ffmpeg_next as ff;
use ffmpeg_next::format::Pixel;
use ffmpeg_next::frame::Video as Frame;
use ffmpeg_next::software::scaling;
use ffmpeg_next::util::color;
use media::Picture;

use crate::colour::Matrix;
use crate::error::Error;

/// What the numbers of a pixel format are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Red, green and blue, in any order.
    Rgb,
    /// Luma alone, which swscale takes to span 0 to 255.
    Grey,
    /// Luma and colour differences that span 0 to 255 by their format.
    Full,
    /// Luma and colour differences of which the frame says what they span.
    Usual,
}

impl Kind {
    fn of(frame: &Frame) -> Self {
        let format = frame.format();
        let name = format.descriptor().map_or("", ff::format::pixel::Descriptor::name);
        let begins = |starts: &[&str]| starts.iter().any(|start| name.starts_with(start));
        if begins(&["yuvj"]) {
            Self::Full
        } else if begins(&["gray", "ya8", "ya16"]) {
            Self::Grey
        } else if frame.color_space() == color::Space::RGB
            || ["rgb", "bgr", "gbr"].iter().any(|order| name.contains(order))
            || begins(&["pal8", "mono"])
        {
            Self::Rgb
        } else {
            Self::Usual
        }
    }

    /// The format to ask swscale for.
    fn planes(self) -> Pixel {
        match self {
            Self::Rgb => Pixel::RGB24,
            Self::Grey | Self::Full => Pixel::YUVJ444P,
            Self::Usual => Pixel::YUV444P,
        }
    }

    /// Whether 255 is white.
    fn full(self, range: color::Range) -> bool {
        match self {
            Self::Rgb | Self::Full => true,
            // A grey frame that says nothing spans all, as for FFmpeg.
            Self::Grey => range != color::Range::MPEG,
            Self::Usual => range == color::Range::JPEG,
        }
    }
}

/// Turns the frames of one clip into pictures.
#[derive(Default)]
pub(crate) struct Converter {
    scaler: Option<scaling::Context>,
}

impl Converter {
    /// A frame in `size`.
    pub(crate) fn picture(&mut self, frame: &Frame, size: (u32, u32)) -> Result<Picture, Error> {
        let decode = |error: ff::Error| Error::Decode(error.to_string());
        let (width, height) = size;
        let kind = Kind::of(frame);
        let scaler = match &mut self.scaler {
            Some(scaler) => scaler,
            none => {
                let flags = scaling::Flags::BICUBIC
                    | scaling::Flags::ACCURATE_RND
                    | scaling::Flags::FULL_CHR_H_INT
                    | scaling::Flags::FULL_CHR_H_INP;
                let (w, h) = (frame.width(), frame.height());
                let context = scaling::Context::get(frame.format(), w, h, kind.planes(), width, height, flags);
                none.insert(context.map_err(decode)?)
            }
        };
        let mut planes = Frame::empty();
        scaler.run(frame, &mut planes).map_err(decode)?;
        let mut rgb = Vec::with_capacity(3 * width as usize * height as usize);
        let matrix = match frame.color_space() {
            color::Space::BT709 => Matrix::BT709,
            color::Space::BT2020NCL | color::Space::BT2020CL => Matrix::BT2020,
            _ => Matrix::BT601,
        };
        let matrix = matrix.full(kind.full(frame.color_range()));
        for y in 0..height as usize {
            let row = |plane: usize, bytes: usize| {
                let start = y * planes.stride(plane);
                &planes.data(plane)[start..start + bytes]
            };
            if kind == Kind::Rgb {
                rgb.extend_from_slice(row(0, 3 * width as usize));
                continue;
            }
            let rows = [0, 1, 2].map(|plane| row(plane, width as usize));
            for ((y, u), v) in rows[0].iter().zip(rows[1]).zip(rows[2]) {
                rgb.extend(matrix.rgb([*y, *u, *v]));
            }
        }
        Ok(Picture { width, height, rgb })
    }
}

#[cfg(test)]
mod tests {
    use color::Range;

    use super::*;

    const SIZE: (u32, u32) = (32, 16);

    const COLOURS: [[u8; 3]; 6] = [[0; 3], [255; 3], [128; 3], [16; 3], [230, 20, 40], [20, 60, 220]];

    /// A frame of one colour, every sample of which is as the format and the range say.
    fn flat(format: Pixel, range: Range, full: bool, colour: [u8; 3]) -> Frame {
        let mut frame = Frame::new(format, SIZE.0, SIZE.1);
        frame.set_color_range(range);
        frame.set_color_space(color::Space::BT709);
        let yuv = Matrix::BT709.full(full).yuv(colour);
        let name = format.descriptor().unwrap().name();
        for plane in 0..frame.planes() {
            match name {
                "rgb24" => fill(frame.data_mut(plane), &colour),
                "bgra" => fill(frame.data_mut(plane), &[colour[2], colour[1], colour[0], 255]),
                "gbrp" => fill(frame.data_mut(plane), &[colour[[1, 2, 0][plane]]]),
                "ya8" => fill(frame.data_mut(plane), &[yuv[0], 255]),
                "nv12" if plane == 1 => fill(frame.data_mut(plane), &yuv[1..]),
                _ if name.ends_with("10le") => fill(frame.data_mut(plane), &(u16::from(yuv[plane]) << 2).to_le_bytes()),
                _ => fill(frame.data_mut(plane), &[yuv.get(plane).copied().unwrap_or(255)]),
            }
        }
        frame
    }

    fn fill(data: &mut [u8], sample: &[u8]) {
        data.chunks_exact_mut(sample.len()).for_each(|place| place.copy_from_slice(sample));
    }

    fn off(picture: &Picture, colour: [u8; 3]) -> u8 {
        let pixels = picture.rgb.chunks_exact(3);
        let far = pixels.flat_map(|pixel| pixel.iter().zip(colour).map(|(a, b)| a.abs_diff(b)).collect::<Vec<_>>());
        far.max().unwrap()
    }

    /// Black, white, greys and strong colours of each format in each range, at its size and at another.
    #[test]
    fn every_format_and_range_gives_its_colours_back() {
        ff::log::set_level(ff::log::Level::Quiet);
        let unstated = Range::Unspecified;
        let by_flag = [(Range::MPEG, false), (Range::JPEG, true), (unstated, false)];
        let always = [(Range::MPEG, true), (Range::JPEG, true), (unstated, true)];
        let grey = [(Range::MPEG, false), (Range::JPEG, true), (unstated, true)];
        let table = [
            (Pixel::YUV420P, by_flag),
            (Pixel::YUV422P, by_flag),
            (Pixel::YUV444P, by_flag),
            (Pixel::YUV420P10LE, by_flag),
            (Pixel::NV12, by_flag),
            (Pixel::YUVA420P, by_flag),
            (Pixel::YUVJ420P, always),
            (Pixel::YUVJ422P, always),
            (Pixel::YUVJ444P, always),
            (Pixel::YUVJ440P, always),
            (Pixel::YUVJ411P, always),
            (Pixel::RGB24, always),
            (Pixel::BGRA, always),
            (Pixel::GBRP, always),
            (Pixel::GRAY8, grey),
            (Pixel::GRAY10LE, grey),
            (Pixel::YA8, grey),
        ];
        for (format, ranges) in table {
            for (range, full) in ranges {
                let name = format.descriptor().unwrap().name();
                for colour in COLOURS {
                    let colourless = name.starts_with("gray") || name.starts_with("ya8");
                    if colourless && colour != [colour[0]; 3] {
                        continue;
                    }
                    for size in [SIZE, (48, 16)] {
                        let frame = flat(format, range, full, colour);
                        let picture = Converter::default().picture(&frame, size).unwrap();
                        let off = off(&picture, colour);
                        assert!(off <= 2, "{name} {range:?} {size:?}: {colour:?} is {:?}", picture.pixel(5, 5));
                    }
                }
            }
        }
    }
}

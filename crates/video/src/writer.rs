//! Frames to a file.

use std::path::{Path, PathBuf};

use ffmpeg_next as ff;
use ffmpeg_next::format::Pixel;
use ffmpeg_next::format::context::Output;
use ffmpeg_next::frame::Video as Frame;
use ffmpeg_next::software::scaling;
use ffmpeg_next::util::color;
use ffmpeg_next::{Dictionary, Rational};
use media::Picture;

use crate::colour::Matrix;
use crate::error::Error;

/// Container and compression of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Format {
    /// FFmpeg's name of the container: `mp4`, `matroska`, `webm`.
    pub container: &'static str,
    /// FFmpeg's name of the encoder.
    pub encoder: &'static str,
    /// Frames between two others that are predicted from both, at most; the encoder's own number when absent.
    pub b_frames: Option<u32>,
}

impl Format {
    /// MP4 with H.264, or with MPEG-4 part 2 where FFmpeg was built without libx264.
    pub fn mp4() -> Self {
        let encoder = if ff::encoder::find_by_name("libx264").is_some() { "libx264" } else { "mpeg4" };
        Self { container: "mp4", encoder, b_frames: None }
    }

    /// The compression, as people call it.
    pub fn codec(&self) -> &'static str {
        match self.encoder {
            "libx264" => "H.264",
            "mpeg4" => "MPEG-4 part 2",
            other => other,
        }
    }

    /// Nearly lossless settings, on one thread, so that the bytes do not depend on how many there are.
    fn options(&self) -> Dictionary<'static> {
        let quality: &[(&str, &str)] = match self.encoder {
            "libx264" => &[("crf", "14"), ("preset", "medium")],
            "mpeg4" => &[("qmin", "2"), ("qmax", "2")],
            _ => &[("crf", "12"), ("b", "0")],
        };
        let mut options = Dictionary::new();
        options.set("threads", "1");
        for (key, value) in quality {
            options.set(key, value);
        }
        options
    }
}

/// A file under construction. The same frames give the same bytes.
pub struct Writer {
    path: PathBuf,
    output: Output,
    encoder: ff::encoder::video::Encoder,
    scaler: scaling::Context,
    size: (u32, u32),
    time_base: Rational,
    frames: i64,
}

impl Writer {
    /// Starts a file of even sides, with `text` as its metadata.
    pub fn create(
        path: &Path,
        format: &Format,
        size: (u32, u32),
        fps: u32,
        text: &[(String, String)],
    ) -> Result<Self, Error> {
        let failed = |reason: String| Error::Write { path: path.to_owned(), reason };
        let error = |error: ff::Error| failed(error.to_string());
        if !size.0.is_multiple_of(2) || !size.1.is_multiple_of(2) || size.0 == 0 || size.1 == 0 || fps == 0 {
            return Err(failed(format!("{}x{} at {fps} fps; sides must be even", size.0, size.1)));
        }
        ff::init().map_err(error)?;
        ff::log::set_level(ff::log::Level::Quiet);
        let found = ff::encoder::find_by_name(format.encoder);
        let found = found.ok_or_else(|| failed(format!("FFmpeg was built without `{}`", format.encoder)))?;
        let mut output = ff::format::output_as(path, format.container).map_err(error)?;
        let mut video = ff::codec::context::Context::new_with_codec(found).encoder().video().map_err(error)?;
        let time_base = Rational(1, fps as i32);
        video.set_width(size.0);
        video.set_height(size.1);
        video.set_format(Pixel::YUV420P);
        video.set_time_base(time_base);
        video.set_frame_rate(Some(Rational(fps as i32, 1)));
        video.set_colorspace(color::Space::BT709);
        video.set_color_range(color::Range::MPEG);
        video.set_color_primaries(color::Primaries::BT709);
        video.set_color_transfer_characteristic(color::TransferCharacteristic::BT709);
        video.set_flags(ff::codec::Flags::GLOBAL_HEADER | ff::codec::Flags::BITEXACT);
        if let Some(count) = format.b_frames {
            video.set_max_b_frames(count as usize);
        }
        let encoder = video.open_with(format.options()).map_err(error)?;
        let mut stream = output.add_stream(found).map_err(error)?;
        stream.set_parameters(&encoder);
        stream.set_time_base(time_base);
        stream.set_avg_frame_rate(Rational(fps as i32, 1));
        let mut metadata = Dictionary::new();
        for (key, value) in text {
            metadata.set(key, value);
        }
        output.set_metadata(metadata);
        let mut options = Dictionary::new();
        options.set("fflags", "+bitexact");
        if format.container == "mp4" {
            options.set("movflags", "use_metadata_tags+faststart");
        }
        output.write_header_with(options).map_err(error)?;
        let flags = scaling::Flags::BICUBIC | scaling::Flags::ACCURATE_RND;
        let (w, h) = size;
        let scaler = scaling::Context::get(Pixel::YUV444P, w, h, Pixel::YUV420P, w, h, flags).map_err(error)?;
        Ok(Self { path: path.to_owned(), output, encoder, scaler, size, time_base, frames: 0 })
    }

    /// Appends a frame.
    pub fn push(&mut self, picture: &Picture) -> Result<(), Error> {
        if (picture.width, picture.height) != self.size {
            return Err(self.failed(format!("a frame of {}x{}", picture.width, picture.height)));
        }
        let mut whole = Frame::new(Pixel::YUV444P, self.size.0, self.size.1);
        let width = self.size.0 as usize;
        for (y, row) in picture.rgb.chunks_exact(3 * width).enumerate() {
            for (x, pixel) in row.chunks_exact(3).enumerate() {
                for (plane, value) in Matrix::BT709.yuv([pixel[0], pixel[1], pixel[2]]).into_iter().enumerate() {
                    let at = y * whole.stride(plane) + x;
                    whole.data_mut(plane)[at] = value;
                }
            }
        }
        let mut frame = Frame::empty();
        self.scaler.run(&whole, &mut frame).map_err(|error| self.failed(error.to_string()))?;
        frame.set_pts(Some(self.frames));
        self.frames += 1;
        self.encoder.send_frame(&frame).map_err(|error| self.failed(error.to_string()))?;
        self.drain()
    }

    /// Completes the file.
    pub fn finish(mut self) -> Result<(), Error> {
        self.encoder.send_eof().map_err(|error| self.failed(error.to_string()))?;
        self.drain()?;
        self.output.write_trailer().map_err(|error| self.failed(error.to_string()))
    }

    fn drain(&mut self) -> Result<(), Error> {
        let mut packet = ff::Packet::empty();
        loop {
            match self.encoder.receive_packet(&mut packet) {
                Ok(()) => {}
                Err(ff::Error::Eof | ff::Error::Other { errno: ff::error::EAGAIN }) => return Ok(()),
                Err(error) => return Err(self.failed(error.to_string())),
            }
            let stream = self.output.stream(0).map_or(self.time_base, |stream| stream.time_base());
            packet.set_stream(0);
            packet.set_duration(1);
            packet.rescale_ts(self.time_base, stream);
            packet.write_interleaved(&mut self.output).map_err(|error| self.failed(error.to_string()))?;
        }
    }

    fn failed(&self, reason: String) -> Error {
        Error::Write { path: self.path.clone(), reason }
    }
}

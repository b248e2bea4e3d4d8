//! From the bytes of a clip to frames: one decoded frame is held at a time, whatever the length of the file.

use std::io::Cursor;
use std::sync::Once;

use bytes::Bytes;
use ffmpeg_next as ff;
use ffmpeg_next::format;
use ffmpeg_next::format::context::{Input, StreamIo};
use ffmpeg_next::frame::Video as Frame;
use media::Picture;

use crate::error::Error;
use crate::orientation::Orientation;
use crate::pixels::Converter;
use crate::timeline::{Picker, usual_interval};

/// What a clip is, found by decoding all of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Pixels across, as shown.
    pub width: u32,
    /// Pixels down, as shown.
    pub height: u32,
    /// Frames.
    pub frames: u32,
    /// Frames in a second on average, between the first and the last.
    pub fps: f64,
    /// Container, such as `mp4`, `matroska` or `webm`.
    pub format: &'static str,
}

/// Frames to take: the first stands at 0 seconds.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// In a second.
    pub fps: f64,
    /// In all; the last one of the clip is repeated where it ends too early.
    pub count: u32,
}

/// Whether bytes begin like a video container (and not like a picture in one).
pub fn is_clip(bytes: &[u8]) -> bool {
    let brand = bytes.get(8..12).unwrap_or_default();
    let still = [&b"avif"[..], b"heic", b"heix", b"mif1"].contains(&brand);
    (bytes.get(4..8) == Some(b"ftyp") && !still)
        || bytes.get(4..8).is_some_and(|kind| [&b"moov"[..], b"mdat", b"wide"].contains(&kind))
        || bytes.starts_with(&[0x1a, 0x45, 0xdf, 0xa3])
        || (bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"AVI "))
}

/// Decodes a clip to its end.
pub fn probe(bytes: &Bytes) -> Result<Facts, Error> {
    let mut reader = Reader::open(bytes)?;
    let (width, height) = reader.orientation.size(reader.shown.0, reader.shown.1);
    let (mut first, mut last, mut frames) = (0.0, 0.0, 0u32);
    while let Some((_, timestamp)) = reader.next()? {
        if frames == 0 {
            first = timestamp;
        }
        (last, frames) = (timestamp, frames + 1);
    }
    if frames == 0 {
        return Err(Error::Decode("it has no frame".into()));
    }
    let fps = if last > first { f64::from(frames - 1) / (last - first) } else { reader.nominal };
    Ok(Facts { width, height, frames, fps, format: reader.format })
}

/// Gives `each` the frames of a clip, as they are shown, one by one.
pub fn frames<E: From<Error>>(
    bytes: &Bytes,
    rate: Rate,
    mut each: impl FnMut(&Picture) -> Result<(), E>,
) -> Result<(), E> {
    let interval = Reader::open(bytes)?.usual_interval();
    let mut reader = Reader::open(bytes)?;
    let mut picker = Picker::new(rate.fps, interval);
    let mut left = rate.count;
    let mut held: Option<Held> = None;
    while left > 0 {
        let next = reader.next()?;
        let shown = next.as_ref().map_or(left, |(_, timestamp)| picker.before(*timestamp)).min(left);
        if shown > 0 {
            let held = held.as_mut().ok_or_else(|| Error::Decode("it has no frame".into()))?;
            let picture = held.picture(&mut reader)?;
            for _ in 0..shown {
                each(picture)?;
            }
            left -= shown;
        }
        if let Some((frame, _)) = next {
            held = Some(Held { frame, picture: None });
        }
    }
    Ok(())
}

/// A decoded frame, turned into a picture when one is asked for.
struct Held {
    frame: Frame,
    picture: Option<Picture>,
}

impl Held {
    fn picture(&mut self, reader: &mut Reader) -> Result<&Picture, Error> {
        if self.picture.is_none() {
            self.picture = Some(reader.picture(&self.frame)?);
        }
        self.picture.as_ref().ok_or_else(|| Error::Decode("a frame was lost".into()))
    }
}

struct Reader {
    input: Input,
    stream: usize,
    decoder: ff::decoder::Video,
    seconds: f64,
    orientation: Orientation,
    /// Size with square pixels, before turning.
    shown: (u32, u32),
    nominal: f64,
    format: &'static str,
    converter: Converter,
    last: Option<f64>,
    ended: bool,
}

fn decode(error: ff::Error) -> Error {
    Error::Decode(error.to_string())
}

impl Reader {
    fn open(bytes: &Bytes) -> Result<Self, Error> {
        static START: Once = Once::new();
        START.call_once(|| {
            // Fails only where FFmpeg was built without what opening a file then reports.
            let _ = ff::init();
            ff::log::set_level(ff::log::Level::Quiet);
        });
        let io = StreamIo::from_read_seek(Cursor::new(bytes.clone())).map_err(decode)?;
        let input = format::input_from_stream(io, None, None).map_err(decode)?;
        let stream = input.streams().best(ff::media::Type::Video);
        let stream = stream.ok_or_else(|| Error::Decode("it has no video".into()))?;
        let mut context = ff::codec::context::Context::from_parameters(stream.parameters()).map_err(decode)?;
        context.set_threading(ff::threading::Config::count(1));
        let decoder = context.decoder().video().map_err(|error| Error::Unsupported(format!("its codec: {error}")))?;
        let side = stream.side_data().find(|side| side.kind() == ff::packet::side_data::Type::DisplayMatrix);
        let orientation = side.and_then(|side| Orientation::of_matrix(side.data())).unwrap_or_default();
        let (width, height) = (decoder.width(), decoder.height());
        let (pixels, limit) = (u64::from(width) * u64::from(height), media::MAX_PIXELS);
        if pixels == 0 || pixels > limit || width > media::MAX_SIDE || height > media::MAX_SIDE {
            return Err(Error::TooLarge(format!("{width}x{height} pixels; the most is {limit}")));
        }
        let aspect = f64::from(decoder.aspect_ratio());
        let stretch = if aspect.is_finite() && aspect > 0.0 { aspect } else { 1.0 };
        let shown = ((f64::from(width) * stretch).round().clamp(1.0, f64::from(media::MAX_SIDE)) as u32, height);
        let name = input.format().name().to_owned();
        Ok(Self {
            stream: stream.index(),
            seconds: f64::from(stream.time_base()),
            nominal: Some(f64::from(stream.avg_frame_rate())).filter(|rate| rate.is_finite()).unwrap_or(0.0),
            orientation,
            shown,
            decoder,
            format: container(&name, bytes),
            converter: Converter::default(),
            last: None,
            ended: false,
            input,
        })
    }

    /// From the timestamps of all packets, which are read and not decoded.
    fn usual_interval(mut self) -> Option<f64> {
        let mut timestamps = Vec::new();
        let mut packet = ff::Packet::empty();
        while packet.read(&mut self.input).is_ok() {
            if packet.stream() == self.stream {
                timestamps.extend(packet.pts().map(|ticks| ticks as f64 * self.seconds));
            }
        }
        usual_interval(&mut timestamps)
    }

    /// The next frame and its time in seconds.
    fn next(&mut self) -> Result<Option<(Frame, f64)>, Error> {
        let mut frame = Frame::empty();
        loop {
            match self.decoder.receive_frame(&mut frame) {
                Ok(()) => return self.timed(frame).map(Some),
                Err(ff::Error::Eof) => return Ok(None),
                Err(ff::Error::Other { errno: ff::error::EAGAIN }) if !self.ended => self.feed()?,
                Err(error) => return Err(decode(error)),
            }
        }
    }

    fn timed(&mut self, frame: Frame) -> Result<(Frame, f64), Error> {
        if frame.width() != self.decoder.width() || frame.height() != self.decoder.height() {
            return Err(Error::Unsupported("its frames change their size".into()));
        }
        if frame.is_corrupt() {
            return Err(Error::Decode("a frame is damaged".into()));
        }
        let step = if self.nominal > 0.0 { 1.0 / self.nominal } else { 0.0 };
        let stated = frame.timestamp().map(|ticks| ticks as f64 * self.seconds);
        let timestamp = stated.or_else(|| self.last.map(|last| last + step)).unwrap_or(0.0);
        if self.last.is_some_and(|last| timestamp < last) {
            return Err(Error::Decode("its timestamps run backwards".into()));
        }
        self.last = Some(timestamp);
        Ok((frame, timestamp))
    }

    /// Hands the decoder its next packet, or tells it that there are no more.
    fn feed(&mut self) -> Result<(), Error> {
        let mut packet = ff::Packet::empty();
        loop {
            match packet.read(&mut self.input) {
                Ok(()) if packet.stream() == self.stream => return self.decoder.send_packet(&packet).map_err(decode),
                Ok(()) => {}
                Err(ff::Error::Eof) => {
                    self.ended = true;
                    return self.decoder.send_eof().map_err(decode);
                }
                Err(error) => return Err(decode(error)),
            }
        }
    }

    /// A frame as it is shown.
    fn picture(&mut self, frame: &Frame) -> Result<Picture, Error> {
        Ok(self.orientation.apply(self.converter.picture(frame, self.shown)?))
    }
}

/// FFmpeg names a reader by all it reads; these are the names of what was read.
fn container(name: &str, bytes: &[u8]) -> &'static str {
    let head = &bytes[..bytes.len().min(64)];
    match name {
        name if name.contains("mp4") && bytes.get(8..12) == Some(b"qt  ") => "mov",
        name if name.contains("mp4") => "mp4",
        name if name.contains("webm") && head.windows(4).any(|part| part == b"webm") => "webm",
        name if name.contains("matroska") => "matroska",
        "avi" => "avi",
        _ => "video",
    }
}

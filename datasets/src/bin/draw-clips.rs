//! Draws a folder of clips with captions: a ball on a dial that shows the time, at several frame rates and sizes, and two
//! stills beside them.

use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::json;
use video::{Format, Writer, clock};

/// Draws a folder of clips with captions.
#[derive(Debug, Parser)]
struct Arguments {
    /// Folder to write to; made if need be.
    folder: PathBuf,
    /// Clips.
    #[arg(long, default_value_t = 8)]
    clips: u32,
    /// Seconds of each.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
}

const SIZES: [(u32, u32); 2] = [(96, 64), (144, 96)];
const RATES: [u32; 4] = [16, 24, 30, 12];
const COLOURS: [(&str, u8); 3] = [("green", 120), ("dark", 10), ("bright", 240)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    fs_err::create_dir_all(&arguments.folder)?;
    let mut lines = String::new();
    let mut describe = |file: &str, caption: String| {
        lines.push_str(&json!({ "file_name": file, "caption": caption }).to_string());
        lines.push('\n');
    };
    for number in 0..arguments.clips {
        let pick = |count: usize| number as usize % count;
        let (fps, (name, hue)) = (RATES[pick(RATES.len())], COLOURS[pick(COLOURS.len())]);
        let file = format!("clip_{number:03}.mp4");
        let size = SIZES[pick(SIZES.len())];
        write(&arguments.folder.join(&file), size, fps, hue, arguments.seconds, f64::from(number) / 3.0)?;
        describe(&file, format!("a white ball goes around a {name} dial"));
    }
    for (name, hue) in &COLOURS[..2] {
        let file = format!("still_{name}.png");
        let still = clock::frame(1.0, SIZES[0].0, SIZES[0].1, *hue);
        media::write_png(&arguments.folder.join(&file), &still, &[])?;
        describe(&file, format!("a white ball on a {name} dial"));
    }
    fs_err::write(arguments.folder.join("metadata.jsonl"), lines)?;
    Ok(())
}

fn write(path: &Path, size: (u32, u32), fps: u32, hue: u8, seconds: f64, start: f64) -> Result<(), video::Error> {
    let mut writer = Writer::create(path, &Format::mp4(), size, fps, &[])?;
    for frame in 0..(seconds * f64::from(fps)).round() as u32 {
        writer.push(&clock::frame(start + f64::from(frame) / f64::from(fps), size.0, size.1, hue))?;
    }
    writer.finish()
}

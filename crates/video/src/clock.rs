//! A test picture that shows its own time: a bright ball on a dial, once around in four seconds, over a moving background.

use std::f64::consts::TAU;

use media::Picture;

/// Seconds of one turn.
pub const TURN: f64 = 4.0;

/// The dial at a moment, `width` x `height` pixels; `hue` tells clips apart.
pub fn frame(seconds: f64, width: u32, height: u32, hue: u8) -> Picture {
    let (centre, reach) = (middle(width, height), f64::from(width.min(height)));
    let angle = TAU * seconds / TURN;
    let ball = (centre.0 + 0.33 * reach * angle.sin(), centre.1 - 0.33 * reach * angle.cos());
    let mut rgb = Vec::with_capacity(3 * width as usize * height as usize);
    for y in 0..height {
        for x in 0..width {
            let distance = (f64::from(x) - ball.0).hypot(f64::from(y) - ball.1);
            let light = (0.12 * reach - distance + 0.5).clamp(0.0, 1.0);
            let wave = (f64::from(x) / reach * 3.0 + seconds).sin() * (f64::from(y) / reach * 2.0).cos();
            let dark = [40.0 + 20.0 * wave, 30.0 + f64::from(hue) / 6.0, 60.0 - 20.0 * wave];
            rgb.extend(dark.map(|value| (value + (250.0 - value) * light).round() as u8));
        }
    }
    Picture { width, height, rgb }
}

/// The moment that a dial shows, in [0, 4).
pub fn read(picture: &Picture) -> f64 {
    let centre = middle(picture.width, picture.height);
    let (mut x, mut y, mut weight) = (0.0, 0.0, 0.0);
    for (at, pixel) in picture.rgb.chunks_exact(3).enumerate() {
        let light = (f64::from(pixel[0].min(pixel[1]).min(pixel[2])) - 140.0).max(0.0);
        let (column, row) = (at as u32 % picture.width, at as u32 / picture.width);
        x += light * (f64::from(column) - centre.0);
        y += light * (f64::from(row) - centre.1);
        weight += light;
    }
    (x / weight).atan2(-y / weight).rem_euclid(TAU) / TAU * TURN
}

fn middle(width: u32, height: u32) -> (f64, f64) {
    (f64::from(width - 1) / 2.0, f64::from(height - 1) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dial_shows_its_time() {
        for tick in 0..40 {
            let seconds = f64::from(tick) / 10.0;
            let off = (read(&frame(seconds, 80, 48, 9)) - seconds).abs();
            assert!(off.min(TURN - off) < 0.01, "{seconds}: {off}");
        }
    }
}

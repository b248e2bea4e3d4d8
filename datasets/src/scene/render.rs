//! From a plan to pixels: land, shadow, the thing with its rounded edges lit, then the lens: vignette and grain.

use image::RgbImage;

use super::Plan;
use super::colour::{Rgb, mix, plus, scaled, smooth, times};
use super::light::Lighting;
use super::noise::{self, Dice};
use super::place::Land;
use super::subject::{Paint, Part};
use crate::shape::V;

/// What chance decides about a picture.
pub(super) struct View {
    salt: u64,
    horizon: f32,
    /// Where the thing stands, across and down, in [0, 1].
    foot: V,
    /// Half height of the thing, as part of the picture's height.
    half: f32,
    /// Where the lamp stands.
    side: f32,
}

impl View {
    pub(super) fn chance(dice: &mut Dice) -> Self {
        Self {
            salt: dice.bits(),
            horizon: dice.between(0.55, 0.62),
            foot: (dice.between(0.44, 0.56), dice.between(0.83, 0.88)),
            half: dice.between(0.225, 0.26),
            side: if dice.chance(0.5) { 1.0 } else { -1.0 },
        }
    }
}

/// Units across a picture.
const WIDTH: f32 = 100.0;

/// Draws.
pub(super) fn render(plan: &Plan, view: &View, width: u32, height: u32) -> RgbImage {
    let unit = WIDTH / width as f32;
    let tall = height as f32 * unit;
    let lighting = Lighting::of(plan.light, view.side);
    let land = Land { place: plan.place, lighting: &lighting, horizon: view.horizon, salt: view.salt };
    let (foot, r) = ((view.foot.0 * WIDTH, view.foot.1 * tall), view.half * tall);
    let parts = plan.subject.parts(foot, r);
    let main = plan.colour.albedo();
    let stance = plan.subject.stance() * r;
    RgbImage::from_fn(width, height, |px, py| {
        let p: V = ((px as f32 + 0.5) * unit, (py as f32 + 0.5) * unit);
        let mut colour = land.at(p.0 / WIDTH, p.1 / tall, shadow(p, foot, stance, r, &lighting));
        for part in &parts {
            let [left, top, right, bottom] = part.shape.bounds;
            if p.0 < left - unit || p.0 > right + unit || p.1 < top - unit || p.1 > bottom + unit {
                continue;
            }
            let distance = part.shape.distance(p);
            let cover = (0.5 - distance / unit).clamp(0.0, 1.0);
            if cover > 0.0 {
                let lit = shade(part, p, distance, main, &lighting);
                // Near the ground less of the sky is seen.
                let low = 1.0 - 0.30 * smooth(0.55 * r, 0.0, foot.1 - p.1);
                colour = mix(colour, scaled(lit, low), cover);
            }
        }
        let (x, y) = (p.0 / WIDTH - 0.5, p.1 / tall - 0.5);
        let lens = 1.0 - 0.42 * (x * x + y * y);
        let grain = 0.012 * noise::grain(view.salt ^ 0x6EA1, px, py);
        image::Rgb(colour.map(|v| ((v * lens + grain).clamp(0.0, 1.0) * 255.0).round() as u8))
    })
}

/// Shadow on the ground: a soft pool under the thing, and a longer one away from the lamp.
fn shadow(p: V, foot: V, stance: f32, r: f32, lighting: &Lighting) -> f32 {
    let pool = |middle: V, half: V| {
        let (x, y) = ((p.0 - middle.0) / half.0, (p.1 - middle.1) / half.1);
        1.0 - smooth(0.25, 1.0, (x * x + y * y).sqrt())
    };
    let contact = pool((foot.0, foot.1 - 0.3), (stance * 1.2 + 3.0, 3.6));
    let reach = 0.9 * r * lighting.to_lamp[0].abs();
    let away = -lighting.to_lamp[0].signum() * reach;
    let cast = pool((foot.0 + away, foot.1 + 0.5), (stance + reach + 2.0, 5.0));
    (0.75 * contact).max(0.55 * cast)
}

/// Colour of a part at a point inside it.
fn shade(part: &Part, p: V, distance: f32, main: Rgb, lighting: &Lighting) -> Rgb {
    let albedo = match part.paint {
        Paint::Main(by) => scaled(main, by),
        Paint::Own(colour) => colour,
    };
    let step = 0.6;
    let d = |dx: f32, dy: f32| part.shape.distance((p.0 + dx, p.1 + dy));
    let (gx, gy) = ((d(step, 0.0) - d(-step, 0.0)) / (2.0 * step), (d(0.0, step) - d(0.0, -step)) / (2.0 * step));
    // A quarter circle from the edge inwards.
    let t = (-distance / part.bevel).clamp(0.0, 1.0);
    let lean = 1.0 - t;
    let normal = [gx * lean, gy * lean, (1.0 - lean * lean).max(0.0).sqrt()];
    let dot = |a: [f32; 3], b: [f32; 3]| a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
    let lamp = lighting.to_lamp;
    let facing = (dot(normal, lamp) * 0.88 + 0.12).max(0.0);
    // Half way between lamp and viewer.
    let half = {
        let h = [lamp[0], lamp[1], lamp[2] + 1.0];
        let length = dot(h, h).sqrt();
        h.map(|v| v / length)
    };
    let gloss = dot(normal, half).max(0.0).powi(24) * 0.42;
    let rim = lean.powi(3) * (0.5 - 0.5 * gy) * 0.22;
    let lit = plus(lighting.on(albedo, facing * 1.05, 0.0), scaled(lighting.key, gloss));
    plus(lit, times(lighting.horizon, [rim; 3]))
}

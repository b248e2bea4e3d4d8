//! Land under a sky: what is far, and the ground in front. Knows nothing of what stands on it.

use super::colour::{Rgb, mix, rgb, scaled, smooth};
use super::light::Lighting;
use super::noise::{clouds, value};
use crate::words::Place;

/// How directly flat ground faces the lamp.
const GROUND: f32 = 0.72;

/// A landscape, painted point by point. Coordinates run from 0 to 1 across and down.
pub(super) struct Land<'a> {
    pub(super) place: Place,
    pub(super) lighting: &'a Lighting,
    /// Where the ground begins.
    pub(super) horizon: f32,
    pub(super) salt: u64,
}

impl Land<'_> {
    /// The colour at a point whose ground is in shadow by `shade`.
    pub(super) fn at(&self, x: f32, y: f32, shade: f32) -> Rgb {
        if y < self.horizon { self.far(x, y) } else { self.ground(x, y, shade) }
    }

    /// A ridge line: height above the horizon at `x`.
    fn ridge(&self, layer: u64, x: f32, roughness: f32) -> f32 {
        let salt = self.salt ^ (layer + 11).wrapping_mul(0x51_7C_C1);
        let soft = 0.5 + 0.5 * value(salt, 2.2 * x + 3.0 * layer as f32, 0.5);
        let sharp = 1.0 - value(salt ^ 3, 3.4 * x, 2.5).abs() * 1.3 + 0.12 * value(salt ^ 5, 12.0 * x, 1.5);
        soft + (sharp - soft) * roughness
    }

    fn far(&self, x: f32, y: f32) -> Rgb {
        let light = self.lighting;
        let up = self.horizon - y;
        let mut colour = light.sky(self.salt, x, up / self.horizon);
        let mut layer = |number: u64, height: f32, roughness: f32, albedo: Rgb, haze: f32, cap: Option<Rgb>| {
            let top = height * self.ridge(number, x, roughness);
            let cover = smooth(-0.004, 0.004, top - up);
            if cover > 0.0 {
                let slope = self.ridge(number, x + 0.02, roughness) - self.ridge(number, x - 0.02, roughness);
                let facing = (0.55 - 2.2 * slope * light.to_lamp[0]).clamp(0.15, 1.0);
                let albedo = cap.map_or(albedo, |cap| mix(albedo, cap, smooth(0.5, 0.62, up / height)));
                colour = mix(colour, mix(light.on(albedo, facing, 0.0), light.horizon, haze), cover);
            }
        };
        match self.place {
            Place::Sea => {}
            Place::Hills => {
                layer(1, 0.17, 0.0, rgb(92, 142, 84), 0.5, None);
                layer(2, 0.09, 0.0, rgb(90, 150, 62), 0.2, None);
            }
            Place::Mountains => {
                layer(1, 0.34, 1.0, rgb(96, 104, 128), 0.35, Some(rgb(240, 244, 250)));
                layer(2, 0.16, 0.8, rgb(84, 88, 96), 0.12, None);
            }
            Place::Terrace => {
                // A low wall.
                if up < 0.075 {
                    let joint = (x * 7.0 + self.salt as f32 % 3.0).fract();
                    let albedo = scaled(rgb(214, 190, 160), if up > 0.06 || joint < 0.05 { 0.86 } else { 1.0 });
                    colour = light.on(albedo, 0.6, 0.0);
                }
            }
            Place::Snow => {
                layer(1, 0.15, 0.2, rgb(214, 224, 238), 0.4, None);
                layer(2, 0.06, 0.0, rgb(236, 241, 248), 0.15, None);
            }
            Place::Desert => {
                layer(1, 0.14, 0.35, rgb(214, 160, 100), 0.35, None);
                layer(2, 0.07, 0.1, rgb(228, 176, 108), 0.1, None);
            }
        }
        colour
    }

    fn ground(&self, x: f32, y: f32, shade: f32) -> Rgb {
        let light = self.lighting;
        let down = (y - self.horizon) / (1.0 - self.horizon);
        // Perspective: the ground repeats ever finer towards the horizon.
        let depth = 1.0 / (0.16 + down);
        let (u, v) = ((x - 0.5) * depth * 2.4, depth * 5.0);
        let salt = self.salt ^ 0xF1E1D;
        let rough = |fine: f32, strength: f32| 1.0 + strength * clouds(salt, u * fine, v * fine * 0.6);
        let (albedo, facing) = match self.place {
            Place::Sea => {
                let shore = 0.42 + 0.05 * value(salt, 3.0 * x, 0.5);
                if down < shore {
                    let wave = value(salt ^ 1, 4.0 * x * depth.min(4.0), 34.0 * depth.ln());
                    let foam = smooth(shore - 0.06, shore, down) * 0.8;
                    let water = mix(rgb(24, 92, 128), rgb(60, 140, 160), 0.5 + 0.5 * wave);
                    let lit = mix(light.on(water, GROUND, shade), light.horizon, 0.30 * (1.0 - down) + 0.12 * wave);
                    return mix(lit, light.on(rgb(244, 248, 250), GROUND, shade), foam);
                }
                (scaled(rgb(224, 200, 156), rough(2.0, 0.10)), GROUND)
            }
            Place::Hills => {
                let blades = value(salt ^ 2, u * 14.0, v * 2.5);
                (mix(rgb(84, 146, 52), rgb(128, 176, 72), 0.5 + 0.35 * clouds(salt, u, v) + 0.25 * blades), GROUND)
            }
            Place::Mountains => (
                scaled(
                    mix(rgb(132, 124, 112), rgb(108, 118, 88), 0.5 + 0.6 * clouds(salt ^ 4, u, v)),
                    rough(5.0, 0.25),
                ),
                GROUND,
            ),
            Place::Terrace => {
                let checked = ((u * 2.2).floor() + (v * 1.1).floor()).rem_euclid(2.0);
                // Far tiles blur into one.
                let checked = 0.5 + (checked - 0.5) * smooth(0.02, 0.3, down);
                (scaled(mix(rgb(188, 104, 74), rgb(226, 204, 172), checked), rough(3.0, 0.08)), GROUND)
            }
            Place::Snow => {
                let drift = clouds(salt, u * 0.8, v * 0.8);
                (rgb(238, 243, 250), GROUND + 0.14 * drift)
            }
            Place::Desert => {
                let ripple = (v * 5.0 + 1.6 * clouds(salt, u, v * 0.5) * 3.0).sin();
                (rgb(230, 180, 112), GROUND + 0.10 * ripple)
            }
        };
        let lit = light.on(albedo, facing, shade);
        mix(lit, light.horizon, 0.35 * (1.0 - smooth(0.0, 0.35, down)))
    }
}

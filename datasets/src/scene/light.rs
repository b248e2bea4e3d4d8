//! What the hour does: colours of the sky, the lamp's colour and direction, and what the sky adds in the shade.

use super::colour::{Rgb, mix, plus, rgb, scaled, smooth};
use super::noise;
use crate::words::Light;

/// Light of a scene.
pub(super) struct Lighting {
    zenith: Rgb,
    /// Where the sky meets the land; distant things fade into it.
    pub(super) horizon: Rgb,
    /// Colour of the lamp.
    pub(super) key: Rgb,
    /// Unit vector to the lamp: right, down, towards the viewer.
    pub(super) to_lamp: [f32; 3],
    /// Light that comes from everywhere.
    pub(super) ambient: Rgb,
    cloud: Rgb,
    stars: bool,
}

fn unit([x, y, z]: [f32; 3]) -> [f32; 3] {
    let length = (x * x + y * y + z * z).sqrt();
    [x / length, y / length, z / length]
}

impl Lighting {
    /// Of an hour; `side` is 1 or -1, where the lamp stands.
    pub(super) fn of(light: Light, side: f32) -> Self {
        match light {
            Light::Morning => Self {
                zenith: rgb(150, 186, 214),
                horizon: rgb(250, 224, 190),
                key: [0.98, 0.86, 0.68],
                to_lamp: unit([0.75 * side, -0.45, 0.55]),
                ambient: [0.44, 0.43, 0.45],
                cloud: rgb(255, 240, 224),
                stars: false,
            },
            Light::Noon => Self {
                zenith: rgb(52, 124, 208),
                horizon: rgb(186, 218, 242),
                key: [0.92, 0.90, 0.86],
                to_lamp: unit([0.4 * side, -0.8, 0.5]),
                ambient: [0.36, 0.40, 0.46],
                cloud: rgb(252, 253, 255),
                stars: false,
            },
            Light::Sunset => Self {
                zenith: rgb(88, 58, 118),
                horizon: rgb(255, 156, 70),
                key: [1.0, 0.60, 0.32],
                to_lamp: unit([0.85 * side, -0.25, 0.45]),
                ambient: [0.36, 0.26, 0.32],
                cloud: rgb(250, 116, 84),
                stars: false,
            },
            Light::Night => Self {
                zenith: rgb(6, 10, 32),
                horizon: rgb(34, 50, 92),
                key: [0.60, 0.62, 0.78],
                to_lamp: unit([0.55 * side, -0.65, 0.5]),
                ambient: [0.13, 0.14, 0.21],
                cloud: rgb(40, 54, 92),
                stars: true,
            },
        }
    }

    /// The sky at `x` (0 to 1 across) and `up` (1 at the top, 0 at the horizon).
    pub(super) fn sky(&self, salt: u64, x: f32, up: f32) -> Rgb {
        let mut sky = mix(self.horizon, self.zenith, up.max(0.0).powf(0.75));
        let glow = 0.5 + 0.5 * self.to_lamp[0].signum() * (2.0 * x - 1.0);
        sky = mix(sky, self.horizon, 0.25 * glow * (1.0 - up));
        let cover = smooth(0.05, 0.75, noise::clouds(salt, 3.0 * x, 5.0 * up + 0.4 * x));
        sky = mix(sky, self.cloud, 0.7 * cover * smooth(0.02, 0.3, up));
        if self.stars {
            let (u, v) = (x * 13.0, up * 11.0);
            let (cx, cy) = (u.floor(), v.floor());
            let draw = |which: u64| noise::grain(salt ^ which, cx as u32, cy as u32);
            if draw(7) > 0.2 {
                let (dx, dy) = (u - cx - 0.5 - 0.35 * draw(8), v - cy - 0.5 - 0.35 * draw(9));
                let shine = (1.0 - 28.0 * (dx * dx + dy * dy)).max(0.0) * (0.7 + 0.3 * draw(10));
                sky = plus(sky, scaled([1.0, 0.97, 0.88], shine * smooth(0.1, 0.4, up)));
            }
        }
        sky
    }

    /// A surface of `albedo` whose normal points by `facing` (-1 to 1) to the lamp, in shadow by `shade`.
    pub(super) fn on(&self, albedo: Rgb, facing: f32, shade: f32) -> Rgb {
        let direct = facing.max(0.0) * (1.0 - shade);
        std::array::from_fn(|i| albedo[i] * (self.ambient[i] * (1.0 - 0.45 * shade) + self.key[i] * direct))
    }
}

//! Which frame of a clip stands at which moment. Arithmetic on seconds; knows no files.

/// Slack for timestamps that a container rounds to milliseconds.
const ROUNDING: f64 = 1e-3;

/// The usual time between two frames, in seconds: the median, so that a pause does not count. `None` for fewer than two frames.
pub(crate) fn usual_interval(timestamps: &mut [f64]) -> Option<f64> {
    timestamps.sort_by(f64::total_cmp);
    let mut intervals: Vec<f64> =
        timestamps.windows(2).map(|pair| pair[1] - pair[0]).filter(|gap| *gap > 0.0).collect();
    intervals.sort_by(f64::total_cmp);
    intervals.get(intervals.len() / 2).copied()
}

/// Frames that a clip of `frames` frames at `source` a second gives at `rate` a second, tempo kept: those whose moment is no more
/// than half a frame of the source after the source's last.
pub fn available(frames: u32, source: f64, rate: f64) -> u32 {
    if frames < 2 || source.is_nan() || source <= 0.0 {
        return frames.min(1);
    }
    let reach = (f64::from(frames) - 0.5) / source - ROUNDING;
    (reach * rate).floor().clamp(0.0, f64::from(u32::MAX - 1)) as u32 + 1
}

/// Gives each moment `n / rate` its frame, the nearest; a frame that is held for long is shown until half a usual interval
/// before the next one. Fed with timestamps in order.
#[derive(Debug)]
pub(crate) struct Picker {
    rate: f64,
    half: f64,
    first: Option<f64>,
    /// Moments that have their frame.
    given: u32,
}

impl Picker {
    pub(crate) fn new(rate: f64, usual_interval: Option<f64>) -> Self {
        let half = usual_interval.map_or(0.0, |interval| (interval / 2.0 - ROUNDING).max(0.0));
        Self { rate, half, first: None, given: 0 }
    }

    /// How many moments belong to the frames before the one at `timestamp`, beyond those already given.
    pub(crate) fn before(&mut self, timestamp: f64) -> u32 {
        let Some(first) = self.first else {
            self.first = Some(timestamp);
            return 0;
        };
        let mut count = 0;
        while f64::from(self.given) / self.rate + self.half < timestamp - first {
            self.given += 1;
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source frame of each of `count` moments, from timestamps.
    fn picks(timestamps: &[f64], rate: f64, count: usize) -> Vec<usize> {
        let interval = usual_interval(&mut timestamps.to_vec());
        let mut picker = Picker::new(rate, interval);
        let mut picks = Vec::new();
        for (frame, timestamp) in timestamps.iter().enumerate() {
            for _ in 0..picker.before(*timestamp) {
                picks.push(frame - 1);
            }
        }
        picks.resize(count, timestamps.len() - 1);
        picks
    }

    fn steady(rate: f64, count: usize, unit: f64) -> Vec<f64> {
        (0..count).map(|n| ((n as f64 / rate) / unit).round() * unit).collect()
    }

    #[test]
    fn a_clip_of_the_models_rate_passes_frame_by_frame_whatever_the_container_rounds_to() {
        for unit in [1.0 / 90_000.0, 1e-3] {
            for count in [1, 5, 17, 33, 65] {
                let clip = steady(16.0, count, unit);
                assert_eq!(
                    available(count as u32, (count as f64 - 1.0) / clip[count - 1].max(1e-9), 16.0),
                    count as u32
                );
                assert_eq!(picks(&clip, 16.0, count), (0..count).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn every_moment_gets_the_nearest_frame_from_every_rate() {
        for rate in [12.0, 23.976, 24.0, 25.0, 30.0, 59.94, 60.0] {
            let clip = steady(rate, (2.5 * rate) as usize, 1.0 / 90_000.0);
            let count = available(clip.len() as u32, rate, 16.0);
            for (n, frame) in picks(&clip, 16.0, count as usize).into_iter().enumerate() {
                let off = (clip[frame] - n as f64 / 16.0).abs();
                assert!(off <= 0.5 / rate + 1.1e-3, "{rate}: moment {n} is off by {off}");
            }
        }
    }

    #[test]
    fn a_pause_is_kept() {
        // 10 frames a second, but for two seconds between the third and the fourth.
        let clip = [0.0, 0.1, 0.2, 2.2, 2.3, 2.4];
        let picks = picks(&clip, 10.0, 25);
        assert_eq!(picks[2..22], [2; 20]);
        assert_eq!(picks[22..], [3, 4, 5]);
    }

    #[test]
    fn what_is_available_is_what_was_filmed() {
        assert_eq!(available(24, 24.0, 16.0), 16);
        assert_eq!(available(25, 24.0, 16.0), 17);
        assert_eq!(available(60, 60.0, 16.0), 16);
        assert_eq!((available(0, 24.0, 16.0), available(1, 0.0, 16.0)), (0, 1));
    }
}

//! How many frames of a clip are taken, at the model's own rate: by the recipe, by the model's rule, by what the clip has.

use models::Clips;
use spec::{Problem, counted};
use tables::SampleInfo;

use crate::parameters::{FrameRule, Parameters};
use crate::plan::Refusal;

/// Frames of a clip at most, when the recipe says nothing: what Wan was trained on.
pub(crate) const DEFAULT_MAX_FRAMES: u32 = 81;

/// How a model sees time, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Time {
    /// The model is not there yet.
    Unknown,
    /// It does not: it takes pictures.
    Pictures,
    /// It takes clips, and pictures as clips of one frame.
    Clips(Clips),
}

impl Time {
    /// The rule of a model of clips.
    pub(crate) fn clips(self) -> Option<Clips> {
        match self {
            Self::Clips(clips) => Some(clips),
            Self::Unknown | Self::Pictures => None,
        }
    }

    /// What of the parameters does not fit.
    pub(crate) fn check(self, parameters: &Parameters) -> Vec<Problem> {
        let rule = parameters.frame_rule.is_some();
        let given =
            [("frames", parameters.frames), ("max_frames", parameters.max_frames), ("frame_rule", rule.then_some(1))];
        let given: Vec<_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
        let mut problems = Vec::new();
        for (name, value) in &given {
            let problem = match self {
                _ if *value == 0 => Problem::new(format!("`{name}` is 0, expected 1 or more")),
                Self::Pictures => Problem::new(format!("`{name}` is for clips, and this model takes pictures"))
                    .help(format!("remove `{name}`")),
                Self::Clips(clips) if *name == "frames" && !clips.allows(*value) => wrong_count(name, *value, clips),
                _ => continue,
            };
            problems.push(problem.field(*name));
        }
        if parameters.frames.is_some() && (rule || parameters.max_frames.is_some()) {
            let other = if rule { "frame_rule" } else { "max_frames" };
            let problem =
                Problem::new(format!("`frames` says how many frames every clip gives; `{other}` has no place"));
            problems.push(problem.help(format!("keep one of `frames` and `{other}`")).field(other));
        }
        problems
    }
}

/// A number of frames that a model cannot take.
pub(crate) fn wrong_count(name: &str, frames: u32, clips: Clips) -> Problem {
    let (below, stride) = (clips.trimmed(frames.max(1)), clips.stride);
    Problem::new(format!("`{name}` is {}, expected 1 + {stride} n", counted(frames, "frame")))
        .help(format!("the nearest are {below} and {}", below + stride))
}

/// Frames that a sample has at the model's rate; 1 of a picture.
pub(crate) fn available(row: &SampleInfo, clips: Clips) -> u32 {
    let frames = u32::try_from(row.frames).unwrap_or(0);
    row.fps.map_or(1, |fps| video::available(frames, f64::from(fps), f64::from(clips.fps)))
}

/// Frames to take of a sample that has `available` of them, where no bucket decides.
pub(crate) fn taken(available: u32, clips: Clips, parameters: &Parameters) -> Result<u32, Refusal> {
    let refuse = |reason, detail| Err(Refusal { reason, detail });
    if available <= 1 {
        return Ok(1);
    }
    let fps = clips.fps;
    if let Some(frames) = parameters.frames {
        return if available >= frames {
            Ok(frames)
        } else {
            refuse(
                "too_short",
                format!("{} at {fps} a second, and `frames` asks for {frames}", counted(available, "frame")),
            )
        };
    }
    let most = clips.trimmed(parameters.max_frames.unwrap_or(DEFAULT_MAX_FRAMES));
    let frames = available.min(most);
    match parameters.frame_rule.unwrap_or_default() {
        _ if clips.allows(frames) => Ok(frames),
        FrameRule::Trim => Ok(clips.trimmed(frames)),
        FrameRule::Pad => Ok(clips.trimmed(frames) + clips.stride),
        FrameRule::Reject => refuse(
            "frame_rule",
            format!("{} at {fps} a second; the model takes 1 + {} n", counted(available, "frame"), clips.stride),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAN: Clips = Clips { stride: 4, fps: 16 };

    fn parameters(extra: &str) -> Parameters {
        serde_json::from_str(&format!(r#"{{"model": "a/b"{extra}}}"#)).unwrap()
    }

    #[test]
    fn the_policy_decides_about_frames_that_do_not_fit() {
        let taken =
            |available, extra: &str| taken(available, WAN, &parameters(extra)).map_err(|refusal| refusal.reason);
        assert_eq!((taken(1, ""), taken(33, ""), taken(36, "")), (Ok(1), Ok(33), Ok(33)));
        assert_eq!(taken(36, r#", "frame_rule": "pad""#), Ok(37));
        assert_eq!(taken(36, r#", "frame_rule": "reject""#), Err("frame_rule"));
        assert_eq!((taken(500, ""), taken(500, r#", "max_frames": 20"#)), (Ok(81), Ok(17)));
        assert_eq!(taken(500, r#", "frame_rule": "pad""#), Ok(81));
    }

    #[test]
    fn an_asked_length_is_given_or_refused() {
        let taken =
            |available| taken(available, WAN, &parameters(r#", "frames": 17"#)).map_err(|refusal| refusal.detail);
        assert_eq!((taken(17), taken(40), taken(1)), (Ok(17), Ok(17), Ok(1)));
        assert!(taken(16).unwrap_err().contains("16 frames at 16 a second"));
    }

    #[test]
    fn parameters_are_held_against_the_model() {
        let problems = |time: Time, extra: &str| {
            let problems = time.check(&parameters(extra));
            problems.into_iter().map(|problem| problem.message).collect::<Vec<_>>()
        };
        assert_eq!(problems(Time::Clips(WAN), r#", "frames": 17"#), [""; 0]);
        assert!(problems(Time::Clips(WAN), r#", "frames": 16"#)[0].contains("1 + 4 n"));
        assert_eq!(problems(Time::Unknown, r#", "frames": 16"#), [""; 0]);
        assert!(problems(Time::Pictures, r#", "frames": 17"#)[0].contains("takes pictures"));
        assert!(problems(Time::Clips(WAN), r#", "frames": 17, "max_frames": 33"#)[0].contains("`max_frames`"));
        assert!(problems(Time::Clips(WAN), r#", "max_frames": 0"#)[0].contains("is 0"));
    }
}

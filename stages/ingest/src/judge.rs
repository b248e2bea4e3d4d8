//! One row to a sample, or to the reason why not: the picture or clip is decoded in full, so that what is stored can be
//! decoded.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use media::Picture;
use stage::Failure;

use crate::layout::{name, stem};
use crate::origin::unreadable;
use crate::parameters::MissingCaption;
use crate::row::Refusal;

/// Larger pictures are decoded one at a time, which bounds memory whatever the number of threads.
const LARGE: u64 = 24_000_000;
/// Longest file that is read.
const LONGEST: u64 = 1 << 30;

static ONE_LARGE: Mutex<()> = Mutex::new(());

/// An accepted row.
pub(crate) struct Accepted {
    pub(crate) bytes: Vec<u8>,
    pub(crate) digest: blake3::Hash,
    pub(crate) media: &'static str,
    pub(crate) caption: String,
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// Frames, and how many in a second, of a clip.
    pub(crate) clip: Option<(u32, f64)>,
    /// Decoded, if it is wanted; the first frame of a clip.
    pub(crate) picture: Option<Picture>,
}

/// Reads the file of a row, which is there: what keeps it from being read is no property of the data set.
pub(crate) fn read(place: &Path) -> Result<Result<Vec<u8>, Refusal>, Failure> {
    let length = fs_err::metadata(place).map_err(unreadable)?.len();
    if length > LONGEST {
        return Ok(Err(Refusal::new("too_large", format!("a file of {length} bytes; the most is {LONGEST}"))));
    }
    fs_err::read(place).map(Ok).map_err(unreadable)
}

/// Judges bytes and caption; `keep` says whether the decoded picture is wanted.
pub(crate) fn judge(
    bytes: Vec<u8>,
    caption: Result<Option<String>, Refusal>,
    file: Option<&str>,
    policy: MissingCaption,
    background: [u8; 3],
    keep: bool,
) -> Result<Accepted, Refusal> {
    if video::is_clip(&bytes) {
        return judge_clip(bytes, caption, file, policy, keep);
    }
    let refuse = |error: media::Error| Refusal::new(error.reason(), error.to_string());
    let (width, height, format) = media::probe(&bytes).map_err(refuse)?;
    let large = u64::from(width) * u64::from(height) > LARGE;
    let turn = large.then(|| ONE_LARGE.lock().unwrap_or_else(PoisonError::into_inner));
    let picture = media::decode(&bytes, background).map_err(refuse)?;
    drop(turn);
    let caption = settle(caption?, file, policy)?;
    Ok(Accepted {
        digest: blake3::hash(&bytes),
        bytes,
        media: format.name(),
        caption,
        width: picture.width,
        height: picture.height,
        clip: None,
        picture: keep.then_some(picture),
    })
}

fn judge_clip(
    bytes: Vec<u8>,
    caption: Result<Option<String>, Refusal>,
    file: Option<&str>,
    policy: MissingCaption,
    keep: bool,
) -> Result<Accepted, Refusal> {
    let bytes = bytes::Bytes::from(bytes);
    let facts = video::probe(&bytes)?;
    let mut first = None;
    if keep {
        let rate = video::Rate { fps: 1.0, count: 1 };
        video::frames::<Refusal>(&bytes, rate, |picture| {
            first = Some(picture.clone());
            Ok(())
        })?;
    }
    Ok(Accepted {
        digest: blake3::hash(&bytes),
        media: facts.format,
        caption: settle(caption?, file, policy)?,
        width: facts.width,
        height: facts.height,
        clip: Some((facts.frames, facts.fps)),
        picture: first,
        bytes: bytes.into(),
    })
}

/// The caption of a row, by the policy for those that have none.
fn settle(caption: Option<String>, file: Option<&str>, policy: MissingCaption) -> Result<String, Refusal> {
    let stated = caption.map(|caption| caption.trim().to_owned()).filter(|caption| !caption.is_empty());
    match (stated, policy, file) {
        (Some(caption), _, _) => Ok(caption),
        (None, MissingCaption::Empty, _) => Ok(String::new()),
        (None, MissingCaption::Filename, Some(file)) => Ok(name(stem(file)).replace('_', " ").trim().to_owned()),
        (None, MissingCaption::Filename, None) => Err(Refusal::new("no_caption", "neither a caption nor a file name")),
        (None, MissingCaption::Reject, _) => {
            Err(Refusal::new("no_caption", "it has no caption; see `missing_caption` for other ways"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_a_file_from_being_read_is_a_failure_and_its_length_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let gone = folder.path().join("gone.png");
        std::os::unix::fs::symlink("gone.png", &gone).unwrap();
        // A folder where a file was listed, a link to itself, a file that went meanwhile.
        for place in [folder.path(), &gone, &folder.path().join("never.mp4")] {
            let failure = read(place).unwrap_err();
            assert_eq!(failure.exit, stage::Exit::Io);
            assert!(failure.problem.message.contains(&place.display().to_string()), "{failure:?}");
            assert!(failure.problem.help.unwrap().contains("run again"));
        }
        let long = folder.path().join("long.mp4");
        fs_err::File::create(&long).unwrap().set_len(LONGEST + 1).unwrap();
        assert_eq!(read(&long).unwrap().unwrap_err().reason, "too_large");
    }

    #[test]
    fn a_file_name_becomes_a_caption_only_when_asked_to() {
        let none = || settle(Some("  ".into()), Some("a/red_moon.jpg"), MissingCaption::Reject);
        assert_eq!(none().unwrap_err().reason, "no_caption");
        assert_eq!(settle(None, Some("a/red_moon.jpg"), MissingCaption::Filename).unwrap(), "red moon");
        assert_eq!(settle(None, Some("a/red_moon.jpg"), MissingCaption::Empty).unwrap(), "");
        assert_eq!(settle(Some(" x \n".into()), None, MissingCaption::Filename).unwrap(), "x");
    }
}

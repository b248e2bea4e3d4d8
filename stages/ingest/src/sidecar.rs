//! Loose picture files, each with its caption in a text file of the same name: `a.jpg` and `a.txt` (or `a.caption`).

use std::collections::{BTreeMap, BTreeSet};

use stage::{Events, Failure};

use crate::layout::{extension, is_picture, stem};
use crate::origin::{Origin, unreadable};
use crate::row::{Media, Refusal, Row, Rows};

/// Rows in path order; captions without a picture follow, refused. Captions are read as they are needed.
pub(crate) fn rows<'a>(
    pictures: &'a [String],
    captions: &'a [String],
    origin: &'a Origin,
    events: &'a Events,
) -> Rows<'a> {
    // Of two captions for one picture, `.txt` wins: it sorts last, so it is inserted last.
    let by_stem: BTreeMap<&str, &String> = captions.iter().map(|path| (stem(path), path)).collect();
    let stems: BTreeSet<&str> = pictures.iter().map(|path| stem(path)).collect();
    let lonely = captions.iter().filter(move |path| !stems.contains(stem(path)));
    let pictures = pictures.iter().map(move |path| {
        let caption = match by_stem.get(stem(path)) {
            Some(file) => read(file, origin, events)?,
            None => Ok(None),
        };
        let media = Ok(Media::File(path.clone()));
        Ok::<_, Failure>(Row { source: path.clone(), name: Some(path.clone()), media, caption })
    });
    let lonely = lonely.map(|path| {
        let refusal = Refusal::new("no_media", format!("a `.{}` file without a picture of its name", extension(path)));
        Ok(Row { source: path.clone(), name: None, media: Err(refusal), caption: Ok(None) })
    });
    Box::new(pictures.chain(lonely))
}

/// Rows that [`rows`] gives.
pub(crate) fn count(pictures: &[String], captions: &[String]) -> u64 {
    let stems: BTreeSet<&str> = pictures.iter().map(|path| stem(path)).collect();
    (pictures.len() + captions.iter().filter(|path| !stems.contains(stem(path))).count()) as u64
}

/// Takes out of `pictures` what neither its extension nor a caption says to be one, refused: a repository of the Hub may hold
/// archives, which are not fetched to find that out.
pub(crate) fn set_aside(pictures: &mut Vec<String>, captions: &[String]) -> Vec<(String, Refusal)> {
    let captioned: BTreeSet<&str> = captions.iter().map(|path| stem(path)).collect();
    let likely = |path: &String| is_picture(path) || captioned.contains(stem(path));
    let (wanted, others): (Vec<_>, Vec<_>) = std::mem::take(pictures).into_iter().partition(likely);
    *pictures = wanted;
    let refusal = || Refusal::new("unsupported", "not fetched: no name of a picture or clip, and no caption beside it");
    others.into_iter().map(|path| (path, refusal())).collect()
}

fn read(file: &String, origin: &Origin, events: &Events) -> Result<Result<Option<String>, Refusal>, Failure> {
    let places = origin.fetch(std::slice::from_ref(file), events)?;
    let text = String::from_utf8(fs_err::read(&places[0]).map_err(unreadable)?);
    let text = text.map_err(|_| Refusal::new("caption_encoding", format!("`{file}` is not UTF-8")));
    Ok(text.map(|text| Some(text.trim_start_matches('\u{feff}').to_owned())))
}

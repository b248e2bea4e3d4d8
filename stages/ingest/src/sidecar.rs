//! Loose picture files, each with its caption in a text file of the same name: `a.jpg` and `a.txt` (or `a.caption`).

use std::collections::{BTreeMap, BTreeSet};

use stage::{Events, Failure};

use crate::layout::{extension, stem};
use crate::origin::Origin;
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

fn read(file: &String, origin: &Origin, events: &Events) -> Result<Result<Option<String>, Refusal>, Failure> {
    let places = origin.fetch(std::slice::from_ref(file), events)?;
    Ok(match fs_err::read(&places[0]).map(String::from_utf8) {
        Ok(Ok(text)) => Ok(Some(text.trim_start_matches('\u{feff}').to_owned())),
        Ok(Err(_)) => Err(Refusal::new("caption_encoding", format!("`{file}` is not UTF-8"))),
        Err(error) => Err(Refusal::new("caption_unreadable", error.to_string())),
    })
}

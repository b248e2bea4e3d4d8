//! How a data set is laid out, told from the names of its files.

use crate::origin::Listing;

/// File extensions of pictures and clips.
const PICTURES: &[&str] = &[
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic", "jxl", "jp2", "mp4",
    "m4v", "mov", "mkv", "webm", "avi",
];

/// Takes hidden files out, such as `.DS_Store` or a cache in `.pipeline`.
const VISIBLE: &[&str] = &["!.*", "!*/.*"];
/// Takes out what nearly every repository of the Hub has and no data set consists of.
const NO_CARDS: &[&str] = &["!README.md", "!LICENSE", "!LICENSE.md", "!LICENSE.txt"];

/// Globs of the files of a folder that are part of a data set. Whatever is not among them is not read, so that nothing is
/// read that the identity of the data set does not count.
pub(crate) fn parts() -> Vec<String> {
    VISIBLE.iter().map(|glob| (*glob).to_owned()).collect()
}

/// As [`parts`], of a repository of the Hub. Metadata may name files of any kind, so few are left out.
pub(crate) fn hub_parts() -> Vec<String> {
    VISIBLE.iter().chain(NO_CARDS).map(|glob| (*glob).to_owned()).collect()
}

/// Files that describe a data set and are no part of it.
const ABOUT: &[&str] = &["readme", "license", "licence", "copying", "notice", "changelog"];

/// How the rows are written down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Parquet files with pictures inside.
    Parquet { files: Vec<String>, ignored: Vec<String> },
    /// `metadata.jsonl` or `metadata.csv` naming files; `pictures` are all picture files there are.
    Metadata { tables: Vec<String>, pictures: Vec<String> },
    /// Picture files with captions beside them.
    SideCar { pictures: Vec<String>, captions: Vec<String> },
}

impl Layout {
    /// Metadata tables come first, then Parquet, then loose pictures.
    pub(crate) fn of(listing: &Listing) -> Self {
        let files = &listing.files;
        let select =
            |keep: &dyn Fn(&str) -> bool| -> Vec<String> { files.iter().filter(|f| keep(f)).cloned().collect() };
        let pictures = || select(&is_picture);
        let tables = select(&|path| matches!(name(path), "metadata.jsonl" | "metadata.csv"));
        if !tables.is_empty() {
            return Self::Metadata { tables, pictures: pictures() };
        }
        let parquet = select(&|path| extension(path) == "parquet");
        if !parquet.is_empty() {
            return Self::Parquet { files: parquet, ignored: pictures() };
        }
        let is_caption = |path: &String| matches!(extension(path).as_str(), "txt" | "caption");
        let counted = files.iter().filter(|path| !is_about(path)).cloned();
        let (captions, pictures) = counted.partition(is_caption);
        Self::SideCar { pictures, captions }
    }
}

/// Whether the extension is one of a picture or clip.
pub(crate) fn is_picture(path: &str) -> bool {
    PICTURES.contains(&extension(path).as_str())
}

/// Text beside a data set, such as `README.md`.
fn is_about(path: &str) -> bool {
    let stem = name(path).split('.').next().unwrap_or_default().to_ascii_lowercase();
    ABOUT.contains(&stem.as_str()) && matches!(extension(path).as_str(), "" | "md" | "txt" | "rst")
}

/// Last part of a path.
pub(crate) fn name(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

/// The folder of a path; empty at the top.
pub(crate) fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The path without its extension.
pub(crate) fn stem(path: &str) -> &str {
    let dot = path.len() - name(path).len() + name(path).rfind('.').filter(|at| *at > 0).unwrap_or(name(path).len());
    &path[..dot]
}

/// Extension in lower case, without a dot.
pub(crate) fn extension(path: &str) -> String {
    name(path).rsplit_once('.').map_or(String::new(), |(_, extension)| extension.to_ascii_lowercase())
}

/// The Parquet files of a split and configuration: names are taken apart at `/`, `-`, `_` and `.`, as the Hub does.
/// Without a split, `train` if any file has it in its name, else all. `Err` lists the words there are.
pub(crate) fn in_split(
    files: &[String],
    config: Option<&str>,
    split: Option<&str>,
) -> Result<Vec<String>, Vec<String>> {
    let spaced = |text: &str| format!("/{}/", text.replace(['-', '_', '.'], "/"));
    let has = |path: &str, word: &str| spaced(path).contains(&spaced(word));
    let known = || {
        let words = files.iter().flat_map(|file| file.split(['/', '-', '_', '.']));
        let mut known: Vec<String> = words.map(str::to_owned).collect();
        known.sort();
        known.dedup();
        known.retain(|word| word.parse::<u64>().is_err() && !matches!(word.as_str(), "of" | "parquet" | "data" | ""));
        known
    };
    let mut chosen = files.to_vec();
    if let Some(config) = config {
        chosen.retain(|file| has(file, config));
    }
    match split {
        Some("all") => {}
        Some(split) => chosen.retain(|file| has(file, split)),
        None if chosen.iter().any(|file| has(file, "train")) => chosen.retain(|file| has(file, "train")),
        None => {}
    }
    if chosen.is_empty() { Err(known()) } else { Ok(chosen) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(files: &[&str]) -> Layout {
        let files = files.iter().map(|f| (*f).to_owned()).collect();
        Layout::of(&Listing { files, refused: Vec::new() })
    }

    #[test]
    fn names_decide() {
        let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            layout(&["README.md", "a.jpg", "b.bin", "a.txt", "b.Caption", "LICENSE", "license.txt"]),
            Layout::SideCar { pictures: owned(&["a.jpg", "b.bin"]), captions: owned(&["a.txt", "b.Caption"]) }
        );
        assert_eq!(
            layout(&["a.JPG", "note.txt", "x/metadata.csv"]),
            Layout::Metadata { tables: owned(&["x/metadata.csv"]), pictures: owned(&["a.JPG"]) }
        );
        assert_eq!(
            layout(&["data/a.parquet", "shot.png"]),
            Layout::Parquet { files: owned(&["data/a.parquet"]), ignored: owned(&["shot.png"]) }
        );
        assert_eq!((stem("a.b/c.d.jpg"), stem("a.b/c"), stem(".x")), ("a.b/c.d", "a.b/c", ".x"));
    }

    #[test]
    fn splits_are_words_of_the_path() {
        let files = || {
            vec![
                "big/test/0.parquet".to_owned(),
                "big/train-00000-of-00001.parquet".to_owned(),
                "small/train/0.parquet".to_owned(),
            ]
        };
        let pick = |config, split| in_split(&files(), config, split);
        assert_eq!(pick(None, None).unwrap().len(), 2);
        assert_eq!(pick(None, Some("all")).unwrap().len(), 3);
        assert_eq!(pick(Some("small"), None).unwrap(), ["small/train/0.parquet"]);
        assert_eq!(pick(None, Some("test")).unwrap(), ["big/test/0.parquet"]);
        assert_eq!(pick(None, Some("tes")).unwrap_err(), ["big", "small", "test", "train"]);
        assert_eq!(in_split(&["x.parquet".to_owned()], None, None).unwrap().len(), 1);
    }
}

//! "Did you mean": the nearest known name to a mistyped one.

/// The candidate nearest to `name`, if near enough to be a likely slip.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len().min(name.len()) / 3)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Help text for an unknown name: the likely meant one, else the list.
pub fn help<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str> + Clone) -> String {
    match nearest(name, candidates.clone()) {
        Some(candidate) => format!("did you mean `{candidate}`?"),
        None => {
            format!("known names: {}", candidates.into_iter().map(|c| format!("`{c}`")).collect::<Vec<_>>().join(", "))
        }
    }
}

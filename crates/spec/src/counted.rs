//! Numbers with their nouns, as people read them.

use std::fmt::Display;

/// `1 picture`, `2 pictures`; `one` is the singular, with words before it if need be: `1 distinct caption`.
pub fn counted<N: Copy + Display + PartialEq + From<u8>>(n: N, one: &str) -> String {
    let ends = |endings: &[&str]| endings.iter().any(|ending| one.ends_with(ending));
    if n == N::from(1) {
        format!("{n} {one}")
    } else if ends(&["s", "x", "ch", "sh"]) {
        format!("{n} {one}es")
    } else if ends(&["y"]) && !ends(&["ay", "ey", "oy", "uy"]) {
        format!("{n} {}ies", &one[..one.len() - 1])
    } else {
        format!("{n} {one}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_one_and_the_rest_are_many() {
        assert_eq!(counted(1u64, "picture"), "1 picture");
        assert_eq!(counted(0usize, "picture"), "0 pictures");
        assert_eq!(counted(3u32, "batch"), "3 batches");
        assert_eq!(counted(2i64, "entry"), "2 entries");
        assert_eq!(counted(2i64, "key"), "2 keys");
    }
}

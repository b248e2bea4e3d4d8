//! A disk that is full: how much is free, and how much a stage needs as far as its progress tells.

use std::path::Path;

use crate::clock::size;

/// Bytes that a user may still write where `path` lies.
pub(crate) fn free(path: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(path).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Bytes of the files below a folder.
pub(crate) fn used(folder: &Path) -> u64 {
    let Ok(entries) = fs_err::read_dir(folder) else { return 0 };
    let of = |path: &Path| match fs_err::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => used(path),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.flatten().map(|entry| of(&entry.path())).sum()
}

/// What to do about a stage that filled the disk: `written` bytes at `progress` (done, total), `before` bytes when the same
/// stage was last made.
pub(crate) fn help(cache: &Path, written: u64, progress: Option<(u64, u64)>, before: Option<u64>) -> String {
    let by_progress = progress.filter(|(done, total)| *done > 0 && total > done);
    let by_progress = by_progress.map(|(done, total)| (written as f64 * total as f64 / done as f64) as u64);
    let need = by_progress.into_iter().chain(before).max().map(|need| format!(", it needs about {}", size(need)));
    let free = free(cache).map_or_else(|| "little".to_owned(), size);
    format!(
        "it wrote {}{}; {free} are free in `{}`: make room (`pipeline gc` may help) or choose another disk with `--cache DIR`; \
         what was finished is kept",
        size(written),
        need.unwrap_or_else(|| ", and needs more".to_owned()),
        cache.display()
    )
}

/// Whether a message tells of a full disk.
pub(crate) fn is_full(message: &str) -> bool {
    ["No space left on device", "no storage space", "Disk quota exceeded", "quota exceeded"]
        .iter()
        .any(|told| message.contains(told))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_need_is_told_from_progress_or_from_the_last_time() {
        let folder = tempfile::tempdir().unwrap();
        let told = |progress, before| help(folder.path(), 14_000_000, progress, before);
        assert!(told(Some((700, 1000)), None).starts_with("it wrote 14.0 MB, it needs about 20.0 MB; "));
        assert!(told(Some((700, 1000)), Some(30_000_000)).contains("needs about 30.0 MB"));
        assert!(told(None, None).starts_with("it wrote 14.0 MB, and needs more; "));
        assert!(free(folder.path()).is_some());
    }
}

//! Collection: which artifacts are kept, and how the others go without anyone noticing who still uses the cache.
//!
//! The collector closes a gate, so that nothing becomes used meanwhile, moves what goes into `trash/` by one rename each,
//! opens the gate, and only then removes. Killed at any instant it leaves whole artifacts, or none.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::cache::{MANIFEST, names, remove_tree};
use crate::{Cache, Digest, Manifest, Result};

/// Unfinished work, damaged files and old answers are kept this long unless an age is asked for.
const KEPT_UNASKED: Duration = Duration::from_hours(14 * 24);
/// Kinds of answers that stay whatever their age: asked again they may be others. These pin a branch of the Hub to a commit.
const PINS: &[&str] = &["hub-commits"];

/// What may go.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// Artifacts to keep; what they were made of is kept with them.
    pub roots: BTreeSet<(String, Digest)>,
    /// Keep what was made or used since.
    pub younger_than: Option<Duration>,
    /// Stop once the artifacts take no more bytes than this; the longest unused go first.
    pub max_bytes: Option<u64>,
}

/// An artifact that goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collected {
    /// The verb.
    pub stage: String,
    /// Its key.
    pub key: Digest,
    /// What it holds, shared or not.
    pub bytes: u64,
}

/// What a collection did or would do.
#[derive(Debug, Clone, Default)]
pub struct Collection {
    /// In the order in which they go.
    pub artifacts: Vec<Collected>,
    /// Other folders and files that go: unfinished work, damaged files.
    pub leftovers: Vec<PathBuf>,
    /// Bytes on disk that become free: a file that a kept artifact shares does not count.
    pub freed: u64,
    /// Bytes on disk of the artifacts that stay.
    pub kept: u64,
}

struct Candidate {
    used: SystemTime,
    stage: String,
    key: Digest,
    manifest: Option<Manifest>,
}

impl Cache {
    /// Decides what goes at `now`, and unless `dry_run` removes it.
    pub fn collect(&self, policy: &Policy, now: SystemTime, dry_run: bool) -> Result<Collection> {
        let gate = if dry_run { None } else { Some(self.close_gate()?) };
        let mut found = Collection::default();
        self.choose(policy, now, &mut found);
        self.leftovers(policy.younger_than.unwrap_or(KEPT_UNASKED), now, &mut found);
        if dry_run {
            return Ok(found);
        }
        let trash = self.root().join("trash");
        fs_err::create_dir_all(&trash)?;
        // What others moved there before they opened the gate; some may have been killed while they removed it.
        let before = names(&trash);
        // A folder of its own: process ids come again, in containers at once.
        let own = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o777)).tempdir_in(&trash)?.keep();
        let gone = found.artifacts.iter().map(|gone| self.artifact_path(&gone.stage, &gone.key));
        for (number, path) in gone.chain(found.leftovers.iter().cloned()).enumerate() {
            fs_err::rename(&path, own.join(number.to_string()))?;
        }
        drop(gate);
        // Not `trash/` itself: another collector may be filling its folder there.
        for path in before.iter().map(|name| trash.join(name)).chain([own]) {
            remove_tree(&path)?;
        }
        self.drop_objects();
        Ok(found)
    }

    fn choose(&self, policy: &Policy, now: SystemTime, found: &mut Collection) {
        let mut all = BTreeMap::new();
        for stage in self.stages() {
            for key in self.keys(&stage) {
                let manifest = self.manifest(&stage, &key).ok().flatten();
                let path = self.artifact_path(&stage, &key);
                let meta = fs_err::metadata(path.join(MANIFEST)).or_else(|_| fs_err::metadata(&path));
                let used = meta.and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                all.insert((stage.clone(), key), Candidate { used, stage: stage.clone(), key, manifest });
            }
        }
        let kept = closure(policy.roots.iter().chain(&self.used()), &all);
        let (mut going, mut staying): (Vec<_>, Vec<_>) =
            all.into_values().partition(|one| !kept.contains(&(one.stage.clone(), one.key)));
        if let Some(age) = policy.younger_than {
            // A clock that was set back makes nothing old.
            let old = |one: &Candidate| now.duration_since(one.used).is_ok_and(|unused| unused >= age);
            let (old, young): (Vec<_>, Vec<_>) = going.into_iter().partition(old);
            (going, staying) = (old, staying.into_iter().chain(young).collect());
        }
        going.sort_by(|a, b| (a.used, &a.stage, a.key).cmp(&(b.used, &b.stage, b.key)));
        // Holders of each file, to know when its bytes become free.
        let mut holders: BTreeMap<Digest, (usize, u64)> = BTreeMap::new();
        let files = |one: &Candidate| -> BTreeMap<Digest, u64> {
            one.manifest.iter().flat_map(|m| &m.files).map(|file| (file.digest, file.bytes)).collect()
        };
        for (digest, bytes) in going.iter().chain(&staying).flat_map(files) {
            holders.entry(digest).or_insert((0, bytes)).0 += 1;
        }
        found.kept = holders.values().map(|(_, bytes)| bytes).sum();
        for one in going {
            if policy.max_bytes.is_some_and(|limit| found.kept <= limit) {
                break;
            }
            for (digest, bytes) in files(&one) {
                let Some((count, _)) = holders.get_mut(&digest) else { continue };
                *count -= 1;
                if *count == 0 {
                    (found.freed, found.kept) = (found.freed + bytes, found.kept - bytes);
                }
            }
            let bytes = one.manifest.as_ref().map_or(0, Manifest::bytes);
            found.artifacts.push(Collected { stage: one.stage, key: one.key, bytes });
        }
    }

    /// Work of nobody, damaged files, and what a killed writer left, unless it is young.
    fn leftovers(&self, age: Duration, now: SystemTime, found: &mut Collection) {
        let old = |path: &Path| {
            let modified = fs_err::symlink_metadata(path).and_then(|meta| meta.modified());
            modified.is_ok_and(|modified| now.duration_since(modified).is_ok_and(|since| since >= age))
        };
        let mut take = |path: PathBuf| {
            found.freed += size_of_tree(&path);
            found.leftovers.push(path);
        };
        let root = self.root();
        for stage in names(&root.join("work")) {
            for name in names(&root.join("work").join(&stage)) {
                let path = root.join("work").join(&stage).join(&name);
                let parts = names(&path).into_iter().map(|part| path.join(part));
                let unlocked = name.parse().is_ok_and(|key| matches!(self.try_lock(&stage, &key), Ok(Some(_))));
                if unlocked && parts.chain([path.clone()]).all(|part| old(&part)) {
                    take(path);
                }
            }
        }
        names(&root.join("quarantine"))
            .iter()
            .map(|n| root.join("quarantine").join(n))
            .filter(|p| old(p))
            .for_each(&mut take);
        // Answers of long ago, and `.tmp…`, `….linking-…`: halves of files whose writer was killed.
        for kind in names(&root.join("memo")) {
            let folder = root.join("memo").join(&kind);
            let pins = |name: &&String| PINS.contains(&kind.as_str()) && !name.starts_with('.');
            let goes = names(&folder).into_iter().filter(|name| !pins(&name));
            goes.map(|name| folder.join(name)).filter(|path| old(path)).for_each(&mut take);
        }
        for group in names(&root.join("objects")) {
            let folder = root.join("objects").join(group);
            let half = |name: &&String| name.parse::<Digest>().is_err();
            names(&folder).iter().filter(half).map(|n| folder.join(n)).filter(|p| old(p)).for_each(&mut take);
        }
    }

    /// Removes objects that no artifact holds. With hard links they have no other name, but without, none ever has; so no
    /// manifest may name them either.
    fn drop_objects(&self) {
        let mut named: Option<BTreeSet<Digest>> = None;
        for group in names(&self.root().join("objects")) {
            let folder = self.root().join("objects").join(group);
            for name in names(&folder) {
                let Ok(digest) = name.parse::<Digest>() else { continue };
                let path = folder.join(&name);
                if fs_err::metadata(&path).is_ok_and(|meta| meta.nlink() > 1) {
                    continue;
                }
                let named = named.get_or_insert_with(|| self.named());
                if !named.contains(&digest) {
                    let _ = fs_err::remove_file(&path);
                }
            }
        }
    }

    /// Digests that manifests name.
    fn named(&self) -> BTreeSet<Digest> {
        let keys =
            self.stages().into_iter().flat_map(|stage| self.keys(&stage).into_iter().map(move |k| (stage.clone(), k)));
        let manifests = keys.filter_map(|(stage, key)| self.manifest(&stage, &key).ok()?);
        manifests.flat_map(|manifest| manifest.files.into_iter().map(|file| file.digest)).collect()
    }

    /// Notes that an artifact was used now, for [`Policy::younger_than`] and the order of [`Cache::manifests`].
    pub fn touch(&self, stage: &str, key: &Digest, now: SystemTime) {
        let manifest = self.artifact_path(stage, key).join(MANIFEST);
        // A cache of others may be read and not be written: then its owner does not learn of the use.
        let _ = fs_err::File::open(manifest).map(|file| file.file().set_modified(now));
    }
}

/// `roots` and all they were made of.
fn closure<'a>(
    roots: impl Iterator<Item = &'a (String, Digest)>,
    all: &BTreeMap<(String, Digest), Candidate>,
) -> BTreeSet<(String, Digest)> {
    let mut kept = BTreeSet::new();
    let mut open: Vec<_> = roots.cloned().collect();
    while let Some(one) = open.pop() {
        if let Some(manifest) = all.get(&one).and_then(|found| found.manifest.as_ref()) {
            open.extend(
                manifest.inputs.values().map(|input| (input.stage.clone(), input.key)).filter(|i| !kept.contains(i)),
            );
        }
        kept.insert(one);
    }
    kept
}

fn size_of_tree(path: &Path) -> u64 {
    match fs_err::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => names(path).iter().map(|name| size_of_tree(&path.join(name))).sum(),
        Ok(meta) if meta.nlink() == 1 => meta.len(),
        Ok(_) | Err(_) => 0,
    }
}

#[cfg(test)]
mod tests;

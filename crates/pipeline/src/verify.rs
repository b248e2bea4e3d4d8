//! `pipeline verify`: reads every file of the artifacts again, of a recipe or of the whole cache.

use std::fmt::Write as _;

use serde_json::json;
use spec::Mistake;
use stage::Exit;
use store::{Cache, Digest, Lookup};

use crate::clock::size;
use crate::error::{Error, Result, say};
use crate::show::current;
use crate::workspace::Workspace;

/// The current artifacts of a recipe.
pub(crate) fn recipe(workspace: &Workspace, json: bool) -> Result<()> {
    let artifacts = current(workspace)?.into_iter().filter_map(|current| current.artifact);
    let keys = artifacts.map(|artifact| (artifact.manifest.stage, artifact.manifest.key));
    print(&workspace.cache, keys, &format!("`pipeline run {} --repair`", workspace.recipe.path.display()), json)
}

/// All artifacts of a cache.
pub(crate) fn cache(cache: &Cache, json: bool) -> Result<()> {
    let stages = cache.stages().into_iter();
    let keys = stages.flat_map(|stage| cache.keys(&stage).into_iter().map(move |key| (stage.clone(), key)));
    print(cache, keys, "`pipeline run RECIPE --repair`", json)
}

fn print(cache: &Cache, keys: impl Iterator<Item = (String, Digest)>, remedy: &str, json: bool) -> Result<()> {
    let (mut sound, mut bytes, mut damaged) = (0, 0, Vec::new());
    for (stage, key) in keys {
        let (state, reason) = match cache.verify(&stage, &key) {
            Lookup::Hit(artifact) => {
                (sound, bytes) = (sound + 1, bytes + artifact.manifest.bytes());
                ("sound", None)
            }
            // Collected meanwhile.
            Lookup::Absent => continue,
            Lookup::Broken(reason) => {
                damaged.push(format!("`{stage}` {}: {reason}", key.short()));
                ("damaged", Some(reason))
            }
        };
        let mut line = String::new();
        if json {
            let _ = writeln!(line, "{}", json!({"stage": stage, "key": key, "state": state, "reason": reason}));
        } else {
            let _ = writeln!(line, "{state:8} {stage}  {}  {}", key.short(), reason.unwrap_or_default());
        }
        say(&mut std::io::stdout(), line.trim_end());
        say(&mut std::io::stdout(), "\n");
    }
    if damaged.is_empty() {
        if !json {
            say(&mut std::io::stdout(), &format!("all {sound} artifacts are sound ({})\n", size(bytes)));
        }
        return Ok(());
    }
    let text = format!("{} of {} artifacts are damaged", damaged.len(), sound + damaged.len());
    Err(Error::new(Exit::Input, Mistake::new(text).help(format!("{remedy} makes them again"))))
}

//! Sources on the Hub: pinned to a commit, remembered, and asked again only on demand.

use hub::testing::Loopback;

use crate::support::{Forge, Said, stage_line};

struct World {
    forge: Forge,
    hub: Loopback,
}

impl World {
    fn new() -> Self {
        let forge = Forge::new();
        forge.edit("sword.toml", "source = \"mine\"", "repo = \"old/mine\"");
        forge.write("served/a.txt", "rock");
        forge.write("served/README.md", "about rocks");
        let hub = Loopback::start().dataset("old/mine", &forge.path("served"));
        Self { forge, hub }
    }

    fn run(&self, args: &[&str], offline: bool) -> Said {
        let mut command = self.forge.command(args);
        command.env("HF_HOME", self.forge.path("hf")).env("HF_ENDPOINT", self.hub.endpoint());
        for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        if offline {
            command.env("HF_HUB_OFFLINE", "1");
        }
        let child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        self.forge.finish(child)
    }

    #[track_caller]
    fn good(&self, args: &[&str], offline: bool) -> Said {
        let said = self.run(args, offline);
        assert_eq!(said.code, 0, "{}{}", said.out, said.err);
        said
    }
}

#[test]
fn a_second_run_needs_no_network() {
    let world = World::new();
    world.good(&["run", "sword.toml"], false);
    assert_eq!(world.forge.ran(), ["dig", "smelt", "forge"]);
    assert!(!world.hub.requests().is_empty());
    let shown = world.good(&["show", "sword.toml", "dig"], true).out;
    let commit = shown.split("repo: old/mine at ").nth(1).and_then(|rest| rest.lines().next()).unwrap();
    assert_eq!((commit.len(), commit.trim_matches(|c: char| c.is_ascii_hexdigit())), (40, ""), "{shown}");

    world.hub.forget();
    world.good(&["run", "sword.toml"], true);
    assert_eq!((world.hub.requests().len(), world.forge.ran().len()), (0, 0));
}

#[test]
fn a_changed_repository_counts_once_it_is_asked_for_and_by_its_contents() {
    let world = World::new();
    world.good(&["run", "sword.toml"], false);
    world.forge.ran();

    // A new commit that changes nothing that counts.
    world.forge.write("served/README.md", "more about rocks");
    world.good(&["run", "sword.toml", "--update"], false);
    assert_eq!(world.forge.ran(), Vec::<String>::new());

    world.forge.write("served/a.txt", "gold");
    assert!(stage_line(&world.good(&["plan", "sword.toml"], false).out, "dig").contains("cached"), "pinned");
    let plan = world.good(&["plan", "sword.toml", "--update"], false);
    assert_eq!(stage_line(&plan.out, "dig"), "dig    to run  source `repo` changed: a.txt");
    // The new commit is remembered.
    assert!(stage_line(&world.good(&["plan", "sword.toml"], true).out, "dig").contains("to run"));
}

#[test]
fn what_the_hub_cannot_give_is_an_error_with_its_place() {
    let world = World::new();
    let said = world.run(&["run", "sword.toml"], true);
    assert_eq!(said.code, 7, "{}", said.err);
    assert!(said.err.contains("HF_HUB_OFFLINE") && said.err.contains("sword.toml:5"), "{}", said.err);
    let said = world.run(&["run", "sword.toml", "--set", "dig.repo=old/mien"], false);
    assert_eq!(said.code, 7, "{}", said.err);
    assert!(said.err.contains("old/mien") && said.err.contains("--set"), "{}", said.err);
    assert_eq!(world.forge.ran(), Vec::<String>::new());
}

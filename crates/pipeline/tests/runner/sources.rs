//! Sources that are local folders, and what of them counts.

use std::process::Stdio;

use crate::support::Forge;

#[test]
fn what_cannot_be_read_is_a_failure_of_the_disk_with_its_path() {
    let forge = Forge::new();
    std::os::unix::fs::symlink("loop.txt", forge.path("mine/loop.txt")).unwrap();
    let said = forge.run(&["run", "sword.toml"]);
    assert_eq!(said.code, 6, "{}", said.err);
    assert!(said.err.contains("mine/loop.txt") && said.err.contains("then run again"), "{}", said.err);
    assert_eq!((forge.ran(), forge.artifacts("dig")), (Vec::new(), 0));
}

#[test]
fn a_source_around_the_cache_and_the_runs_is_not_made_of_them() {
    for places in [&[][..], &["--cache", "deep/store", "--runs", "deep/seen"]] {
        let forge = Forge::new();
        forge.write("mine/pipeline.toml", &forge.read("pipeline.toml").replace("bin/", "../bin/"));
        forge.write("mine/sword.toml", &forge.read("sword.toml").replace("\"mine\"", "\".\""));
        let run = || {
            let mut command = forge.command(&[&["run", "sword.toml"], places].concat());
            command.current_dir(forge.path("mine")).stdout(Stdio::piped()).stderr(Stdio::piped());
            let said = forge.finish(command.spawn().unwrap());
            assert_eq!(said.code, 0, "{places:?}\n{}{}", said.out, said.err);
            forge.ran()
        };
        assert_eq!(run(), ["dig", "smelt", "forge"], "{places:?}");
        assert_eq!(run(), Vec::<String>::new(), "{places:?}");
        forge.write("mine/deep/b.txt", "gold");
        assert_eq!(run().first().map(String::as_str), Some("dig"), "{places:?}");
    }
}

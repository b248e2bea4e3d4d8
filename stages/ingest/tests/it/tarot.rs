//! Real card scans, where they are at hand.

use serde_json::json;

use crate::support::World;

#[test]
fn real_cards_from_a_folder_and_from_parquet_are_the_same_samples() {
    let root = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/tarot");
    if !root.is_dir() {
        eprintln!("skipped: {} absent", root.display());
        return;
    }
    let world = World::new();
    let run = |part: &str| {
        let dataset = root.join(part).to_string_lossy().into_owned();
        world
            .run(json!({"dataset": dataset, "image_column": "image", "caption_column": "caption", "limit": 78}))
            .unwrap()
    };
    let (folder, parquet) = (run("images"), run("data"));
    assert_eq!((folder.samples.len(), folder.reasons()), (78, vec![]));
    assert_eq!(folder.ids(), parquet.ids());
    let captions = |ran: &crate::support::Ran| ran.samples.iter().map(|s| s.caption.clone()).collect::<Vec<_>>();
    assert_eq!(captions(&folder), captions(&parquet));
}

//! Buckets: the peer's sets, ties, and the laws of distance.

use proptest::prelude::*;

use super::*;

fn names(buckets: &[Bucket]) -> String {
    buckets.iter().map(Bucket::to_string).collect::<Vec<_>>().join(" ")
}

/// The sets were computed by the peer's own Python code.
#[test]
fn plans_equal_the_peers() {
    let cases = [
        (256 * 256, 64, "192x320 192x256 256x256 256x192 320x192"),
        (512 * 512, 64, "384x640 448x576 512x512 576x448 640x384 768x320"),
        (1024 * 1024, 64, "768x1344 832x1216 896x1152 1024x1024 1152x896 1216x832 1280x768 1344x768 1408x704 1472x640"),
        (
            512 * 512,
            16,
            "352x720 384x672 416x624 448x576 464x560 512x512 560x464 576x448 624x416 640x400 672x384 704x368 768x336",
        ),
        (512 * 512, 32, "384x672 416x608 448x576 512x512 576x448 608x416 640x384 672x384 704x352 736x320"),
    ];
    for (budget, quantum, expected) in cases {
        assert_eq!(names(&plan(budget, quantum, 1)), expected, "budget {budget}, quantum {quantum}");
    }
}

#[test]
fn tarot_cards_go_to_384x640() {
    let buckets = plan(245_760, 64, 1);
    for (width, height) in [(300, 527), (706, 1200), (384, 640), (1000, 1720)] {
        assert_eq!(choose(&buckets, width, height).map(|b| b.to_string()).as_deref(), Some("384x640"));
    }
}

#[test]
fn a_tie_goes_to_the_bigger_then_the_narrower() {
    let buckets = |text: &str| text.split(' ').map(|b| b.parse().unwrap()).collect::<Vec<Bucket>>();
    let choose = |text: &str, width, height| choose(&buckets(text), width, height).unwrap().to_string();
    assert_eq!(choose("640x384 384x640", 512, 512), "384x640");
    assert_eq!(choose("64x64 128x128", 50, 50), "128x128");
}

#[test]
fn no_bucket_for_nothing() {
    assert_eq!(choose(&[], 10, 10), None);
    assert_eq!(choose(&plan(65_536, 64, 1), 0, 10), None);
    assert_eq!(plan(4095, 64, 1), []);
    assert_eq!(names(&plan(4096, 64, 1)), "64x64");
}

#[test]
fn text_that_is_no_bucket_is_refused() {
    for text in [
        "",
        "384",
        "384x",
        "x640",
        "0x640",
        "384x640x0",
        "384x640x1x1",
        "+3x4",
        "384 x 640",
        "384X640",
        "99999999999x1",
    ] {
        let error = text.parse::<Bucket>().unwrap_err();
        assert!(error.to_string().starts_with(&format!("`{text}` is not a bucket")), "{error}");
    }
}

fn bucket() -> impl Strategy<Value = Bucket> {
    (1u32..5000, 1u32..5000, 1u32..300).prop_map(|(width, height, frames)| Bucket { width, height, frames })
}

proptest! {
    #[test]
    fn text_round_trips(bucket in bucket()) {
        prop_assert_eq!(bucket.to_string().parse::<Bucket>().unwrap(), bucket);
    }

    #[test]
    fn a_plan_keeps_budget_and_quantum(budget in 1u64..8_000_000, quantum in 1u32..130, frames in 1u32..100) {
        let buckets = plan(budget, quantum, frames);
        prop_assert_eq!(buckets.is_empty(), u64::from(quantum).pow(2) > budget);
        for pair in buckets.windows(2) {
            prop_assert!(pair[0] != pair[1]);
        }
        for bucket in buckets {
            prop_assert!(bucket.pixels() <= budget);
            prop_assert!(bucket.width >= quantum && bucket.width % quantum == 0);
            prop_assert!(bucket.height >= quantum && bucket.height % quantum == 0);
            prop_assert_eq!(bucket.frames, frames);
        }
    }

    #[test]
    fn distance_is_the_same_for_both_turned(bucket in bucket(), width in 1u32..5000, height in 1u32..5000) {
        let turned = Bucket { width: bucket.height, height: bucket.width, ..bucket };
        prop_assert_eq!(bucket.distance(width, height), turned.distance(height, width));
        let logs = (f64::from(width) / f64::from(height)).ln() - (f64::from(bucket.width) / f64::from(bucket.height)).ln();
        prop_assert!((bucket.distance(width, height) - logs.abs()).abs() < 1e-12);
    }

    #[test]
    fn the_chosen_one_is_nearest_whatever_the_order(
        mut buckets in prop::collection::vec(bucket(), 1..12), width in 1u32..5000, height in 1u32..5000,
    ) {
        let chosen = choose(&buckets, width, height).unwrap();
        for bucket in &buckets {
            prop_assert!(chosen.distance(width, height) <= bucket.distance(width, height) + 1e-15);
        }
        buckets.reverse();
        prop_assert_eq!(choose(&buckets, width, height), Some(chosen));
    }

    #[test]
    fn upscaling_is_a_resize_factor_above_one(bucket in bucket(), width in 1u32..5000, height in 1u32..5000) {
        let scale = (f64::from(bucket.width) / f64::from(width)).max(f64::from(bucket.height) / f64::from(height));
        prop_assert_eq!(bucket.upscales(width, height), scale > 1.0);
    }
}

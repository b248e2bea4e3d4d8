//! Philox against the known answers of Random123, and what every stream promises.

use proptest::prelude::*;

use super::*;

/// `kat_vectors` of Random123 1.14, rows `philox4x32 10`.
#[test]
fn philox_gives_the_published_answers() {
    let pi = [[0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0, 0, 0]];
    let cases = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (pi[0], [pi[1][0], pi[1][1]], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
    ];
    for (counter, key, answer) in cases {
        assert_eq!(philox4x32_10(counter, key), answer);
    }
}

/// Changing what a stream's name means changes every run; this pins it.
#[test]
fn a_named_stream_never_changes() {
    let mut stream = Stream::new(2026, &["noise".into(), "0123456789abcdef".into(), 7.into()]);
    let drawn = [(); 5].map(|()| stream.bits32());
    assert_eq!(drawn, [1_159_011_138, 3_233_109_808, 3_519_509_927, 1_386_473_559, 1_267_233_236]);
}

#[test]
fn names_are_not_confused() {
    let names: [&[Word<'_>]; 7] = [
        &[],
        &["".into()],
        &["ab".into()],
        &["a".into(), "b".into()],
        &[1.into()],
        &["1".into()],
        &[1.into(), 0.into()],
    ];
    let firsts: std::collections::BTreeSet<_> =
        (0..2).flat_map(|seed| names.map(|name| Stream::new(seed, name).bits64())).collect();
    assert_eq!(firsts.len(), 14);
}

#[test]
fn normals_have_the_moments_of_the_normal_distribution() {
    let values = Stream::new(1, &["moments".into()]).normals(1_000_000);
    let mean = |power: i32| values.iter().map(|&z| f64::from(z).powi(power)).sum::<f64>() / 1e6;
    // Four standard errors of each moment.
    assert!(mean(1).abs() < 0.004, "{}", mean(1));
    assert!((mean(2) - 1.0).abs() < 0.0057, "{}", mean(2));
    assert!(mean(3).abs() < 0.0155, "{}", mean(3));
    assert!((mean(4) - 3.0).abs() < 0.04, "{}", mean(4));
    let neighbours = values.windows(2).map(|pair| f64::from(pair[0] * pair[1])).sum::<f64>() / 1e6;
    assert!(neighbours.abs() < 0.004, "{neighbours}");
}

#[test]
fn bounded_numbers_are_even() {
    let mut counts = [0; 6];
    let mut stream = Stream::new(3, &[]);
    (0..60_000).for_each(|_| counts[stream.below(6) as usize] += 1);
    assert!(counts.iter().all(|count| (9_600..10_400).contains(count)), "{counts:?}");
}

proptest! {
    /// The numbers at places are those of the sequence, whichever way they are computed.
    #[test]
    fn numbers_at_places_are_those_of_the_sequence(seed: u64, mut places in prop::collection::vec(0i64..5000, 1..40)) {
        let mut stream = Stream::new(seed, &["places".into()]);
        let sequence: Vec<i32> = (0..5000).map(|_| stream.bits32() as i32).collect();
        let stream = Stream::new(seed, &["places".into()]);
        let expected: Vec<i32> = places.iter().map(|place| sequence[*place as usize]).collect();
        let read = |bits: Result<Tensor>| Vec::<i32>::try_from(bits.unwrap()).unwrap();
        let tensor = Tensor::from_slice(&places);
        prop_assert_eq!(read(stream.bits_at(&tensor)), expected.clone());
        prop_assert_eq!(read(stream.bits_at_device(&tensor)), expected);
        // And beyond 32 bits of blocks.
        for place in &mut places {
            *place += 1 << 36;
        }
        let tensor = Tensor::from_slice(&places);
        prop_assert_eq!(read(stream.bits_at(&tensor)), read(stream.bits_at_device(&tensor)));
    }

    #[test]
    fn a_longer_draw_begins_like_a_shorter_one(seed: u64, short in 0usize..40, more in 0usize..40) {
        let long = Stream::new(seed, &[]).normals(short + more);
        prop_assert_eq!(&Stream::new(seed, &[]).normals(short)[..], &long[..short]);
    }

    #[test]
    fn uniform_numbers_stay_below_one(seed: u64, word: u64) {
        let mut stream = Stream::new(seed, &[word.into()]);
        prop_assert!(stream.uniforms(64).iter().all(|u| (0.0..1.0).contains(u)));
    }

    #[test]
    fn a_permutation_has_every_index_once(seed: u64, count in 0usize..200) {
        let mut order = Stream::new(seed, &[]).permutation(count);
        order.sort_unstable();
        prop_assert!(order.into_iter().eq(0..count));
    }
}

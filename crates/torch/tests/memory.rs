//! The pool of host tensors, in a process of its own.

use tch::{Device, Kind, Tensor};
use torch::memory::{most_pooled, peak, pool, recorded};

const MIB: i64 = 1 << 20;

fn filled(mib: i64, value: i64) -> Tensor {
    Tensor::full([mib * MIB], value, (Kind::Uint8, Device::Cpu))
}

#[test]
fn the_pool_holds_no_more_than_was_in_use_at_once() {
    pool();
    let before = peak(Device::Cpu).unwrap().unwrap();
    // Sizes that no earlier block fits: a pool that kept them all would hold 620 MiB.
    for round in 1..=30 {
        let held: Vec<Tensor> = (0..2).map(|at| filled(5 + round, round + at)).collect();
        let elsewhere = std::thread::spawn(move || held.iter().map(|x| x.max().int64_value(&[])).sum::<i64>());
        assert_eq!(elsewhere.join().unwrap(), 2 * round + 1, "and nobody else writes to them");
    }
    let most = most_pooled();
    assert!((70 * MIB as u64..72 * MIB as u64).contains(&most), "{most}");
    let grown = peak(Device::Cpu).unwrap().unwrap() - before;
    assert!(grown < most + most / 16 + (8 << 20), "{grown} bytes more for {most}");

    let (sum, events) = recorded(|| {
        let (small, large) = (filled(0, 0), filled(3, 1));
        drop(filled(40, 2));
        small.numel() as i64 + large.numel() as i64
    });
    assert_eq!(sum, 3 * MIB);
    assert_eq!(events.iter().sum::<i64>(), 0, "all has gone: {events:?}");
    assert_eq!(events.iter().filter(|bytes| **bytes >= 40 * MIB).count(), 1);

    // More than any machine can address; then what was kept is of use again.
    let error = torch::Error::from(Tensor::f_zeros([1 << 50], (Kind::Float, Device::Cpu)).unwrap_err());
    let text = error.to_string();
    let told = "out of memory: can't allocate memory: you tried to allocate 4503599627370496 bytes";
    assert!(matches!(error, torch::Error::OutOfMemory(_)) && text.starts_with(told), "{text}");
    assert_eq!(filled(50, 7).min().int64_value(&[]), 7);
    assert_eq!(most_pooled(), most, "what could not be had does not count");
}

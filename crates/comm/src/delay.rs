//! Random pauses before calls between ranks, for tests that no result depends on who comes when. A run has none: only
//! [`testing`](crate::testing) asks for them.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

thread_local! {
    /// Seed and longest pause for ranks that join on this thread.
    static ASKED: Cell<Option<(u64, Duration)>> = const { Cell::new(None) };
}

/// Ranks that join during `body` on this thread pause before half of their calls, for up to `longest`.
pub(crate) fn during<T>(seed: u64, longest: Duration, body: impl FnOnce() -> T) -> T {
    ASKED.set(Some((seed, longest)));
    let given = body();
    ASKED.set(None);
    given
}

/// The pauses of one rank.
#[derive(Debug, Default)]
pub(crate) struct Delays(Option<Mutex<Drawn>>);

#[derive(Debug)]
struct Drawn {
    state: u64,
    longest: Duration,
}

impl Delays {
    /// Those that this thread asks of `rank`, if any.
    pub(crate) fn asked(rank: usize) -> Self {
        let drawn = |(seed, longest): (u64, Duration)| {
            let state = seed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(rank as u64);
            Mutex::new(Drawn { state, longest })
        };
        Self(ASKED.get().map(drawn))
    }

    /// Whether there are any.
    pub(crate) fn are_asked(&self) -> bool {
        self.0.is_some()
    }

    /// Waits for the time drawn for the next call.
    pub(crate) fn pause(&self) {
        let pause = self.0.as_ref().map(|drawn| drawn.lock().unwrap_or_else(PoisonError::into_inner).next());
        if let Some(pause) = pause.filter(|pause| !pause.is_zero()) {
            thread::sleep(pause);
        }
    }
}

impl Drawn {
    /// Zero as often as not.
    fn next(&mut self) -> Duration {
        // SplitMix64 (Steele et al. 2014).
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let bits = mixed ^ (mixed >> 31);
        if bits & 1 == 0 {
            return Duration::ZERO;
        }
        self.longest.mul_f64((bits >> 11) as f64 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(seed: u64, rank: usize) -> Vec<Duration> {
        let delays = during(seed, Duration::from_millis(5), || Delays::asked(rank));
        let mut drawn = delays.0.unwrap().into_inner().unwrap();
        (0..100).map(|_| drawn.next()).collect()
    }

    #[test]
    fn pauses_are_those_of_seed_and_rank_and_of_nobody_who_does_not_ask() {
        assert_eq!(drawn(1, 0), drawn(1, 0));
        assert!(drawn(1, 0) != drawn(1, 1) && drawn(1, 0) != drawn(2, 0));
        let none = drawn(1, 0).iter().filter(|pause| pause.is_zero()).count();
        assert!((30..70).contains(&none), "{none}");
        assert!(drawn(1, 0).iter().all(|pause| *pause < Duration::from_millis(5)));
        assert!(Delays::asked(0).0.is_none());
    }
}

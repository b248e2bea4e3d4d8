//! Ranks as threads of one process, each with its own connections: the same code as ranks that are processes.

use std::thread;
use std::time::Duration;

use spec::{Launch, Meeting};
use torch::distributed::Store;

use crate::{World, delay};

/// Runs `body` on `count` ranks at once and returns what each gave, by rank. A panic of one is a panic here.
pub fn ranks<T: Send>(count: usize, timeout: Duration, body: impl Fn(&World) -> T + Sync) -> Vec<T> {
    launches(count, |launch| {
        let world = World::join(launch, timeout, tch::Device::Cpu).expect("the ranks meet");
        body(&world)
    })
}

/// As [`launches`], ranks that pause before half of their calls for a random time below `longest`: the same one for the same
/// `seed`. What one sends another waits for it the first time, as between GPUs.
pub fn delayed<T: Send>(count: usize, seed: u64, longest: Duration, body: impl Fn(&Launch) -> T + Sync) -> Vec<T> {
    launches(count, |launch| delay::during(seed, longest, || body(launch)))
}

/// As [`ranks`], for programs that join by themselves.
pub fn launches<T: Send>(count: usize, body: impl Fn(&Launch) -> T + Sync) -> Vec<T> {
    let (_store, port) = Store::serve(0, Duration::from_mins(1)).expect("a port of this host");
    let body = &body;
    thread::scope(|scope| {
        let start = |rank| {
            let meeting = Meeting { host: "127.0.0.1".to_owned(), port, served: true, prefix: String::new() };
            let launch = Launch { rank, world: count, local_rank: rank, local_world: count, meeting: Some(meeting) };
            scope.spawn(move || body(&launch))
        };
        let running: Vec<_> = (0..count).map(start).collect();
        running.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

//! What stages that run at the same time share: CPU threads and devices. Knows no stage but by what it asks for.

use std::collections::BTreeSet;

use crate::workspace::Threads;

/// What is free.
#[derive(Debug)]
pub(crate) struct Pool {
    threads: usize,
    jobs: usize,
    devices: BTreeSet<String>,
    running: usize,
    all: usize,
}

/// What a running stage holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// CPU threads.
    pub(crate) threads: usize,
    device: Option<String>,
}

impl Pool {
    /// `threads` CPU threads, and at most `jobs` stages at once.
    pub(crate) fn new(threads: usize, jobs: usize) -> Self {
        Self { threads, jobs: jobs.max(1), devices: BTreeSet::new(), running: 0, all: threads }
    }

    /// A share for a stage while `ready` stages, this one included, could start. `None`: it must wait.
    ///
    /// An accelerator is one stage's alone. Threads that nobody asked for by number are divided among the stages that are
    /// ready. A stage that runs alone always gets its share, even if it asked for more than there is.
    pub(crate) fn take(&mut self, threads: Threads, device: &str, ready: usize) -> Option<Share> {
        let device = (device != "cpu").then(|| if device == "cuda" { "cuda:0" } else { device }.to_owned());
        let taken = device.as_ref().is_some_and(|device| self.devices.contains(device));
        if self.running >= self.jobs || taken {
            return None;
        }
        let threads = match threads {
            Threads::Asked(asked) if asked <= self.threads || self.running == 0 => asked,
            Threads::Share if self.threads > 0 => (self.threads / ready.max(1)).max(1),
            Threads::Share if self.running == 0 => self.all.max(1),
            Threads::Asked(_) | Threads::Share => return None,
        };
        self.threads = self.threads.saturating_sub(threads);
        self.devices.extend(device.clone());
        self.running += 1;
        Some(Share { threads, device })
    }

    /// Takes a share back.
    pub(crate) fn give(&mut self, share: &Share) {
        self.running -= 1;
        self.threads = (self.threads + share.threads).min(self.all);
        if let Some(device) = &share.device {
            self.devices.remove(device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_divided_among_those_who_are_ready() {
        let mut pool = Pool::new(8, 99);
        let first = pool.take(Threads::Share, "cpu", 2).unwrap();
        let second = pool.take(Threads::Share, "cpu", 1).unwrap();
        assert_eq!((first.threads, second.threads), (4, 4));
        assert_eq!(pool.take(Threads::Share, "cpu", 1), None);
        pool.give(&first);
        assert_eq!(pool.take(Threads::Asked(5), "cpu", 1), None, "more than is free");
        assert_eq!(pool.take(Threads::Asked(3), "cpu", 1).unwrap().threads, 3);
        pool.give(&second);
        assert_eq!(pool.take(Threads::Share, "cpu", 1).unwrap().threads, 5);
    }

    #[test]
    fn a_device_is_one_stage_s_alone() {
        let mut pool = Pool::new(8, 99);
        let first = pool.take(Threads::Asked(1), "cuda", 2).unwrap();
        assert_eq!(pool.take(Threads::Asked(1), "cuda:0", 2), None);
        assert!(pool.take(Threads::Asked(1), "cuda:1", 2).is_some());
        pool.give(&first);
        assert!(pool.take(Threads::Asked(1), "cuda:0", 2).is_some());
    }

    #[test]
    fn who_asks_for_more_than_there_is_runs_alone() {
        let mut pool = Pool::new(2, 99);
        let alone = pool.take(Threads::Asked(64), "cpu", 3).unwrap();
        assert_eq!(pool.take(Threads::Share, "cpu", 2), None);
        pool.give(&alone);
        assert_eq!(pool.take(Threads::Share, "cpu", 1).unwrap().threads, 2);
    }

    #[test]
    fn no_more_jobs_than_allowed() {
        let mut pool = Pool::new(8, 1);
        let one = pool.take(Threads::Asked(1), "cpu", 2).unwrap();
        assert_eq!(pool.take(Threads::Asked(1), "cpu", 2), None);
        pool.give(&one);
        assert!(pool.take(Threads::Asked(1), "cpu", 2).is_some());
    }
}

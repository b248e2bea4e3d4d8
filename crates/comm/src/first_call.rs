//! How the connections between GPUs come about, for tests on the host: the first call of a rank to another, in each direction, waits
//! until the other makes its own, as NCCL's does. Ranks whose first calls wait for each other in a circle never go on.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use torch::distributed::Store;

/// The first calls of one member of a group.
#[derive(Debug)]
pub(crate) struct FirstCalls {
    timeout: Duration,
    /// Where they meet; and those made: other members, and whether the one of the two that comes first in the group sends.
    made: Mutex<(Store, BTreeSet<(usize, bool)>)>,
}

impl FirstCalls {
    pub(crate) fn new(store: Store, timeout: Duration) -> Self {
        Self { timeout, made: Mutex::new((store, BTreeSet::new())) }
    }

    /// Before member `own` sends to `other`, or receives from it.
    pub(crate) fn before(&self, own: usize, other: usize, sends: bool) -> torch::Result<()> {
        let up = (own < other) == sends;
        let (store, made) = &mut *self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if !made.insert((other, up)) {
            return Ok(());
        }
        let key = |from: usize, to: usize| format!("{from} to {to}, up: {up}");
        store.set(&key(own, other), &[1])?;
        store.wait(&key(other, own), self.timeout)
    }
}

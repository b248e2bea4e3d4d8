//! What a rank asked of the others, for tests of schedules: which calls, in which groups, of how much.

use std::sync::{Mutex, PoisonError};

/// One call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `all_gather`, `send` ...
    pub name: &'static str,
    /// Members of the group.
    pub members: usize,
    /// Bytes of this rank's input; of what it receives, for `receive`.
    pub bytes: usize,
}

/// The calls of a rank, in order, while they are recorded.
#[derive(Debug, Default)]
pub struct Trace(Mutex<Option<Vec<Call>>>);

impl Trace {
    /// Records from now on.
    pub fn begin(&self) {
        *self.lock() = Some(Vec::new());
    }

    /// What was recorded; records no more.
    pub fn end(&self) -> Vec<Call> {
        self.lock().take().unwrap_or_default()
    }

    pub(crate) fn note(&self, name: &'static str, members: usize, bytes: usize) {
        if let Some(calls) = self.lock().as_mut() {
            calls.push(Call { name, members, bytes });
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Vec<Call>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

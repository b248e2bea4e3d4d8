//! Failures between ranks inside forward and backward, which pass only a text on.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;

/// The first of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trouble(Arc<Mutex<Option<Error>>>);

impl Trouble {
    /// Keeps a failure and gives its text.
    pub(crate) fn note(&self, error: Error) -> String {
        let text = error.to_string();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        text
    }

    /// Keeps a failure and gives the error of a layer.
    pub(crate) fn layer(&self, error: Error) -> nn::Error {
        nn::Error::Invalid(self.note(error))
    }

    /// What was kept.
    pub(crate) fn take(&self) -> Option<Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

//! A tensor that several threads may read.

use std::fmt;
use std::ops::Deref;

use tch::Tensor;

/// A parameter or constant that layers hold. `tch::Tensor` is `Send` but not `Sync`; layers must be both, since backward
/// nodes run on libtorch's threads.
pub struct Shared(Tensor);

// SAFETY: at::Tensor's reference count is atomic and libtorch's operators may read one tensor from several threads. What
// is left (writing while another thread reads) is possible with `Send` and `shallow_clone` alone, and as there it is
// up to whoever writes: parameters are written between steps only.
unsafe impl Sync for Shared {}

impl Shared {
    /// Another handle of the same storage and the same autograd leaf.
    pub fn handle(&self) -> Tensor {
        self.0.shallow_clone()
    }
}

impl From<Tensor> for Shared {
    fn from(tensor: Tensor) -> Self {
        Self(tensor)
    }
}

impl Deref for Shared {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} on {:?}", self.0.kind(), self.0.size(), self.0.device())
    }
}

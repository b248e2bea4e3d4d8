//! libtorch's process groups: a TCP store to meet at, and collectives that run in the background, over Gloo between CPUs and
//! over NCCL between GPUs.
//!
//! Thin and checked: tensors are contiguous, sizes fit, errors carry libtorch's words. Who belongs to which group, and
//! what a failure means, is known one crate up.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::Duration;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi::{self, COpaque};

macro_rules! owned {
    ($(#[$doc:meta])* $name:ident, $free:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(NonNull<COpaque>);

        // SAFETY: a counted reference with an atomic count; libtorch uses these objects from threads of its own.
        unsafe impl Send for $name {}

        impl $name {
            fn made(pointer: *mut COpaque) -> Result<Self> {
                NonNull::new(pointer).map(Self).ok_or_else(|| Error::of_libtorch(&ffi::failure()))
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the shim, owned by this value alone.
                unsafe { ffi::$free(self.0.as_ptr()) }
            }
        }
    };
}

owned! {
    /// A key-value store that all ranks reach; small things only.
    Store, shim_store_free
}
owned! {
    /// Ranks that act together. Calls must come in the same order on all of them.
    Group, shim_group_free
}
owned! {
    /// A collective under way. It keeps its tensors alive; their contents are settled after [`Work::wait`].
    Work, shim_work_free
}

/// How values of ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// The sum.
    Sum = 0,
    /// The greatest.
    Max = 1,
    /// The least.
    Min = 2,
}

impl Store {
    /// Serves a store on `port` (0: any free one) of this host, and is its first client. Also says where it listens.
    pub fn serve(port: u16, timeout: Duration) -> Result<(Self, u16)> {
        let store = Self::tcp("127.0.0.1", port, true, timeout)?;
        // SAFETY: `tcp` made it, so it is a TCP store.
        let port = unsafe { ffi::shim_store_port(store.0.as_ptr()) };
        Ok((store, port as u16))
    }

    /// Reaches the store on `host`, waiting for it to appear.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::tcp(host, port, false, timeout)
    }

    fn tcp(host: &str, port: u16, server: bool, timeout: Duration) -> Result<Self> {
        let host = ffi::c_string(host);
        // SAFETY: a NUL-terminated text that outlives the call.
        Self::made(unsafe { ffi::shim_store_tcp(host.as_ptr(), port, c_int::from(server), 0, milliseconds(timeout)) })
    }

    /// A view in which every key starts with `prefix`.
    pub fn prefixed(&self, prefix: &str) -> Result<Self> {
        let prefix = ffi::c_string(prefix);
        // SAFETY: a live store and a NUL-terminated text; the view holds its own reference to the store.
        Self::made(unsafe { ffi::shim_store_prefix(self.0.as_ptr(), prefix.as_ptr()) })
    }

    /// Sets a key.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = ffi::c_string(key);
        // SAFETY: a live store, a NUL-terminated text, and as many bytes as said.
        ffi::status(unsafe { ffi::shim_store_set(self.0.as_ptr(), key.as_ptr(), value.as_ptr(), value.len()) })?;
        Ok(())
    }

    /// Waits for a key to be set.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<()> {
        let key = ffi::c_string(key);
        // SAFETY: a live store and a NUL-terminated text.
        ffi::status(unsafe { ffi::shim_store_wait(self.0.as_ptr(), key.as_ptr(), milliseconds(timeout)) })?;
        Ok(())
    }

    /// A key's value, waiting for it; at most 64 KiB of it.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let (key, mut bytes) = (ffi::c_string(key), vec![0; 1 << 16]);
        // SAFETY: a live store, a NUL-terminated text, and as much room as said.
        let length = ffi::status(unsafe {
            ffi::shim_store_get(self.0.as_ptr(), key.as_ptr(), bytes.as_mut_ptr(), bytes.len())
        })?;
        bytes.truncate(usize::try_from(length).unwrap_or(0));
        Ok(bytes)
    }

    /// Adds to a counter and returns its new value.
    pub fn add(&self, key: &str, by: i64) -> Result<i64> {
        let key = ffi::c_string(key);
        // SAFETY: a live store and a NUL-terminated text.
        ffi::status(unsafe { ffi::shim_store_add(self.0.as_ptr(), key.as_ptr(), by) })
    }
}

impl Group {
    /// Joins a group over Gloo as number `index` of `size`; the members meet in `store`, and the others reach this host at
    /// `address`. Every collective fails after `timeout`.
    pub fn gloo(store: &Store, index: usize, size: usize, address: &str, timeout: Duration) -> Result<Self> {
        let address = ffi::c_string(address);
        // SAFETY: a live store and a NUL-terminated text; the group holds its own reference to the store.
        Self::made(unsafe {
            ffi::shim_group_gloo(
                store.0.as_ptr(),
                index as c_int,
                size as c_int,
                address.as_ptr(),
                milliseconds(timeout),
            )
        })
    }

    /// From now on tensors on GPUs go over NCCL. All members must call it, with a `store` of its own; `load_nccl` comes first.
    pub fn add_nccl(&self, store: &Store, index: usize, size: usize, timeout: Duration) -> Result<()> {
        // SAFETY: a live group and store; NCCL's group holds its own reference to the store.
        ffi::status(unsafe {
            ffi::shim_group_add_nccl(
                self.0.as_ptr(),
                store.0.as_ptr(),
                index as c_int,
                size as c_int,
                milliseconds(timeout),
            )
        })?;
        Ok(())
    }

    /// `tensor` becomes the reduction of all members' tensors, which have one shape and kind.
    pub fn all_reduce(&self, tensor: &Tensor, reduction: Reduction) -> Result<Work> {
        contiguous(tensor)?;
        // SAFETY: a live group and tensor; the work holds its own references.
        Work::made(unsafe { ffi::shim_all_reduce(self.0.as_ptr(), ffi::handle(tensor), reduction as c_int) })
    }

    /// `tensor` becomes that of member `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        contiguous(tensor)?;
        // SAFETY: as in `all_reduce`.
        Work::made(unsafe { ffi::shim_broadcast(self.0.as_ptr(), ffi::handle(tensor), root as c_int) })
    }

    /// `output` becomes all members' inputs, one after the other.
    pub fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        contiguous(output)?;
        contiguous(input)?;
        // SAFETY: as in `all_reduce`.
        Work::made(unsafe { ffi::shim_all_gather(self.0.as_ptr(), ffi::handle(output), ffi::handle(input)) })
    }

    /// `output` becomes this member's share of the sum of all inputs.
    pub fn reduce_scatter(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        contiguous(output)?;
        contiguous(input)?;
        // SAFETY: as in `all_reduce`.
        Work::made(unsafe { ffi::shim_reduce_scatter(self.0.as_ptr(), ffi::handle(output), ffi::handle(input)) })
    }

    /// Row ranges of `input` go to the members, `sent[i]` rows to member i; `output` collects what comes, `received[i]`
    /// rows from member i.
    pub fn all_to_all(&self, output: &Tensor, input: &Tensor, received: &[i64], sent: &[i64]) -> Result<Work> {
        contiguous(output)?;
        contiguous(input)?;
        if received.len() != sent.len() {
            return Err(Error::Count { what: "row counts", found: sent.len(), expected: received.len() });
        }
        // SAFETY: as in `all_reduce`; two arrays of as many numbers as said, copied before the call returns.
        Work::made(unsafe {
            ffi::shim_all_to_all(
                self.0.as_ptr(),
                ffi::handle(output),
                ffi::handle(input),
                received.as_ptr(),
                sent.as_ptr(),
                sent.len(),
            )
        })
    }

    /// `tensor` goes to member `to`, which [receives](Self::receive) it; calls between two members come in one order.
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<Work> {
        contiguous(tensor)?;
        // SAFETY: as in `all_reduce`.
        Work::made(unsafe { ffi::shim_send(self.0.as_ptr(), ffi::handle(tensor), to as c_int) })
    }

    /// `tensor` becomes what member `from` sends.
    pub fn receive(&self, tensor: &Tensor, from: usize) -> Result<Work> {
        contiguous(tensor)?;
        // SAFETY: as in `all_reduce`.
        Work::made(unsafe { ffi::shim_receive(self.0.as_ptr(), ffi::handle(tensor), from as c_int) })
    }

    /// Completes when every member has come.
    pub fn barrier(&self) -> Result<Work> {
        // SAFETY: a live group.
        Work::made(unsafe { ffi::shim_barrier(self.0.as_ptr()) })
    }
}

impl Work {
    /// Until it is done, or `timeout`. A failed group is of no further use.
    pub fn wait(self, timeout: Duration) -> Result<()> {
        // SAFETY: a live work.
        ffi::status(unsafe { ffi::shim_work_wait(self.0.as_ptr(), milliseconds(timeout)) })?;
        Ok(())
    }
}

fn contiguous(tensor: &Tensor) -> Result<()> {
    if tensor.is_contiguous() {
        return Ok(());
    }
    Err(Error::Libtorch(format!("a collective needs a contiguous tensor, not one of strides {:?}", tensor.stride())))
}

fn milliseconds(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX).max(1)
}

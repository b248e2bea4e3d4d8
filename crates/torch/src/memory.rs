//! Peak memory of this process and of a GPU, and the pool that tensors on the host take theirs from.

use std::ffi::c_int;

use tch::Device;

use crate::error::Result;
use crate::ffi;

/// Most bytes in use so far: resident memory of this process for the CPU (`VmHWM`), bytes held by tensors for a GPU.
/// `None` where the system does not tell.
pub fn peak(device: Device) -> Result<Option<u64>> {
    let Device::Cuda(index) = device else { return Ok(peak_resident()) };
    // SAFETY: asks the allocator of a device that exists, since only `device::resolve` makes CUDA devices.
    let bytes = ffi::status(unsafe { ffi::shim_cuda_peak(index as c_int) })?;
    Ok(u64::try_from(bytes).ok())
}

/// Starts a GPU's peak afresh; the CPU's peak is the kernel's and stays.
pub fn reset_peak(device: Device) -> Result<()> {
    if let Device::Cuda(index) = device {
        // SAFETY: as in `peak`.
        ffi::status(unsafe { ffi::shim_cuda_reset_peak(index as c_int) })?;
    }
    Ok(())
}

/// Memory of tensors on the host comes from a pool from now on: freed blocks are kept for the next tensor, since a training step
/// takes and frees the same sizes over and over, but only as much as the most that was in use at once. Faster than giving pages
/// back and faulting them in again, and without the holes of the C allocator, which are a fifth of a FLUX step's memory.
pub fn pool() {
    // SAFETY: puts an allocator in place that lives as long as the process; what others gave goes back to them.
    unsafe { ffi::shim_memory_pool() }
}

/// Gives back what the [pool] keeps.
pub fn trim() {
    // SAFETY: frees what nobody has.
    unsafe { ffi::shim_memory_trim() }
}

/// Resident memory of this process now, where the system tells.
pub fn resident() -> Option<u64> {
    of_status("VmRSS:")
}

/// What of it belongs to no file: pages of programs and libraries come and go as the system likes.
pub fn anonymous() -> Option<u64> {
    of_status("RssAnon:")
}

/// Most bytes that tensors of the [pool] took at once.
pub fn most_pooled() -> u64 {
    // SAFETY: reads a number.
    u64::try_from(unsafe { ffi::shim_memory_most() }).unwrap_or(0)
}

/// What `body` gives, and what tensors of the [pool] took and gave back meanwhile, in order: bytes, negative for those that went. What
/// several threads of one operation take for themselves is left out.
pub fn recorded<T>(body: impl FnOnce() -> T) -> (T, Vec<i64>) {
    // SAFETY: begins a record of the allocator's.
    unsafe { ffi::shim_memory_record() }
    let given = body();
    let mut events = vec![0; MOST_EVENTS];
    // SAFETY: ends it; room for as many numbers as said.
    let count = unsafe { ffi::shim_memory_recorded(events.as_mut_ptr(), events.len()) };
    events.truncate(count);
    (given, events)
}

/// Of one [record](recorded): far more than a step of any model makes.
const MOST_EVENTS: usize = 1 << 20;

fn peak_resident() -> Option<u64> {
    of_status("VmHWM:")
}

/// A number of bytes of `/proc/self/status`.
fn of_status(name: &str) -> Option<u64> {
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_counts_what_was_held_even_after_it_is_gone() {
        let held = vec![1u8; 256 << 20];
        assert!(peak(Device::Cpu).unwrap().unwrap() >= u64::from(held[7]) * (256 << 20));
        drop(held);
        assert!(peak(Device::Cpu).unwrap().unwrap() >= 256 << 20);
    }
}

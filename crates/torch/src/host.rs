//! The bytes of tensors in main memory, in this machine's byte order.

use std::ffi::c_int;
use std::io;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi;

/// A new contiguous CPU tensor whose bytes `fill` writes.
pub fn filled(kind: Kind, shape: &[i64], fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> Result<io::Result<Tensor>> {
    let tensor = Tensor::f_zeros(shape, (kind, Device::Cpu))?;
    let count = length(&tensor);
    let written = if count == 0 {
        fill(&mut [])
    } else {
        // SAFETY: a contiguous CPU tensor of `count` bytes that nobody else has a handle of yet.
        fill(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), count) })
    };
    Ok(written.map(|()| tensor))
}

/// The bytes of a contiguous CPU tensor.
pub fn bytes(tensor: &Tensor) -> Result<&[u8]> {
    if tensor.device() != Device::Cpu || !tensor.is_contiguous() {
        return Err(Error::Libtorch("only contiguous tensors on the CPU show their bytes".to_owned()));
    }
    match length(tensor) {
        0 => Ok(&[]),
        // SAFETY: contiguous, on the CPU, and of `count` bytes, which live as long as the tensor.
        count => Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), count) }),
    }
}

/// A copy in page-locked memory if `device` is a GPU, from where it goes there while the CPU goes on; else the tensor itself.
pub fn pinned(tensor: &Tensor, device: Device) -> Result<Tensor> {
    if !device.is_cuda() {
        return Ok(tensor.shallow_clone());
    }
    // SAFETY: a live handle.
    ffi::made(unsafe { ffi::shim_pinned(ffi::handle(tensor)) })
}

/// The tensor on `device`. Work that is queued there later sees its values; from [`pinned`] memory nobody waits for the copy, and
/// libtorch keeps that memory until it is done.
pub fn upload(tensor: &Tensor, device: Device) -> Result<Tensor> {
    Ok(tensor.f_to_device_(device, tensor.kind(), device.is_cuda(), false)?)
}

/// As [`upload`], for what the host alone wrote: from [`pinned`] memory the copy does not wait for what the device is doing, but goes
/// on beside it, on a stream of its own.
pub fn upload_beside(tensor: &Tensor, device: Device) -> Result<Tensor> {
    match device {
        Device::Cuda(index) if tensor.device() == Device::Cpu && is_pinned(tensor)? => {
            // SAFETY: a live handle; the copy keeps the page-locked memory until it is done.
            ffi::made(unsafe { ffi::shim_upload(ffi::handle(tensor), index as c_int) })
        }
        _ => upload(tensor, device),
    }
}

fn is_pinned(tensor: &Tensor) -> Result<bool> {
    // SAFETY: a live handle.
    Ok(ffi::status(unsafe { ffi::shim_is_pinned(ffi::handle(tensor)) })? == 1)
}

fn length(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

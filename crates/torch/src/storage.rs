//! Tensors whose memory comes and goes: a parameter that is gathered before its use and given up after it.

use tch::Tensor;

use crate::error::Result;
use crate::ffi;

/// Gives up the memory of `tensor`, which stays a tensor: autograd may hold it. Reading it before [`fill`] is an access to
/// no memory.
pub fn free(tensor: &Tensor) -> Result<()> {
    resize(tensor, 0)
}

/// Bytes that the tensor's storage has.
pub fn bytes(tensor: &Tensor) -> u64 {
    // SAFETY: a live tensor with a storage; every dense tensor has one.
    u64::try_from(unsafe { ffi::shim_storage_bytes(ffi::handle(tensor)) }).unwrap_or(0)
}

/// Gives `tensor`, contiguous and alone in its storage, its memory again if it was freed, and lets `write` set the values.
/// To autograd they count as the old ones: saved tensors stay valid.
pub fn fill<E: From<crate::Error>>(tensor: &Tensor, write: impl FnOnce(&mut Tensor) -> Result<(), E>) -> Result<(), E> {
    let whole = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if bytes(tensor) < whole as u64 {
        resize(tensor, whole)?;
    }
    // SAFETY: a live tensor; the result is a tensor of its own over the same storage.
    let mut data = ffi::made(unsafe { ffi::shim_variable_data(ffi::handle(tensor)) })?;
    write(&mut data)
}

fn resize(tensor: &Tensor, bytes: usize) -> Result<()> {
    // SAFETY: a live tensor. Other tensors over the same storage see the change as well; the callers own it alone.
    ffi::status(unsafe { ffi::shim_storage_resize(ffi::handle(tensor), bytes) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn memory_may_go_between_forward_and_backward() {
        let weight = Tensor::from_slice(&[2f32, 3.0]).set_requires_grad(true);
        let x = Tensor::from_slice(&[5f32, 7.0]).set_requires_grad(true);
        let y = (&weight * &x).sum(Kind::Float);
        free(&weight).unwrap();
        assert_eq!(bytes(&weight), 0);
        fill(&weight, |data| data.f_copy_(&Tensor::from_slice(&[2f32, 3.0])).map_err(crate::Error::from)).unwrap();
        y.backward();
        assert_eq!(Vec::<f32>::try_from(x.grad()).unwrap(), [2.0, 3.0]);
        assert_eq!(Vec::<f32>::try_from(weight.grad()).unwrap(), [5.0, 7.0]);
    }

    #[test]
    fn a_tensor_may_have_no_elements() {
        let empty = Tensor::zeros([0], (Kind::Float, Device::Cpu));
        free(&empty).unwrap();
        fill(&empty, |_| Ok::<_, crate::Error>(())).unwrap();
    }
}

//! The shim's C interface (`cc/`) and the conversions at its border.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{Error, Result};

pub(crate) type Handle = *mut C_tensor;

/// A boxed Rust function as C++ holds it; see `Closure` in `cc/autograd.cc`.
#[repr(C)]
pub(crate) struct Closure {
    pub(crate) call: unsafe extern "C" fn(*mut c_void, *const Handle, usize, *mut Handle, usize) -> c_int,
    pub(crate) drop: unsafe extern "C" fn(*mut c_void),
    pub(crate) data: *mut c_void,
}

/// An object that C++ knows and Rust only points to.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct COpaque {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn shim_failure() -> *const c_char;
    fn shim_set_failure(text: *const c_char);
    pub(crate) fn shim_custom_node(
        name: *const c_char,
        inputs: *const Handle,
        n: usize,
        outputs: *const Handle,
        m: usize,
        closure: Closure,
    ) -> c_int;
    pub(crate) fn shim_backward(tensors: *const Handle, gradients: *const Handle, n: usize, keep_graph: c_int)
    -> c_int;
    pub(crate) fn shim_clear_gradients(tensors: *const Handle, n: usize) -> c_int;
    pub(crate) fn shim_gradient_hook(leaf: Handle, closure: Closure) -> c_int;
    pub(crate) fn shim_set_gradient(leaf: Handle, gradient: Handle) -> c_int;
    pub(crate) fn shim_in_backward() -> c_int;
    pub(crate) fn shim_group_norm_silu(x: Handle, groups: i64, weight: Handle, bias: Handle, eps: f64) -> Handle;
    pub(crate) fn shim_storage_resize(tensor: Handle, bytes: usize) -> c_int;
    pub(crate) fn shim_storage_bytes(tensor: Handle) -> i64;
    pub(crate) fn shim_variable_data(tensor: Handle) -> Handle;
    pub(crate) fn shim_store_tcp(
        host: *const c_char,
        port: u16,
        server: c_int,
        workers: usize,
        timeout: i64,
    ) -> *mut COpaque;
    pub(crate) fn shim_store_port(store: *mut COpaque) -> c_int;
    pub(crate) fn shim_store_prefix(store: *mut COpaque, prefix: *const c_char) -> *mut COpaque;
    pub(crate) fn shim_store_set(store: *mut COpaque, key: *const c_char, bytes: *const u8, count: usize) -> c_int;
    pub(crate) fn shim_store_get(store: *mut COpaque, key: *const c_char, bytes: *mut u8, room: usize) -> i64;
    pub(crate) fn shim_store_wait(store: *mut COpaque, key: *const c_char, timeout: i64) -> c_int;
    pub(crate) fn shim_store_add(store: *mut COpaque, key: *const c_char, by: i64) -> i64;
    pub(crate) fn shim_store_free(store: *mut COpaque);
    pub(crate) fn shim_group_gloo(
        store: *mut COpaque,
        rank: c_int,
        size: c_int,
        address: *const c_char,
        timeout: i64,
    ) -> *mut COpaque;
    pub(crate) fn shim_group_add_nccl(
        group: *mut COpaque,
        store: *mut COpaque,
        rank: c_int,
        size: c_int,
        timeout: i64,
    ) -> c_int;
    pub(crate) fn shim_group_free(group: *mut COpaque);
    pub(crate) fn shim_all_reduce(group: *mut COpaque, tensor: Handle, kind: c_int) -> *mut COpaque;
    pub(crate) fn shim_broadcast(group: *mut COpaque, tensor: Handle, root: c_int) -> *mut COpaque;
    pub(crate) fn shim_all_gather(group: *mut COpaque, output: Handle, input: Handle) -> *mut COpaque;
    pub(crate) fn shim_reduce_scatter(group: *mut COpaque, output: Handle, input: Handle) -> *mut COpaque;
    pub(crate) fn shim_all_to_all(
        group: *mut COpaque,
        output: Handle,
        input: Handle,
        received: *const i64,
        sent: *const i64,
        n: usize,
    ) -> *mut COpaque;
    pub(crate) fn shim_send(group: *mut COpaque, tensor: Handle, to: c_int) -> *mut COpaque;
    pub(crate) fn shim_receive(group: *mut COpaque, tensor: Handle, from: c_int) -> *mut COpaque;
    pub(crate) fn shim_barrier(group: *mut COpaque) -> *mut COpaque;
    pub(crate) fn shim_work_wait(work: *mut COpaque, timeout: i64) -> c_int;
    pub(crate) fn shim_work_free(work: *mut COpaque);
    pub(crate) fn shim_fused_adamw(
        parameters: *const Handle,
        gradients: *const Handle,
        means: *const Handle,
        variances: *const Handle,
        steps: *const Handle,
        n: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
    ) -> c_int;
    pub(crate) fn shim_attention(q: Handle, k: Handle, v: Handle, result: *mut Handle) -> c_int;
    pub(crate) fn shim_attention_backward(
        gradient: Handle,
        q: Handle,
        k: Handle,
        v: Handle,
        out: Handle,
        lse: Handle,
        result: *mut Handle,
    ) -> c_int;
    pub(crate) fn shim_norms(tensors: *const Handle, n: usize) -> Handle;
    pub(crate) fn shim_scale(tensors: *const Handle, n: usize, factor: Handle) -> c_int;
    pub(crate) fn shim_randn(seed: u64, shape: *const i64, n: usize, bf16: c_int) -> Handle;
    pub(crate) fn shim_load(path: *const c_char) -> c_int;
    pub(crate) fn shim_deterministic(on: c_int) -> c_int;
    pub(crate) fn shim_forbid_tf32() -> c_int;
    pub(crate) fn shim_memory_pool();
    pub(crate) fn shim_memory_trim();
    pub(crate) fn shim_memory_most() -> i64;
    pub(crate) fn shim_memory_record();
    pub(crate) fn shim_memory_recorded(events: *mut i64, room: usize) -> usize;
    pub(crate) fn shim_cuda_use(device: c_int) -> c_int;
    pub(crate) fn shim_pinned(tensor: Handle) -> Handle;
    pub(crate) fn shim_is_pinned(tensor: Handle) -> c_int;
    pub(crate) fn shim_upload(host: Handle, index: c_int) -> Handle;
    pub(crate) fn shim_cuda_peak(device: c_int) -> i64;
    pub(crate) fn shim_cuda_reset_peak(device: c_int) -> c_int;
}

pub(crate) fn handle(tensor: &Tensor) -> Handle {
    tensor.as_ptr().cast_mut()
}

pub(crate) fn handles(tensors: &[Tensor]) -> Vec<Handle> {
    tensors.iter().map(handle).collect()
}

pub(crate) fn failure() -> String {
    // SAFETY: the shim returns this thread's own NUL-terminated text, which lives until its next failure.
    unsafe { CStr::from_ptr(shim_failure()) }.to_string_lossy().into_owned()
}

pub(crate) fn set_failure(text: &str) {
    let text = c_string(text);
    // SAFETY: the shim copies the text.
    unsafe { shim_set_failure(text.as_ptr()) }
}

/// The status of a call that fails with a negative number.
pub(crate) fn status<T: PartialOrd + Default>(status: T) -> Result<T> {
    if status < T::default() { Err(Error::of_libtorch(&failure())) } else { Ok(status) }
}

/// The tensor of a call that fails with null.
pub(crate) fn made(handle: Handle) -> Result<Tensor> {
    if handle.is_null() {
        return Err(Error::of_libtorch(&failure()));
    }
    // SAFETY: the shim hands over a heap-held at::Tensor that nothing else owns.
    Ok(unsafe { Tensor::from_ptr(handle) })
}

/// Gives the heap-held at::Tensor away.
pub(crate) fn released(tensor: Tensor) -> Handle {
    let handle = handle(&tensor);
    std::mem::forget(tensor);
    handle
}

/// Interior NULs, which no path, name or message of ours has, become spaces.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

//! Backward from several tensors, and graph nodes whose backward is a Rust function.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi::{self, Closure, Handle};

/// Any failure of a backward function.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// From the gradients of the outputs (`None` where none came) to those of the inputs (`None` where none is due).
type Backward = Box<dyn FnMut(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, BoxError> + Send>;

/// Accumulates gradients into the leaves that `tensors` depend on. `gradients` has one entry per tensor, or is empty
/// when all of them are scalars (each then counts 1).
pub fn backward(tensors: &[Tensor], gradients: &[Tensor], keep_graph: bool) -> Result<()> {
    if !gradients.is_empty() && gradients.len() != tensors.len() {
        return Err(Error::Count { what: "gradients for backward", found: gradients.len(), expected: tensors.len() });
    }
    let roots = ffi::handles(tensors);
    let seeds = if gradients.is_empty() { vec![std::ptr::null_mut(); roots.len()] } else { ffi::handles(gradients) };
    // SAFETY: both arrays hold `n` handles that outlive the call; null gradients are allowed.
    ffi::status(unsafe { ffi::shim_backward(roots.as_ptr(), seeds.as_ptr(), roots.len(), c_int::from(keep_graph)) })?;
    Ok(())
}

/// Removes the gradients, so that a leaf which the next backward does not reach has none (zeros would still decay it).
pub fn clear_gradients(tensors: &[Tensor]) -> Result<()> {
    let handles = ffi::handles(tensors);
    // SAFETY: an array of `n` live handles.
    ffi::status(unsafe { ffi::shim_clear_gradients(handles.as_ptr(), handles.len()) })?;
    Ok(())
}

/// Joins `outputs`, computed without a graph, to `inputs`: on backward, `backward` maps the outputs' gradients to the
/// inputs'. `false` if no input requires a gradient or gradients are off, when nothing is joined.
///
/// Outputs must be tensors of their own (see [`Tensor::detach`]), never an input, and `backward` must not own them, or
/// neither is ever freed. It runs on the device's engine thread; its error or panic becomes the error of the backward call.
pub fn custom_node(
    name: &str,
    inputs: &[Tensor],
    outputs: &[Tensor],
    backward: impl FnMut(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, BoxError> + Send + 'static,
) -> Result<bool> {
    let backward: Box<Backward> = Box::new(Box::new(backward));
    let closure = Closure { call: run_backward, drop: drop_backward, data: Box::into_raw(backward).cast() };
    let (name, inputs, outputs) = (ffi::c_string(name), ffi::handles(inputs), ffi::handles(outputs));
    // SAFETY: the arrays hold as many live handles as said; the shim copies the name and owns the closure from here on.
    let joined = unsafe {
        ffi::shim_custom_node(name.as_ptr(), inputs.as_ptr(), inputs.len(), outputs.as_ptr(), outputs.len(), closure)
    };
    Ok(ffi::status(joined)? == 1)
}

/// Calls `hook` in each backward pass as soon as `leaf.grad()` holds all that this pass gives it. A leaf has one such hook;
/// a second takes its place. Its error or panic becomes the error of the backward call. It must not own the leaf.
pub fn on_gradient(
    leaf: &Tensor,
    mut hook: impl FnMut(&Tensor) -> Result<(), BoxError> + Send + 'static,
) -> Result<()> {
    let hook: Box<Backward> = Box::new(Box::new(move |leaf: &[Option<Tensor>]| {
        leaf.iter().flatten().try_for_each(&mut hook)?;
        Ok(Vec::new())
    }));
    let closure = Closure { call: run_backward, drop: drop_backward, data: Box::into_raw(hook).cast() };
    // SAFETY: a live tensor; the shim owns the closure from here on, and calls it with the leaf alone and no results.
    ffi::status(unsafe { ffi::shim_gradient_hook(ffi::handle(leaf), closure) })?;
    Ok(())
}

/// Whether this thread is inside a backward pass, as when a checkpointed block runs again.
pub fn in_backward() -> bool {
    // SAFETY: reads a number of this thread.
    unsafe { ffi::shim_in_backward() == 1 }
}

/// Makes `gradient` the gradient of `leaf`, in place of the one it may have; `None` removes it.
pub fn set_gradient(leaf: &Tensor, gradient: Option<&Tensor>) -> Result<()> {
    let gradient = gradient.map_or(std::ptr::null_mut(), ffi::handle);
    // SAFETY: a live leaf, and a live tensor or null.
    ffi::status(unsafe { ffi::shim_set_gradient(ffi::handle(leaf), gradient) })?;
    Ok(())
}

unsafe extern "C" fn run_backward(
    data: *mut c_void,
    given: *const Handle,
    n: usize,
    made: *mut Handle,
    m: usize,
) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `data` is the box made in `custom_node`, used by one backward at a time and not yet dropped.
        let backward = unsafe { &mut *data.cast::<Backward>() };
        // SAFETY: the engine passes `n` handles, null or alive during this call.
        let given = unsafe { std::slice::from_raw_parts(given, n) };
        let gradients: Vec<_> = given
            .iter()
            // SAFETY: not null, hence alive; the clone owns its own reference.
            .map(|&handle| (!handle.is_null()).then(|| unsafe { Tensor::clone_from_ptr(handle) }))
            .collect();
        let results = backward(&gradients)?;
        if results.len() != m {
            return Err(Error::Count { what: "gradients from backward", found: results.len(), expected: m }.into());
        }
        Ok::<_, BoxError>(results)
    }));
    let failure = match outcome {
        Ok(Ok(results)) => {
            for (i, result) in results.into_iter().enumerate() {
                if let Some(gradient) = result {
                    // SAFETY: `made` has room for `m` handles and i < m; the shim takes ownership.
                    unsafe { *made.add(i) = ffi::released(gradient) }
                }
            }
            return 0;
        }
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("panic in backward: {}", panic_text(panic.as_ref())),
    };
    ffi::set_failure(&failure);
    -1
}

unsafe extern "C" fn drop_backward(data: *mut c_void) {
    // SAFETY: the shim calls this once, for the box made in `custom_node`.
    let backward = unsafe { Box::from_raw(data.cast::<Backward>()) };
    // A destructor that panics must not unwind into C++; there is nobody to tell.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(backward)));
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

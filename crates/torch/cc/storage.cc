// A tensor whose memory comes and goes while autograd keeps the tensor.
#include "shim.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

extern "C" {

// Gives the storage `bytes` bytes, through its own allocator. What they hold is undefined.
int shim_storage_resize(Handle tensor, size_t bytes) {
  return shim::guarded(-1, [&] {
    c10::StorageImpl* storage = tensor->storage().unsafeGetStorageImpl();
    TORCH_CHECK(storage->allocator(), "a storage without an allocator cannot be resized");
    // The allocator of GPUs gives memory of this thread's current one, whichever the tensor is of.
    c10::OptionalDeviceGuard guard;
    if (tensor->is_cuda()) guard.reset_device(tensor->device());
    storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
    storage->set_nbytes(bytes);
    return 0;
  });
}
int64_t shim_storage_bytes(Handle tensor) { return static_cast<int64_t>(tensor->storage().nbytes()); }

// The same memory under a version counter of its own: writing through it does not make saved tensors stale.
Handle shim_variable_data(Handle tensor) {
  return shim::guarded<Handle>(nullptr, [&] { return new at::Tensor(tensor->variable_data()); });
}
}

// Copies to a GPU beside what it computes.
#include "shim.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>

namespace {
// One for each device and thread.
c10::Stream copies(const c10::impl::VirtualGuardImpl& gpu, c10::Device device) {
  static thread_local std::map<c10::DeviceIndex, c10::Stream> streams;
  return streams.try_emplace(device.index(), gpu.getStreamFromGlobalPool(device)).first->second;
}
}  // namespace

extern "C" {

// A copy in page-locked memory. Of the accelerator that there is: naming one is an old way, of which libtorch warns each time.
Handle shim_pinned(Handle tensor) {
  return shim::guarded<Handle>(nullptr, [&] { return new at::Tensor(tensor->pin_memory()); });
}
int shim_is_pinned(Handle tensor) {
  return shim::guarded(-1, [&] { return tensor->is_pinned() ? 1 : 0; });
}

// `host` lies in page-locked memory and is complete: its copy begins at once, on a stream of its own. What is computed from now on
// waits for it, and its memory waits for what was computed with it.
Handle shim_upload(Handle host, int index) {
  return shim::guarded<Handle>(nullptr, [&] {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    const c10::impl::VirtualGuardImpl gpu(c10::kCUDA);
    const c10::Stream compute = gpu.getStream(device), copy = copies(gpu, device);
    at::Tensor there;
    c10::Event arrived(c10::kCUDA);
    {
      const c10::StreamGuard guard(copy);
      there = host->to(device, host->scalar_type(), /*non_blocking=*/true, /*copy=*/true);
      arrived.record(copy);
    }
    arrived.block(compute);
    there.record_stream(compute);
    return new at::Tensor(there);
  });
}
}

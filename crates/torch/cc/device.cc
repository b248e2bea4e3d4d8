// Process-wide state: loading CUDA, precision and determinism switches, device memory; and the last failure's text.
#include "shim.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

namespace shim {
std::string& failure() {
  static thread_local std::string text;
  return text;
}
}  // namespace shim

extern "C" {

const char* shim_failure() { return shim::failure().c_str(); }
void shim_set_failure(const char* text) { shim::failure() = text; }

// libtorch_cuda registers itself with the already loaded libtorch_cpu, so its symbols must be global.
int shim_load(const char* path) {
  return shim::guarded(-1, [&] {
    const bool loaded = dlopen(path, RTLD_NOW | RTLD_GLOBAL) != nullptr;
    if (!loaded) shim::failure() = dlerror();
    return loaded ? 0 : -1;
  });
}

int shim_deterministic(int on) {
  return shim::guarded(-1, [&] {
    at::globalContext().setDeterministicAlgorithms(on != 0, /*warn_only=*/false);
    at::globalContext().setBenchmarkCuDNN(false);
    return 0;
  });
}

// IEEE float32 in CUDA matrix products and convolutions.
int shim_forbid_tf32() {
  return shim::guarded(-1, [&] {
    at::globalContext().setAllowTF32CuBLAS(false);
    at::globalContext().setAllowTF32CuDNN(false);
    return 0;
  });
}

// From now on this thread's current CUDA device. Without it, whatever saves and restores the current one opens device 0, too.
int shim_cuda_use(int device) {
  return shim::guarded(-1, [&] {
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice({at::kCUDA, static_cast<c10::DeviceIndex>(device)});
    return 0;
  });
}

// Most bytes held by tensors on this CUDA device since the start or the last reset.
int64_t shim_cuda_peak(int device) {
  return shim::guarded<int64_t>(-1, [&] {
    const auto kind = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(device)).allocated_bytes[kind].peak;
  });
}
int shim_cuda_reset_peak(int device) {
  return shim::guarded(-1, [&] {
    c10::getDeviceAllocator(at::kCUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(device));
    return 0;
  });
}
}

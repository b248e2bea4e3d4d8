// Process groups over NCCL. A library of its own, since it needs CUDA's headers to build and libtorch_cuda.so to load: see
// scripts/build-nccl.sh. Everything after the making of a group goes through c10d::Backend, as for Gloo.
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

using Store = c10::intrusive_ptr<c10d::Store>;
using Group = c10::intrusive_ptr<c10d::Backend>;

// Null after a call of `fail`.
extern "C" Group* pipeline_group_nccl(Store* store, int rank, int size, int64_t timeout, void (*fail)(const char*)) {
  try {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = std::chrono::milliseconds(timeout);
    return new Group(c10::make_intrusive<c10d::ProcessGroupNCCL>(*store, rank, size, options));
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return nullptr;
}

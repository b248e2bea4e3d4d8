// What every file of the shim shares: the tensor handle, and exceptions turned into a status and a text.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

// A heap-held at::Tensor: what torch-sys calls C_tensor.
using Handle = at::Tensor*;

namespace shim {
// Text of this thread's last failure.
std::string& failure();

inline std::vector<at::Tensor> list(const Handle* handles, size_t count) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) tensors.push_back(handles[i] ? *handles[i] : at::Tensor());
  return tensors;
}

// Runs `body`; an exception becomes `failed` and a text for shim_failure().
template <class T, class F>
T guarded(T failed, F&& body) noexcept {
  try {
    return body();
  } catch (const c10::Error& error) {
    failure() = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure() = error.what();
  } catch (...) {
    failure() = "a C++ exception of unknown type";
  }
  return failed;
}
}  // namespace shim

#pragma once
#include <chrono>
namespace gloo {
class Context {
 public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);  // called by an inline function of ProcessGroupGloo.hpp
};
}  // namespace gloo

// A backward node whose work is a Rust closure, and the engine's entry point.
#include "shim.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace autograd = torch::autograd;
using autograd::variable_list;

extern "C" {
// Mirrors `node::Closure` in Rust. `call` gets borrowed gradients (null where none came) and writes owned handles or
// null; it returns 0, or -1 after shim_set_failure().
struct Closure {
  int (*call)(void* data, const Handle* gradients, size_t n, Handle* results, size_t m);
  void (*drop)(void* data);
  void* data;
};
}

namespace {
struct RustNode final : autograd::Node {
  RustNode(Closure closure, const char* name) : closure_(closure), name_(name) {}
  ~RustNode() override { release(); }

  std::string name() const override { return name_; }
  void release_variables() override { release(); }

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(closure_.data, name_, ": backward ran a second time, but its inputs were already freed");
    std::vector<Handle> given(gradients.size());
    for (size_t i = 0; i < given.size(); ++i) given[i] = gradients[i].defined() ? &gradients[i] : nullptr;
    std::vector<Handle> made(num_outputs(), nullptr);
    const int status = closure_.call(closure_.data, given.data(), given.size(), made.data(), made.size());
    variable_list results(made.size());
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i]) results[i] = std::move(*made[i]);
      delete made[i];
    }
    TORCH_CHECK(status == 0, name_, ": ", shim::failure());
    return results;
  }

 private:
  void release() {
    if (closure_.data) closure_.drop(closure_.data);
    closure_.data = nullptr;
  }
  Closure closure_;
  std::string name_;
};

// Runs a Rust closure when a leaf's gradient is complete for this backward.
struct RustHook final : autograd::PostAccumulateGradHook {
  explicit RustHook(Closure closure) : closure_(closure) {}
  ~RustHook() override { closure_.drop(closure_.data); }

  void operator()(const autograd::Variable& leaf) override {
    at::Tensor held = leaf;
    const Handle given = &held;
    TORCH_CHECK(closure_.call(closure_.data, &given, 1, nullptr, 0) == 0, "hook of a gradient: ", shim::failure());
  }

 private:
  Closure closure_;
};
}  // namespace

extern "C" {

// Joins outputs (computed without a graph) to inputs. Takes the closure whatever happens. 1: joined; 0: no input needs it.
int shim_custom_node(const char* name, const Handle* inputs, size_t n, const Handle* outputs, size_t m, Closure closure) {
  return shim::guarded(-1, [&] {
    std::shared_ptr<RustNode> node(new RustNode(closure, name), autograd::deleteNode);
    const variable_list sources = shim::list(inputs, n);
    if (!at::GradMode::is_enabled() || !autograd::any_variable_requires_grad(sources)) return 0;
    node->set_next_edges(autograd::collect_next_edges(sources));
    for (size_t i = 0; i < m; ++i) autograd::set_history(*outputs[i], node);
    return 1;
  });
}

// A leaf has one such hook; a second one takes its place. Takes the closure whatever happens.
int shim_gradient_hook(Handle leaf, Closure closure) {
  return shim::guarded(-1, [&] {
    auto hook = std::make_unique<RustHook>(closure);
    TORCH_CHECK(leaf->is_leaf() && leaf->requires_grad(), "only leaves that require a gradient take a hook");
    autograd::impl::set_post_acc_grad_hooks(*leaf, std::move(hook));
    return 0;
  });
}

// Whether this thread is inside a backward pass.
int shim_in_backward() { return autograd::get_current_graph_task_id() >= 0 ? 1 : 0; }

// The gradient itself, or an undefined tensor to remove it.
int shim_set_gradient(Handle leaf, Handle gradient) {
  return shim::guarded(-1, [&] {
    leaf->mutable_grad() = gradient ? *gradient : at::Tensor();
    return 0;
  });
}

// Gradients become undefined, as `zero_grad(set_to_none=True)`.
int shim_clear_gradients(const Handle* tensors, size_t n) {
  return shim::guarded(-1, [&] {
    for (size_t i = 0; i < n; ++i) tensors[i]->mutable_grad().reset();
    return 0;
  });
}

// A null gradient stands for 1 and needs a scalar tensor.
int shim_backward(const Handle* tensors, const Handle* gradients, size_t n, int keep_graph) {
  return shim::guarded(-1, [&] {
    autograd::backward(shim::list(tensors, n), shim::list(gradients, n), keep_graph != 0, /*create_graph=*/false);
    return 0;
  });
}
}

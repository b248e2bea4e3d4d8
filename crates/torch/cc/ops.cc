// Operators that tch does not bind: fused AdamW, multi-tensor norm and scale, normal numbers from an own generator.
#include "shim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>

extern "C" {

int shim_fused_adamw(const Handle* parameters, const Handle* gradients, const Handle* means, const Handle* variances,
                     const Handle* steps, size_t n, double lr, double beta1, double beta2, double weight_decay, double eps) {
  return shim::guarded(-1, [&] {
    at::NoGradGuard no_grad;
    auto p = shim::list(parameters, n), g = shim::list(gradients, n), m = shim::list(means, n),
         v = shim::list(variances, n), s = shim::list(steps, n);
    at::_foreach_add_(s, 1);  // the kernel takes the counters as already increased
    at::_fused_adamw_(p, g, m, v, /*max_exp_avg_sqs=*/{}, s, lr, beta1, beta2, weight_decay, eps, /*amsgrad=*/false,
                      /*maximize=*/false);
    return 0;
  });
}

// One l2 norm per tensor, stacked: [n].
Handle shim_norms(const Handle* tensors, size_t n) {
  return shim::guarded<Handle>(nullptr, [&] {
    at::NoGradGuard no_grad;
    return new at::Tensor(at::stack(at::_foreach_norm(shim::list(tensors, n), 2)));
  });
}

// In place: every tensor times `factor` (a scalar tensor on the same device).
int shim_scale(const Handle* tensors, size_t n, Handle factor) {
  return shim::guarded(-1, [&] {
    at::NoGradGuard no_grad;
    auto list = shim::list(tensors, n);
    at::_foreach_mul_(list, *factor);
    return 0;
  });
}

Handle shim_randn(uint64_t seed, const int64_t* shape, size_t n, int bf16) {
  return shim::guarded<Handle>(nullptr, [&] {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    return new at::Tensor(at::randn(at::IntArrayRef(shape, n), generator, at::TensorOptions().dtype(bf16 ? at::kBFloat16 : at::kFloat)));
  });
}
}

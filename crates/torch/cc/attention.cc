// Attention over some of the keys, with what it takes to merge it with others: which kernel depends on where and in what kind.
#include "shim.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <limits>

namespace {
bool narrow(const at::Tensor& x) { return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16; }
// CUDA's kernel for f32 keeps one number for each query, and more up to a multiple of this.
constexpr int64_t kRows = 32;
// What dropout would draw from; there is none.
at::Tensor unused(const at::Tensor& like) { return at::empty({2}, like.options().dtype(at::kLong)); }
}  // namespace

extern "C" {

// `result`: room for the output [B, H, T, K] and the logarithms of the sums of exponentials, f32 [B, H, T].
int shim_attention(Handle q, Handle k, Handle v, Handle* result) {
  return shim::guarded(-1, [&] {
    at::NoGradGuard no_grad;
    at::Tensor out, lse;
    if (!q->is_cuda()) {
      std::tie(out, lse) = at::_scaled_dot_product_flash_attention_for_cpu(*q, *k, *v);
    } else if (narrow(*q)) {
      const auto all = at::_scaled_dot_product_flash_attention(*q, *k, *v);
      std::tie(out, lse) = std::tie(std::get<0>(all), std::get<1>(all));
    } else {
      const auto all = at::_scaled_dot_product_efficient_attention(*q, *k, *v, {}, /*compute_log_sumexp=*/true);
      out = std::get<0>(all);
      lse = std::get<1>(all).narrow(2, 0, q->size(2));
    }
    result[0] = new at::Tensor(out);
    result[1] = new at::Tensor(lse);
    return 0;
  });
}

// Gradients of q, k and v, where `out` and `lse` may be over more keys than these.
int shim_attention_backward(Handle gradient, Handle q, Handle k, Handle v, Handle out, Handle lse, Handle* result) {
  return shim::guarded(-1, [&] {
    at::NoGradGuard no_grad;
    at::Tensor dq, dk, dv;
    if (!q->is_cuda()) {
      std::tie(dq, dk, dv) =
          at::_scaled_dot_product_flash_attention_for_cpu_backward(*gradient, *q, *k, *v, *out, *lse, 0.0, false);
    } else if (narrow(*q)) {
      const at::Tensor none, seed = unused(*q);
      std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_backward(
          *gradient, *q, *k, *v, *out, *lse, none, none, q->size(2), k->size(2), 0.0, false, seed, seed);
    } else {
      const int64_t rest = (kRows - lse->size(2) % kRows) % kRows;
      const at::Tensor rows = at::constant_pad_nd(*lse, {0, rest}, std::numeric_limits<double>::infinity());
      const at::Tensor seed = unused(*q);
      const auto all = at::_scaled_dot_product_efficient_attention_backward(
          *gradient, *q, *k, *v, {}, *out, rows, seed[0], seed[1], 0.0, {true, true, true, false}, false);
      std::tie(dq, dk, dv) = std::tie(std::get<0>(all), std::get<1>(all), std::get<2>(all));
    }
    result[0] = new at::Tensor(dq);
    result[1] = new at::Tensor(dk);
    result[2] = new at::Tensor(dv);
    return 0;
  });
}
}

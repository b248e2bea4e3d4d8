// Group norm and SiLU in one go, for inference on a CPU; libtorch's two operators read the picture once more and write it once
// more. The inner loops are built for each width of vectors, and the processor's is taken at run time.
#include "shim.h"

#include <ATen/ops/empty_like.h>
#include <algorithm>
#include <cmath>
#include <cstring>

#define INLINE __attribute__((always_inline)) inline
#if defined(__x86_64__)
#define VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VERSIONS
#endif

namespace {

// Rows whose sums are taken in f32 before they are added up in f64.
constexpr int64_t ROWS = 256;

INLINE float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

INLINE float read(float x) { return x; }
INLINE float read(uint16_t bf16) { return of_bits(uint32_t(bf16) << 16); }

INLINE void write(float x, float& to) { to = x; }
// To the nearest, of two the even one; what is no number stays none.
INLINE void write(float x, uint16_t& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

// e^x for x <= 0: x = n ln 2 + r, and the Taylor series of e^r to r^7, good to f32 for |r| <= ln 2 / 2.
INLINE float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  float n = std::nearbyintf(x * 1.4426950408889634f);
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * of_bits(uint32_t(int32_t(n) + 127) << 23);
}

INLINE float silu(float z) {
  float e = exponential(-std::fabs(z)), s = 1.0f / (1.0f + e);
  return z * (z < 0 ? e * s : s);
}

// Adds each channel's distances from `pivot` and their squares over `rows`: numbers near zero, which lose no digits.
template <class T>
INLINE void add_up(const T* __restrict x, int64_t rows, int64_t channels, const float* __restrict pivot, float* __restrict sum,
                   float* __restrict squares) {
  for (int64_t row = 0; row < rows; ++row, x += channels)
    for (int64_t c = 0; c < channels; ++c) {
      float value = read(x[c]) - pivot[c];
      sum[c] += value;
      squares[c] += value * value;
    }
}

// silu(x scale + shift).
template <class T>
INLINE void turn(const T* __restrict x, T* __restrict y, int64_t rows, int64_t channels, const float* __restrict scale,
                 const float* __restrict shift) {
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels)
    for (int64_t c = 0; c < channels; ++c) write(silu(read(x[c]) * scale[c] + shift[c]), y[c]);
}

VERSIONS void sums(const float* x, int64_t rows, int64_t channels, const float* pivot, float* sum, float* squares) {
  add_up(x, rows, channels, pivot, sum, squares);
}
VERSIONS void sums(const uint16_t* x, int64_t rows, int64_t channels, const float* pivot, float* sum, float* squares) {
  add_up(x, rows, channels, pivot, sum, squares);
}
VERSIONS void apply(const float* x, float* y, int64_t rows, int64_t channels, const float* scale, const float* shift) {
  turn(x, y, rows, channels, scale, shift);
}
VERSIONS void apply(const uint16_t* x, uint16_t* y, int64_t rows, int64_t channels, const float* scale, const float* shift) {
  turn(x, y, rows, channels, scale, shift);
}

// One picture: [rows, channels], groups of neighbouring channels.
template <class T>
void picture(const T* x, T* y, const float* weight, const float* bias, int64_t rows, int64_t channels, int64_t groups, double eps) {
  const int64_t width = channels / groups;
  std::vector<float> pivot(channels), part(2 * channels);
  std::vector<double> total(2 * channels, 0.0);
  for (int64_t c = 0; c < channels; ++c) pivot[c] = read(x[c]);
  for (int64_t row = 0; row < rows; row += ROWS) {
    std::fill(part.begin(), part.end(), 0.0f);
    sums(x + row * channels, std::min(ROWS, rows - row), channels, pivot.data(), part.data(), part.data() + channels);
    for (int64_t i = 0; i < 2 * channels; ++i) total[i] += part[i];
  }
  std::vector<float> scale(channels), shift(channels);
  for (int64_t group = 0; group < groups; ++group) {
    // Means and variances of channels to those of the group.
    double mean = 0, variance = 0;
    for (int64_t c = group * width; c < (group + 1) * width; ++c) mean += (pivot[c] + total[c] / rows) / width;
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      const double own = total[c] / rows, apart = pivot[c] + own - mean;
      variance += (total[channels + c] / rows - own * own + apart * apart) / width;
    }
    const double factor = 1 / std::sqrt(std::max(variance, 0.0) + eps);
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      scale[c] = float(factor * weight[c]);
      shift[c] = float(bias[c] - mean * factor * weight[c]);
    }
  }
  apply(x, y, rows, channels, scale.data(), shift.data());
}

template <class T>
void pictures(const at::Tensor& x, at::Tensor& y, const at::Tensor& weight, const at::Tensor& bias, int64_t groups, double eps) {
  const int64_t channels = x.size(1), rows = x.size(2) * x.size(3);
  const at::Tensor w = weight.to(at::kFloat).contiguous(), b = bias.to(at::kFloat).contiguous();
  for (int64_t n = 0; n < x.size(0); ++n) {
    const int64_t first = n * rows * channels;
    picture(static_cast<const T*>(x.const_data_ptr()) + first, static_cast<T*>(y.mutable_data_ptr()) + first,
            w.const_data_ptr<float>(), b.const_data_ptr<float>(), rows, channels, groups, eps);
  }
}

}  // namespace

extern "C" Handle shim_group_norm_silu(Handle x, int64_t groups, Handle weight, Handle bias, double eps) {
  return shim::guarded<Handle>(nullptr, [&]() -> Handle {
    TORCH_CHECK(x->dim() == 4 && x->is_cpu() && x->is_contiguous(at::MemoryFormat::ChannelsLast),
                "expected [B, C, H, W] with channels last on the CPU");
    TORCH_CHECK(groups > 0 && x->size(1) % groups == 0, x->size(1), " channels do not make ", groups, " groups");
    TORCH_CHECK(weight->numel() == x->size(1) && bias->numel() == x->size(1), "a weight and a bias for each channel are needed");
    at::Tensor y = at::empty_like(*x);
    if (x->scalar_type() == at::kFloat)
      pictures<float>(*x, y, *weight, *bias, groups, eps);
    else {
      TORCH_CHECK(x->scalar_type() == at::kBFloat16, "expected float32 or bfloat16");
      pictures<uint16_t>(*x, y, *weight, *bias, groups, eps);
    }
    return new at::Tensor(y);
  });
}

// Memory of tensors on the host: an allocator that keeps freed blocks for the next tensor, holds no more than the most that was in
// use at once, counts, and can write down what comes and goes.
#include "shim.h"

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {
// Smaller ones are the C allocator's.
constexpr size_t kLarge = 128 << 10, kPage = 4 << 10;

class Pool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes < kLarge ? c10::alloc_cpu(bytes) : large(bytes);
    if (memory != nullptr && bytes < kLarge) {
      const std::lock_guard<std::mutex> lock(guard_);
      note(static_cast<int64_t>(malloc_usable_size(memory)));
    }
    return {memory, memory, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void trim() {
    const std::lock_guard<std::mutex> lock(guard_);
    keep(0);
    malloc_trim(0);
  }
  int64_t most() {
    const std::lock_guard<std::mutex> lock(guard_);
    return most_;
  }
  void begin_record() {
    const std::lock_guard<std::mutex> lock(guard_);
    recording_ = true;
    record_.clear();
  }
  std::vector<int64_t> end_record() {
    const std::lock_guard<std::mutex> lock(guard_);
    recording_ = false;
    return std::move(record_);
  }
  static Pool& only() {
    // Outlives every tensor.
    static Pool* pool = new Pool;
    return *pool;
  }

 private:
  std::mutex guard_;
  struct Used {
    // What was asked for, and what is there.
    size_t asked, bytes;
  };
  std::unordered_map<void*, Used> used_;
  std::multimap<size_t, void*> kept_;
  size_t kept_bytes_ = 0;
  const size_t spare_ = spare();
  int64_t held_ = 0, most_ = 0;
  bool recording_ = false;
  std::vector<int64_t> record_;

  void note(int64_t bytes, int64_t asked) {
    held_ += bytes;
    most_ = std::max(most_, held_);
    // What a kernel's threads each take for a moment depends on how many pieces there are, and is little.
    if (recording_ && !at::in_parallel_region()) record_.push_back(asked);
  }
  void note(int64_t bytes) { note(bytes, bytes); }

  void* large(const size_t asked) {
    const std::lock_guard<std::mutex> lock(guard_);
    void* memory = nullptr;
    size_t bytes = (asked + kPage - 1) / kPage * kPage;
    // The smallest that is large enough, unless much of it would lie idle.
    const auto found = kept_.lower_bound(bytes);
    if (found != kept_.end() && found->first <= bytes + bytes / 8) {
      bytes = found->first;
      memory = found->second;
      kept_bytes_ -= bytes;
      kept_.erase(found);
    }
    if (memory == nullptr) {
      const size_t with = static_cast<size_t>(held_) + bytes, most = std::max(static_cast<size_t>(most_), with);
      // A little more than was ever in use, for sizes that come back later in a step.
      keep(most + most / 32 - with);
      memory = map(bytes);
      if (memory == MAP_FAILED) {
        keep(0);
        memory = map(bytes);
      }
      TORCH_CHECK(memory != MAP_FAILED, "can't allocate memory: you tried to allocate ", asked, " bytes beside ", held_, " in use");
    }
    note(static_cast<int64_t>(bytes), static_cast<int64_t>(asked));
    used_.emplace(memory, Used{asked, bytes});
    return memory;
  }

  // Under a limit, room is left for what libraries take without us: some do not survive without it.
  void* map(size_t bytes) const {
    void* memory = mmap(nullptr, bytes + spare_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return memory;
    if (spare_ > 0) munmap(static_cast<char*>(memory) + bytes, spare_);
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
  }

  static size_t spare() {
    const auto limited = [](auto what) {
      rlimit limit{};
      return getrlimit(what, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    };
    return limited(RLIMIT_DATA) || limited(RLIMIT_AS) ? size_t{64} << 20 : 0;
  }

  // Gives freed blocks back, the largest first, until no more than `bytes` are kept.
  void keep(size_t bytes) {
    while (kept_bytes_ > bytes) {
      const auto last = std::prev(kept_.end());
      munmap(last->second, last->first);
      kept_bytes_ -= last->first;
      kept_.erase(last);
    }
  }

  static void drop(void* memory) {
    if (memory != nullptr) only().free(memory);
  }

  void free(void* memory) {
    const std::lock_guard<std::mutex> lock(guard_);
    const auto found = used_.find(memory);
    if (found == used_.end()) {
      note(-static_cast<int64_t>(malloc_usable_size(memory)));
      c10::free_cpu(memory);
      return;
    }
    const auto [asked, bytes] = found->second;
    used_.erase(found);
    note(-static_cast<int64_t>(bytes), -static_cast<int64_t>(asked));
    kept_.emplace(bytes, memory);
    kept_bytes_ += bytes;
  }
};
}  // namespace

extern "C" {

// From now on. Tensors made before go as they came.
void shim_memory_pool() { c10::SetAllocator(c10::kCPU, &Pool::only(), /*priority=*/1); }
void shim_memory_trim() { Pool::only().trim(); }
int64_t shim_memory_most() { return Pool::only().most(); }
void shim_memory_record() { Pool::only().begin_record(); }
// Ends the record; returns how long it is, and at most `room` of it.
size_t shim_memory_recorded(int64_t* events, size_t room) {
  const std::vector<int64_t> record = Pool::only().end_record();
  std::copy_n(record.begin(), std::min(room, record.size()), events);
  return record.size();
}
}

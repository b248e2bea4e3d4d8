// Process groups: a TCP store to meet at, and collectives over Gloo or NCCL, each an asynchronous work.
#include "shim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace {
// Heap-held references: what Rust owns.
using Store = c10::intrusive_ptr<c10d::Store>;
using Backend = c10::intrusive_ptr<c10d::Backend>;
using Milliseconds = std::chrono::milliseconds;

// Gloo for what lies in host memory and, once added, NCCL for what lies on a GPU. Between two ranks NCCL does one thing after the
// other, so two that both send first would wait for each other for ever: each direction has connections of its own.
struct Group {
  Backend cpu, cuda, cuda_down;

  c10d::Backend* of(const at::Tensor& tensor, bool up = true) const {
    TORCH_CHECK(!tensor.is_cuda() || cuda, "this group has no way between GPUs");
    return !tensor.is_cuda() ? cpu.get() : up ? cuda.get() : cuda_down.get();
  }
};

struct Work {
  c10::intrusive_ptr<c10d::Work> work;
  // On a GPU, waiting orders what is computed next and does not hold up this thread, unless a time is given; the backend watches
  // over the time-out.
  bool cuda;
};

c10d::ReduceOp reduction(int kind) {
  return kind == 0 ? c10d::ReduceOp::SUM : kind == 1 ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
}

template <class F>
Work* started(const at::Tensor& tensor, F&& body) {
  return shim::guarded<Work*>(nullptr, [&] { return new Work{body(), tensor.is_cuda()}; });
}
}  // namespace

extern "C" {

// A server when `server`; otherwise a client that waits for one. `workers` clients are awaited, unless 0.
Store* shim_store_tcp(const char* host, uint16_t port, int server, size_t workers, int64_t timeout) {
  return shim::guarded<Store*>(nullptr, [&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = server != 0;
    if (workers > 0) options.numWorkers = workers;
    options.waitWorkers = workers > 0;
    options.timeout = Milliseconds(timeout);
    return new Store(c10::make_intrusive<c10d::TCPStore>(host, options));
  });
}
int shim_store_port(Store* store) { return static_cast<c10d::TCPStore*>(store->get())->getPort(); }
Store* shim_store_prefix(Store* store, const char* prefix) {
  return shim::guarded<Store*>(nullptr, [&] { return new Store(c10::make_intrusive<c10d::PrefixStore>(prefix, *store)); });
}
int shim_store_set(Store* store, const char* key, const uint8_t* bytes, size_t count) {
  return shim::guarded(-1, [&] {
    (*store)->set(key, std::vector<uint8_t>(bytes, bytes + count));
    return 0;
  });
}
// Waits for the key; copies at most `room` bytes and returns how many there are.
int64_t shim_store_get(Store* store, const char* key, uint8_t* bytes, size_t room) {
  return shim::guarded<int64_t>(-1, [&] {
    const std::vector<uint8_t> value = (*store)->get(key);
    std::memcpy(bytes, value.data(), std::min(room, value.size()));
    return static_cast<int64_t>(value.size());
  });
}
int shim_store_wait(Store* store, const char* key, int64_t timeout) {
  return shim::guarded(-1, [&] {
    (*store)->wait({key}, Milliseconds(timeout));
    return 0;
  });
}
int64_t shim_store_add(Store* store, const char* key, int64_t by) {
  return shim::guarded<int64_t>(-1, [&] { return (*store)->add(key, by); });
}
void shim_store_free(Store* store) { delete store; }

// `address` is this host's own, that the others reach it at.
Group* shim_group_gloo(Store* store, int rank, int size, const char* address, int64_t timeout) {
  return shim::guarded<Group*>(nullptr, [&] {
    auto options = c10d::ProcessGroupGloo::Options::create(Milliseconds(timeout));
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
    return new Group{c10::make_intrusive<c10d::ProcessGroupGloo>(*store, rank, size, options), nullptr};
  });
}
// libpipeline_nccl.so (cc/nccl) must be loaded.
int shim_group_add_nccl(Group* group, Store* store, int rank, int size, int64_t timeout) {
  return shim::guarded(-1, [&] {
    using Make = Backend*(Store*, int, int, int64_t, void (*)(const char*));
    auto make = reinterpret_cast<Make*>(dlsym(RTLD_DEFAULT, "pipeline_group_nccl"));
    TORCH_CHECK(make != nullptr, "libpipeline_nccl.so is not loaded");
    for (auto [name, backend] : {std::pair{"up", &group->cuda}, std::pair{"down", &group->cuda_down}}) {
      Store own = c10::make_intrusive<c10d::PrefixStore>(name, *store);
      Backend* made = make(&own, rank, size, timeout, [](const char* text) { shim::failure() = text; });
      if (made == nullptr) return -1;
      *backend = std::move(*made);
      delete made;
    }
    return 0;
  });
}
void shim_group_free(Group* group) { delete group; }

Work* shim_all_reduce(Group* group, Handle tensor, int kind) {
  return started(*tensor, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = reduction(kind);
    return group->of(*tensor)->allreduce(tensors, options);
  });
}
Work* shim_broadcast(Group* group, Handle tensor, int root) {
  return started(*tensor, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return group->of(*tensor)->broadcast(tensors, options);
  });
}
Work* shim_all_gather(Group* group, Handle output, Handle input) {
  return started(*input, [&] { return group->of(*input)->_allgather_base(*output, *input); });
}
Work* shim_reduce_scatter(Group* group, Handle output, Handle input) {
  return started(*input, [&] { return group->of(*input)->_reduce_scatter_base(*output, *input); });
}
Work* shim_all_to_all(Group* group, Handle output, Handle input, const int64_t* received, const int64_t* sent, size_t n) {
  return started(*input, [&] {
    std::vector<int64_t> to(received, received + n), from(sent, sent + n);
    return group->of(*input)->alltoall_base(*output, *input, to, from);
  });
}
Work* shim_send(Group* group, Handle tensor, int to) {
  return started(*tensor, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    return group->of(*tensor, to > group->cpu->getRank())->send(tensors, to, 0);
  });
}
Work* shim_receive(Group* group, Handle tensor, int from) {
  return started(*tensor, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    return group->of(*tensor, from < group->cpu->getRank())->recv(tensors, from, 0);
  });
}
Work* shim_barrier(Group* group) {
  return started(at::Tensor(), [&] { return group->cpu->barrier(); });
}

int shim_work_wait(Work* work, int64_t timeout) {
  return shim::guarded(-1, [&] {
    work->work->wait(work->cuda ? kNoTimeout : Milliseconds(timeout));
    return 0;
  });
}
void shim_work_free(Work* work) { delete work; }
}

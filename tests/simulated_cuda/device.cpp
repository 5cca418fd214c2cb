// A CUDA device that computes on the CPU, for the CPU build of torch. README.md says what it shows.
//
// Device memory is host memory that only tensors with device="cuda" own. Every operator on such
// tensors goes through one fallback, which first refuses what a CUDA kernel refuses. A listener
// learns of every copy between host and device, and of every call that waits for the device.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <map>
#include <mutex>

namespace {
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current = 0;
std::recursive_mutex mutex;  // guards everything that is global here

c10::Device device_at(c10::DeviceIndex index = -1) {
  return {c10::kCUDA, index < 0 ? current : index};
}

// ---- What a test listens to: copies and waits

using Listener = void (*)(const char* what, int64_t bytes, bool waits);
Listener listener = nullptr;
void tell(const std::string& what, int64_t bytes, bool waits) {
  if (listener) listener(what.c_str(), bytes, waits);
}

// A non-blocking copy into pinned memory arrives when the host waits for the device, not before.
// Host code that reads too early therefore reads NaN.
struct Copy {
  at::Tensor to, values;  // of the host
};
std::vector<Copy> in_flight;
void wait_for_device(const std::string& what, int64_t bytes = 0) {
  std::lock_guard lock(mutex);
  for (auto& copy : std::exchange(in_flight, {}))
    memcpy(copy.to.data_ptr(), copy.values.data_ptr(), copy.to.nbytes());
  tell(what, bytes, true);
}

// ---- Memory

std::map<const void*, size_t> pinned;
std::map<const void*, std::pair<size_t, c10::DeviceIndex>> blocks;
std::array<size_t, kDevices> allocated{}, peak{};

void free_block(void* block) {
  std::lock_guard lock(mutex);
  if (auto found = blocks.find(block); found != blocks.end()) {
    allocated[found->second.second] -= found->second.first;
    blocks.erase(found);
  }
  pinned.erase(block);
  free(block);
}
void* new_block(size_t bytes) {
  void* block = nullptr;
  if (posix_memalign(&block, 512, std::max<size_t>(bytes, 1))) throw std::bad_alloc();
  memset(block, 0xff, bytes);  // NaN in every float: a read before the first write shows
  return block;
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_block, device_at()};
    std::lock_guard lock(mutex);
    void* block = new_block(bytes);
    blocks[block] = {bytes, current};
    allocated[current] += bytes;
    peak[current] = std::max(peak[current], allocated[current]);
    return {block, block, &free_block, device_at()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} device_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator)

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(mutex);
    void* block = new_block(bytes);
    pinned[block] = bytes;
    return {block, block, &free_block, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_allocator;

// ---- The device: its index, streams, events, random numbers

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device_at(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = device_at();
    if (device.index() >= 0) setDevice(device);
    return before;
  }
  // All streams are one: every operator ends before the next one begins.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_at(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = &current;  // any address that is not null
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void synchronizeEvent(void*) const override { wait_for_device("event.synchronize"); }
  void synchronizeStream(const c10::Stream&) const override {
    wait_for_device("stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for_device("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator host;
  DeviceGenerator(at::Generator generator, c10::Device device)
      : c10::GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(generator) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& s) override { host.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(host.clone(), device());
  }
};
// The first generator of a device is its default: simulated_cuda.py asks for it before anyone else.
std::array<at::Generator, kDevices> default_generators;
at::Generator new_generator(c10::DeviceIndex index) {
  auto device = device_at(index);
  auto made = at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(), device);
  if (!default_generators[device.index()].defined()) default_generators[device.index()] = made;
  return made;
}
const at::Generator& default_generator(c10::DeviceIndex index) {
  return default_generators[device_at(index).index()];
}
}  // namespace

namespace at {
// torch looks for hooks of this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(device_at(index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice({c10::kCUDA, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(DeviceIndex) const override { wait_for_device("synchronize"); }
  bool isPinnedPtr(const void* block) const override {
    std::lock_guard lock(mutex);
    return pinned.count(block);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void* block) const override { return device_at(blocks.at(block).second); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// ---- Operators

namespace {
using at::Tensor;

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto keep = [storage = t.storage()](void*) {};
  auto options = t.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), keep, options);
}

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
using Layout = std::optional<at::Layout>;
using MaybeDevice = std::optional<c10::Device>;
Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, Layout, MaybeDevice device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(device_at()));
  return at::detail::empty_generic(
      size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, Layout,
    MaybeDevice device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(device_at()));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;
  auto values = source.resolve_conj().resolve_neg();
  const Tensor& host = self.is_cuda() ? source : self;
  if (self.is_cuda() != source.is_cuda()) {
    const bool is_pinned = host.is_pinned(), down = source.is_cuda();
    auto what = c10::str(down ? "device to host" : "host to device", is_pinned ? "" : ", pageable");
    if (down && is_pinned && non_blocking && self.is_contiguous()) {
      std::lock_guard lock(mutex);
      in_flight.push_back({self, at::empty_like(self).copy_(on_host(values))});
      memset(self.data_ptr(), 0xff, self.nbytes());
      tell(what, self.nbytes(), false);
      return self;
    }
    // A non-blocking copy from pageable memory is staged: the host goes on. The other way it waits.
    if (non_blocking && !down) tell(what, self.nbytes(), false);
    else wait_for_device(what, self.nbytes());
  }
  on_host(self).copy_(on_host(values).expand_as(self));
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, self, non_blocking);
}

void resize_storage(const Tensor& self, int64_t bytes) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  c10::DeviceGuard guard(self.device());
  auto data = device_allocator.allocate(bytes);
  if (auto kept = std::min<size_t>(bytes, storage->nbytes()))
    memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}
const Tensor& resize_(
    const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t bytes = at::detail::computeStorageNbytesContiguous(
      size, self.dtype().itemsize(), self.storage_offset());
  if (bytes > static_cast<int64_t>(self.storage().nbytes())) resize_storage(self, bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) resize_(to, self.sizes(), {});
  return copy_from(self, to, false);
}
Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  else self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {count}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Scalar item(const Tensor& self) {
  wait_for_device("item", self.nbytes());
  return at::_local_scalar_dense(on_host(self));
}
int64_t math_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // SDPBackend.MATH
}
void record_stream(Tensor&, c10::Stream) {}

// Calls `visit` with every tensor in a value. Returns the value with what `visit` returned.
using Visit = std::function<Tensor(const Tensor&)>;
c10::IValue map_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (!value.isList()) return value;
  auto list = value.toList();
  c10::impl::GenericList mapped(list.elementType());
  for (size_t i = 0; i < list.size(); i++) mapped.push_back(map_tensors(list.get(i), visit));
  return mapped;
}

// Operators that read tensors of two devices, on CUDA too.
bool may_mix(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::index_put" ||
      name == "aten::_index_put_impl_";
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto name = op.schema().name();
  const auto begin = stack->size() - arguments.size();
  std::vector<c10::Device> devices;  // without repetitions
  std::string seen;
  bool by_mask = false, one_value = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[begin + i];
    const auto* alias = arguments[i].alias_info();
    const bool is_written = alias && alias->isWrite();
    map_tensors(value, [&](const Tensor& t) {
      if (!t.defined()) return t;
      seen += c10::str(" ", t.device(), t.sizes());
      by_mask |= arguments[i].name() == "indices" && t.scalar_type() == at::kBool;
      one_value |= arguments[i].name() == "values" && t.numel() == 1;
      // Elementwise kernels take 0-dimensional tensors of the CPU, but write none. Every kernel
      // takes Python's numbers.
      const bool is_number = t.unsafeGetTensorImpl()->is_wrapped_number();
      const bool is_scalar =
          !t.dim() && t.is_cpu() && (is_number || op.hasTag(at::Tag::pointwise));
      const bool is_new = std::find(devices.begin(), devices.end(), t.device()) == devices.end();
      if (is_new && (is_written || !(is_scalar || may_mix(name)))) devices.push_back(t.device());
      return t;
    });
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
          generator.device(), "' (", name, ")");
      value = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
    } else if (value.isNone() && arguments[i].name() == "generator") {
      value = static_cast<DeviceGenerator*>(default_generator(-1).unsafeGetGeneratorImpl())->host;
    }
  }
  TORCH_CHECK(
      devices.size() < 2, "Expected all tensors to be on the same device, but found at least two ",
      "devices, ", devices.front(), " and ", devices.back(), "! (", name, seen, ")");
  const bool is_index = may_mix(name);
  if (is_index ? by_mask && !one_value
               : op.hasTag(at::Tag::dynamic_output_shape) ||
               op.hasTag(at::Tag::data_dependent_output))
    wait_for_device(name);
  // What the fallback itself copies is no copy of the device.
  auto listening = std::exchange(listener, nullptr);
  struct Restore {
    Listener before;
    ~Restore() { listener = before; }
  } restore{listening};
  at::native::cpu_fallback(op, stack);
}

// The collectives of gloo, on the memory of the device.
void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // (of the device, of the host)
  auto down = [&](const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
    pairs.emplace_back(t, on_host(t));
    return pairs.back().second;
  };
  auto up = [&](const Tensor& t) {
    for (auto& [of_device, of_host] : pairs)
      if (of_host.is_same(t)) return of_device;
    return t;
  };
  const auto begin = stack->size() - op.schema().arguments().size();
  for (size_t i = begin; i < stack->size(); i++) (*stack)[i] = map_tensors((*stack)[i], down);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = begin; i < stack->size(); i++) (*stack)[i] = map_tensors((*stack)[i], up);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_local_scalar_dense", &item);
  library.impl("_fused_sdp_choice", &math_attention);
  // One kernel, as on a GPU. Torch's formula for other devices makes five temporary results.
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("unfold", &at::native::unfold);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
}
TORCH_LIBRARY(simulated_cuda, library) {
  library.def("resize_storage(Tensor(a!) self, int bytes) -> ()");
  library.impl("resize_storage", c10::DispatchKey::CUDA, &resize_storage);
}
// What simulated_cuda.py calls.
extern "C" {
// Replaces torch's collectives for CUDA tensors, which it warns about.
void start() {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(
      torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (auto name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
        "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
        "alltoall_", "alltoall_base_", "gather_", "scatter_", "send", "recv_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
}
void listen(Listener function) { listener = function; }
int exchange_device(int index) {
  return Guard().exchangeDevice({c10::kCUDA, static_cast<c10::DeviceIndex>(index)}).index();
}
void synchronize() { wait_for_device("synchronize"); }
int64_t memory(int index, bool at_peak, bool reset) {
  std::lock_guard lock(mutex);
  if (reset) peak[index] = allocated[index];
  return at_peak ? peak[index] : allocated[index];
}
}

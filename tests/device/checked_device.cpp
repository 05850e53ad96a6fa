// A device whose memory is the host's and whose kernels are the CPU's, and which is as strict as a GPU: an operator
// that gets tensors of it beside tensors of the CPU, or a generator of the CPU, is an error.
//
// Each operator runs on CPU tensors over the same memory. What it returns becomes a tensor of the device again, over
// the memory of an argument if it is a view of one. So nothing is copied, and all that aliases stays so.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <set>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::Device kHost(c10::DeviceType::CPU);

bool is_ours(const at::Tensor& x) { return x.defined() && x.device().type() == kType; }

void release(void* storage) { delete static_cast<c10::Storage*>(storage); }

// The same memory as another device's, kept alive by the storage that it is from.
c10::Storage over(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  void* memory = const_cast<void*>(storage.data());
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(memory, new c10::Storage(storage), &release, device), allocator, true);
}

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {memory, memory, &c10::free_cpu, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

// One device with one stream, in which everything has ended when a call returns.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The CPU's generator, which says that it is the device's.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(uint64_t seed) : at::CPUGeneratorImpl(seed) { device_ = kDevice; }
  void say(c10::Device device) { device_ = device; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::make_generator<DeviceGenerator>(c10::detail::getNonDeterministicRandom());
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(c10::default_rng_seed_val);
  }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocator.allocate(bytes);
    std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Arguments that a GPU's operators take from the CPU, too: indices of x[...], lengths of sequences.
const std::set<std::string> kOnEither{"indices", "input_lengths", "target_lengths", "lengths", "batch_sizes"};

// One call of an operator on the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    const size_t count = schema.arguments().size();
    const size_t begin = stack_->size() - count;
    for (size_t k = 0; k < count; ++k) look_at((*stack_)[begin + k], schema.arguments()[k]);
    TORCH_CHECK(!on_device_ || on_host_.empty(),
                "Expected all tensors to be on the same device, but found at least two devices, checked:0 and cpu! ",
                "(argument ", on_host_, " of ", op_.operator_name(), ")");
    std::vector<std::pair<at::Tensor, at::Tensor>> written;
    for (size_t k = 0; k < count; ++k) give((*stack_)[begin + k], schema.arguments()[k], written);
    {
      struct Back {
        std::vector<DeviceGenerator*>& generators;
        ~Back() { for (auto* each : generators) each->say(kDevice); }
      } back{generators_};
      op_.callBoxed(stack_);
    }
    for (auto& [ours, host] : written) take_over(ours, host);
    const size_t first = stack_->size() - schema.returns().size();
    for (size_t k = first; k < stack_->size(); ++k) receive((*stack_)[k], written);
  }

 private:
  void look_at(const c10::IValue& value, const c10::Argument& argument) {
    auto one = [&](const at::Tensor& x) {
      if (is_ours(x)) on_device_ = true;
      else if (x.defined() && x.dim() && x.device().type() == c10::DeviceType::CPU && !kOnEither.count(argument.name()))
        on_host_ = argument.name();
    };
    each_tensor(value, one);
    if (value.isDevice() && value.toDevice().type() == kType) on_device_ = true;
    if (value.isGenerator() && value.toGenerator().defined() && value.toGenerator().device().type() == kType)
      on_device_ = true;
  }

  template <class F>
  static void each_tensor(const c10::IValue& value, F f) {
    if (value.isTensor()) f(value.toTensor());
    else if (value.isTensorList()) for (const auto& x : value.toTensorVector()) f(x);
    else if (value.isOptionalTensorList())
      for (const c10::IValue& x : value.toListRef()) if (x.isTensor()) f(x.toTensor());
  }

  at::Tensor to_host(const at::Tensor& x) {
    if (!is_ours(x)) return x;
    auto* key = x.storage().unsafeGetStorageImpl();
    auto found = hosts_.find(key);
    if (found == hosts_.end()) {
      found = hosts_.emplace(key, over(x.storage(), kHost, c10::GetAllocator(c10::DeviceType::CPU))).first;
      ours_.emplace(found->second.unsafeGetStorageImpl(), x.storage());
    }
    return with_storage(x, found->second, c10::DispatchKey::CPU);
  }

  at::Tensor to_device(const at::Tensor& x) {
    if (!x.defined() || x.device().type() != c10::DeviceType::CPU || !x.has_storage()) return x;
    if (x._is_zerotensor()) return to_device(at::zeros(x.sizes(), x.options()));  // it has no memory
    auto found = ours_.find(x.storage().unsafeGetStorageImpl());
    auto storage = found == ours_.end() ? over(x.storage(), kDevice, &allocator) : found->second;
    if (found == ours_.end()) ours_.emplace(x.storage().unsafeGetStorageImpl(), storage);
    return with_storage(x, storage, c10::DispatchKey::PrivateUse1);
  }

  void give(c10::IValue& value, const c10::Argument& argument,
            std::vector<std::pair<at::Tensor, at::Tensor>>& written) {
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    auto one = [&](const at::Tensor& x) {
      auto host = to_host(x);
      if (writes && is_ours(x)) written.emplace_back(x, host);
      return host;
    };
    if (value.isTensor()) value = one(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& x : value.toTensorVector()) list.push_back(one(x));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& x : value.toListRef())
        list.push_back(x.isTensor() ? std::optional<at::Tensor>(one(x.toTensor())) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = kHost;
    } else if (value.isGenerator() && on_device_ && value.toGenerator().defined()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == kType, "Expected a 'checked' device type for generator but found '",
                  generator.device().type(), "' (", op_.operator_name(), ")");
      auto* ours = generator.get<DeviceGenerator>();
      ours->say(kHost);
      generators_.push_back(ours);
    }
  }

  // After an out= that was resized.
  void take_over(at::Tensor& ours, const at::Tensor& host) {
    auto* impl = ours.unsafeGetTensorImpl();
    if (ours.storage().data() != host.storage().data() || ours.storage().nbytes() != host.storage().nbytes())
      impl->set_storage_keep_dtype(over(host.storage(), kDevice, &allocator));
    if (ours.sizes() != host.sizes() || ours.strides() != host.strides()) {
      impl->set_storage_offset(host.storage_offset());
      impl->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }

  void receive(c10::IValue& value, const std::vector<std::pair<at::Tensor, at::Tensor>>& written) {
    if (!on_device_) return;
    auto one = [&](const at::Tensor& x) {
      for (const auto& [ours, host] : written) if (host.is_same(x)) return ours;
      return to_device(x);
    };
    if (value.isTensor()) value = one(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& x : value.toTensorVector()) list.push_back(one(x));
      value = list;
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  bool on_device_ = false;
  std::string on_host_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_, ours_;
  std::vector<DeviceGenerator*> generators_;
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

at::Tensor as_host(const at::Tensor& x) {
  return x.defined() && is_ours(x) ? with_storage(x, over(x.storage(), kHost, c10::GetAllocator(c10::DeviceType::CPU)), c10::DispatchKey::CPU) : x;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  as_host(to).copy_(as_host(from));
  return to;
}

at::Tensor as_ours(const at::Tensor& x) {
  if (!x.defined()) return x;
  return with_storage(x, over(x.storage(), kDevice, &allocator), c10::DispatchKey::PrivateUse1);
}

// Convolutions look for a backend before they come to a kernel, and for other devices it is these two operators.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(is_ours(input) && is_ours(weight), "Expected all tensors to be on the same device (convolution)");
  return as_ours(at::convolution_symint(as_host(input), as_host(weight),
                                        bias ? std::optional<at::Tensor>(as_host(*bias)) : bias, stride, padding,
                                        dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& cotangent, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  TORCH_CHECK(is_ours(cotangent) && is_ours(input) && is_ours(weight),
              "Expected all tensors to be on the same device (convolution_backward)");
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto found = at::convolution_backward_symint(as_host(cotangent), as_host(input), as_host(weight),
                                               c10::OptionalArrayRef<c10::SymInt>(bias), stride, padding, dilation,
                                               transposed, output_padding, groups, wanted);
  return {as_ours(std::get<0>(found)), as_ours(std::get<1>(found)), as_ours(std::get<2>(found))};
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  auto plain = C10_AS_INTARRAYREF_SLOW(sizes);
  if (strides.data() == nullptr) impl->set_sizes_contiguous(plain);
  else impl->set_sizes_and_strides(plain, C10_AS_INTARRAYREF_SLOW(strides));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {c10::SymInt(count)}, {});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}

// copy_from copies values that are conjugated or negated when they are read.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

Hooks hooks;

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
}

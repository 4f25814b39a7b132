// The operators that are not simply those of the CPU: what makes tensors, views, copies between devices, convolutions, and
// the data types of autocast.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>

#include "kernels.h"

namespace emu {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>, std::optional<c10::Device> device,
    std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard there(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard there(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(type));
}

inline at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

inline void ensure_bytes(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_storage(storage, bytes);
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != size) {
    ensure_bytes(self, at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset()));
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  ensure_bytes(self, at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), offset));
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_offset(self, std::move(source), 0, {count}, {1});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// --- copies -------------------------------------------------------------------------------------------

inline void enqueue_copy(const c10::Stream& stream, at::Tensor to, at::Tensor from) {
  failure(stream.device_index()).raise();
  ++counters().copies;
  worker(stream).push({"copy", [to, from]() mutable { to.copy_(from); }, counters().kernel_delay_ns.load()});
}

inline void copy_between(const at::Tensor& from, const at::Tensor& to) {
  const auto stream = current_stream(from.device().index()), other = current_stream(to.device().index());
  if (stream != other) worker(stream).await(worker(other).mark());
  enqueue_copy(stream, kernel_view(to), kernel_view(from));
  if (stream != other) worker(other).await(worker(stream).mark());
}

// From memory that is not pinned, the host's bytes are taken before the call returns.
inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const auto from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  if (from.device().type() == kType && to.device().type() == kType) {
    copy_between(from, to);
    return to;
  }
  const bool arrives = to.device().type() == kType;
  const auto& host = arrives ? from : to;
  TORCH_CHECK(host.is_cpu(), "emu: there is no copy between emu and ", host.device());
  const auto stream = current_stream((arrives ? to : from).device().index());
  const bool is_pinned = pinned().has(host.storage().data());
  if (arrives)
    enqueue_copy(stream, kernel_view(to), is_pinned ? from.detach() : from.clone());
  else
    enqueue_copy(stream, to.detach(), kernel_view(from));
  if (!non_blocking || (!arrives && !is_pinned))
    host_wait(stream.device_index(), *worker(stream).mark(), arrives ? "copy from the host" : "copy to the host");
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// The CPU's would draw from the host's generator: it takes none as an argument.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto kept = at::empty_like(input, input.options().dtype(at::kBool));
  const bool drops = train.value_or(true);
  kept.bernoulli_(drops ? 1 - p : 1.0);
  return {input.mul(kept).mul_(!drops ? 1.0 : p == 1 ? 0.0 : 1 / (1 - p)), kept};
}

// --- operators under other names ----------------------------------------------------------------------

inline c10::OperatorHandle operator_named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

inline void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto plain = operator_named("aten::convolution");
  run(plain, stack);
}

inline void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto plain = operator_named("aten::convolution_backward");
  const size_t first = stack->size() - 10;
  const auto weight = (*stack)[first + 2].toTensor();
  const bool transposed = (*stack)[first + 6].toBool();
  const int64_t channels = transposed ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
  stack->insert(stack->begin() + static_cast<long>(first) + 3, c10::IValue(std::vector<int64_t>{channels}));
  run(plain, stack);
}

}  // namespace emu

namespace at::autocast {  // declared here: its own header costs seconds
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, at::DeviceType device_type);
}  // namespace at::autocast

namespace emu {

inline void cast_and_call(const c10::OperatorHandle& op, Stack* stack, std::optional<at::ScalarType> type) {
  const c10::impl::ExcludeDispatchKeyGuard beyond(c10::DispatchKey::AutocastPrivateUse1);
  const auto wanted = type ? *type : at::autocast::get_autocast_dtype(kType);
  for (size_t at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at)
    if ((*stack)[at].isTensor())
      (*stack)[at] = with_tensors((*stack)[at], [&](const at::Tensor& t) {
        return at::autocast::cached_cast(wanted, t, kType);
      });
  op.callBoxed(stack);
}

inline void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) { cast_and_call(op, stack, std::nullopt); }
inline void in_float(const c10::OperatorHandle& op, Stack* stack) { cast_and_call(op, stack, at::kFloat); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // One launch for all tensors of a list, as with CUDA: torch would take them one by one.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0) {
      const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      m.impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run>());
    }
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "prelu"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  for (const char* name : {"softmax.int", "log_softmax.int", "layer_norm", "mse_loss", "nll_loss", "exp", "sum", "prod", "norm.Scalar", "binary_cross_entropy_with_logits"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float>());
}

}  // namespace emu

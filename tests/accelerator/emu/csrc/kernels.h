// Every operator of the CPU as an asynchronous kernel.
//
// A boxed fallback turns the tensors of a call into CPU tensors over the inside of the device's memory, and gives the call
// to the thread of the current stream. What it returns must exist before it has run: the first call with given shapes is
// tried on the host with zeros, to see what comes out, and that is remembered. A call whose result is a number, or has a
// shape that depends on values, makes the host wait, as it does with CUDA, and is counted as such.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <unordered_set>

#include "runtime.h"

namespace emu {

using Stack = torch::jit::Stack;

inline void enter_thread() {
  static thread_local auto* below = new at::AutoDispatchBelowADInplaceOrView();
  (void)below;
}

// The same tensor for kernels: on the CPU, over memory that only they can touch. It owns nothing.
inline at::Tensor kernel_view(const at::Tensor& of) {
  if (!of.defined()) return of;
  void* at = of.numel() ? of.storage().mutable_data() : nullptr;
  if (at) at = static_cast<char*>(inside(at)) + of.storage_offset() * of.element_size();
  auto view = at::from_blob(at, of.sizes(), of.strides(), [](void*) {}, of.options().device(at::kCPU), at::kCPU);
  if (of.is_conj()) view = view.conj();
  if (of.is_neg()) view = at::_neg_view(view);
  return view;
}

struct Operator {  // what its schema says
  bool reads_back = false, moves_indices = false, is_foreach_copy = false, may_index_by_mask = false;
  std::vector<bool> takes_generator;
  std::vector<int> returns;  // the argument that it returns, or -1: something new
  bool returns_new = false;
};

inline Operator describe(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> by_value = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::repeat_interleave"};
  Operator found;
  const auto& name = schema.name();
  found.reads_back = by_value.count(name) > 0;
  found.may_index_by_mask = name == "aten::_index_put_impl_" || name == "aten::index_put_" || name == "aten::index_put";
  found.moves_indices = found.may_index_by_mask || name == "aten::index";
  found.is_foreach_copy = name == "aten::_foreach_copy_";
  for (const auto& argument : schema.arguments())
    found.takes_generator.push_back(argument.type()->str().find("Generator") != std::string::npos);
  for (const auto& returned : schema.returns()) {
    int same = -1;
    if (const auto* alias = returned.alias_info())
      for (size_t at = 0; at < schema.arguments().size(); ++at)
        if (const auto* other = schema.arguments()[at].alias_info())
          if (alias->isWrite() && other->beforeSets() == alias->beforeSets()) same = static_cast<int>(at);
    const auto kind = returned.type()->kind();
    const bool tensors = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    found.reads_back = found.reads_back || !tensors;
    found.returns_new = found.returns_new || same < 0;
    found.returns.push_back(same);
  }
  return found;
}

// --- the arguments of a call --------------------------------------------------------------------------

template <class Each>
void each_tensor(const c10::IValue& value, const Each& each) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) each(value.toTensor());
  } else if (value.isList()) {
    if (value.isTensorList() || value.isOptionalTensorList())
      for (const c10::IValue& one : value.toListRef()) each_tensor(one, each);
  }
}

template <class Change>
c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const c10::IValue& one : value.toListRef()) changed.push_back(with_tensors(one, change).toTensor());
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const c10::IValue& one : value.toListRef())
      changed.push_back(one.isNone() ? std::optional<at::Tensor>() : with_tensors(one, change).toTensor());
    return changed;
  }
  if (value.isDevice()) return c10::IValue(c10::Device(at::kCPU));
  return value;
}

struct Call {
  const c10::OperatorHandle& op;
  const Operator& about;
  c10::ArrayRef<c10::IValue> arguments;
  int device = -1;

  Call(const c10::OperatorHandle& op_, const Operator& about_, c10::ArrayRef<c10::IValue> given)
      : op(op_), about(about_), arguments(given) {
    for (const auto& value : arguments) {
      each_tensor(value, [this](const at::Tensor& tensor) { must_be_here(tensor); });
      if (device < 0 && value.isDevice() && value.toDevice().type() == kType)
        device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
    }
    if (device < 0) device = current_device;
  }

  void must_be_here(const at::Tensor& tensor) {
    if (tensor.device().type() == kType && device < 0) device = tensor.device().index();
    if (tensor.device().type() == kType && tensor.device().index() == device) return;
    const bool a_number = tensor.is_cpu() && (tensor.dim() == 0 || about.moves_indices);
    TORCH_CHECK(
        a_number || about.is_foreach_copy, "Expected all tensors to be on the same device, but ", op.schema().name(),
        " was given tensors of emu and of ", tensor.device());
  }

  bool indexes_by_mask() const {
    bool found = false;
    if (about.may_index_by_mask)
      each_tensor(arguments[1], [&](const at::Tensor& index) { found = found || index.scalar_type() == at::kBool; });
    return found;
  }

  Stack for_the_kernel() const {
    return changed([](const at::Tensor& tensor) { return tensor.is_cpu() ? tensor.clone() : kernel_view(tensor); }, true);
  }

  Stack of_zeros() const {
    return changed(
        [](const at::Tensor& tensor) {
          auto zeros = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
          return zeros.zero_();
        },
        false);
  }

  std::string shape() const {  // all that the shape of the result may depend on
    std::ostringstream text;
    text << op.operator_name().name << '.' << op.operator_name().overload_name;
    for (size_t at = 0; at < arguments.size(); ++at) {
      text << '|';
      const auto& value = arguments[at];
      if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList())
        each_tensor(value, [&](const at::Tensor& t) { text << t.scalar_type() << t.sizes() << t.strides() << ';'; });
      else if (!about.takes_generator[at])
        text << value;
    }
    return text.str();
  }

 private:
  template <class Change>
  Stack changed(const Change& change, bool draw) const {
    Stack stack;
    for (size_t at = 0; at < arguments.size(); ++at) {
      if (!about.takes_generator[at]) {
        stack.push_back(with_tensors(arguments[at], change));
        continue;
      }
      const auto& given = arguments[at];
      const auto generator = given.isNone() ? default_generator(device) : given.toGenerator();
      stack.emplace_back(at::detail::createCPUGenerator(draw ? draw_seed(generator) : 0));
    }
    return stack;
  }
};

// --- what comes out -----------------------------------------------------------------------------------

struct Shape {
  bool defined;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
};
struct Result {
  bool is_list;
  std::vector<Shape> shapes;
};

inline Result result_of(const c10::IValue& value) {
  Result result{value.isTensorList(), {}};
  auto add = [&](const at::Tensor& t) {
    if (t.defined())
      result.shapes.push_back({true, t.sizes().vec(), t.strides().vec(), t.scalar_type()});
    else
      result.shapes.push_back({false, {}, {}, at::kFloat});
  };
  if (result.is_list)
    for (const at::Tensor& one : value.toTensorVector()) add(one);
  else
    add(value.toTensor());
  return result;
}

inline c10::IValue allocated(const Result& result, int device) {
  std::vector<at::Tensor> tensors;
  for (const auto& shape : result.shapes) {
    const auto options = at::TensorOptions().dtype(shape.type).device(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
    tensors.push_back(shape.defined ? at::empty_strided(shape.sizes, shape.strides, options) : at::Tensor());
  }
  return result.is_list ? c10::IValue(tensors) : c10::IValue(tensors[0]);
}

inline void copy_into(const c10::IValue& views, const c10::IValue& results) {
  if (views.isTensor()) {
    if (views.toTensor().defined()) views.toTensor().copy_(results.toTensor());
    return;
  }
  const auto to = views.toTensorVector(), from = results.toTensorVector();
  for (size_t at = 0; at < to.size(); ++at) to[at].copy_(from[at]);
}

inline std::optional<std::vector<Result>> tried_with_zeros(const Call& call) {
  static std::mutex lock;
  static auto* known = new std::unordered_map<std::string, std::vector<Result>>();
  const auto shape = call.shape();
  {
    std::lock_guard<std::mutex> hold(lock);
    if (auto found = known->find(shape); found != known->end()) return found->second;
  }
  Stack stack = call.of_zeros();
  std::vector<Result> results;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    call.op.callBoxed(&stack);
    for (size_t at = 0; at < stack.size(); ++at)
      results.push_back(result_of(stack[at]));
  } catch (const std::exception&) {
    return std::nullopt;  // perhaps the fault of the zeros: the call itself will tell
  }
  std::lock_guard<std::mutex> hold(lock);
  return (*known)[shape] = results;
}

// --- the launch ---------------------------------------------------------------------------------------

inline void launch(int device, std::string name, std::function<void()> run) {
  failure(device).raise();
  ++counters().kernels;
  worker(current_stream(device)).push({std::move(name), std::move(run), counters().kernel_delay_ns.load()});
}

inline std::vector<c10::IValue> run_and_wait(const Call& call, bool foreseen) {
  auto stack = std::make_shared<Stack>(call.for_the_kernel());
  auto problem = std::make_shared<std::exception_ptr>();
  launch(call.device, call.op.schema().name(), [op = call.op, stack, problem] {
    try {
      op.callBoxed(stack.get());
    } catch (...) {
      *problem = std::current_exception();
    }
  });
  auto end = worker(current_stream(call.device)).mark();
  if (foreseen) {
    host_wait(call.device, *end, call.op.schema().name());
  } else {
    ++counters().unforeseen_waits;
    wait_without_gil(*end);
  }
  if (*problem) std::rethrow_exception(*problem);
  std::vector<c10::IValue> returned;
  for (size_t at = 0; at < stack->size(); ++at) {
    const auto& value = (*stack)[at];
    if (call.about.returns[at] >= 0) {
      returned.push_back(call.arguments[call.about.returns[at]]);
    } else if (value.isTensor() || value.isTensorList()) {
      returned.push_back(allocated(result_of(value), call.device));
      auto views = with_tensors(returned.back(), kernel_view);
      worker(current_stream(call.device)).push({"return", [views, value] { copy_into(views, value); }});
    } else {
      returned.push_back(value);
    }
  }
  return returned;
}

inline std::vector<c10::IValue> run_later(const Call& call, const std::vector<Result>& results) {
  std::vector<c10::IValue> returned, views;
  for (size_t at = 0; at < call.about.returns.size(); ++at) {
    const int same = call.about.returns[at];
    returned.push_back(same >= 0 ? call.arguments[same] : allocated(results[at], call.device));
    views.push_back(same >= 0 ? c10::IValue() : with_tensors(returned.back(), kernel_view));
  }
  launch(call.device, call.op.schema().name(), [op = call.op, stack = call.for_the_kernel(), views]() mutable {
    op.callBoxed(&stack);
    for (size_t at = 0; at < views.size(); ++at)
      if (!views[at].isNone()) copy_into(views[at], stack[at]);
  });
  return returned;
}

inline const Operator& about(const c10::OperatorHandle& op) {
  static thread_local auto* known = new std::unordered_map<c10::OperatorName, Operator>();
  auto found = known->find(op.operator_name());
  if (found == known->end()) found = known->emplace(op.operator_name(), describe(op.schema())).first;
  return found->second;
}

// Many an operator makes an empty tensor, and has it brought to its size by the one that writes to it.
inline bool grows_its_result(const Call& call) {
  for (const int same : call.about.returns)
    if (same >= 0 && call.arguments[same].isTensor() && call.arguments[same].toTensor().numel() == 0) return true;
  return false;
}

inline void grow(const Call& call, const std::vector<Result>& results) {
  for (size_t at = 0; at < results.size(); ++at) {
    const int same = call.about.returns[at];
    if (same >= 0 && call.arguments[same].isTensor() && call.arguments[same].toTensor().numel() == 0)
      call.arguments[same].toTensor().resize_(results[at].shapes[0].sizes);
  }
}

inline bool copied_one_by_one(const Call& call) {  // a foreach copy from or to the host
  bool elsewhere = false;
  for (const auto& value : call.arguments)
    each_tensor(value, [&](const at::Tensor& t) { elsewhere = elsewhere || t.device().type() != kType; });
  if (!call.about.is_foreach_copy || !elsewhere) return false;
  const auto to = call.arguments[0].toTensorVector(), from = call.arguments[1].toTensorVector();
  for (size_t at = 0; at < to.size(); ++at) to[at].copy_(from[at], call.arguments[2].toBool());
  return true;
}

inline void run(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const std::vector<c10::IValue> given(stack->end() - static_cast<long>(count), stack->end());
  const Call call(op, about(op), given);
  const int before = std::exchange(current_device, call.device);  // what it allocates is there
  auto back = std::shared_ptr<void>(nullptr, [before](void*) { current_device = before; });
  std::vector<c10::IValue> returned;
  if (!copied_one_by_one(call)) {
    std::optional<std::vector<Result>> results(std::vector<Result>{});
    const bool waits = call.about.reads_back || call.indexes_by_mask();
    if (!waits && (call.about.returns_new || grows_its_result(call))) results = tried_with_zeros(call);
    if (results) grow(call, *results);
    returned = waits || !results ? run_and_wait(call, waits) : run_later(call, *results);
  }
  torch::jit::drop(*stack, count);
  for (auto& value : returned) stack->push_back(std::move(value));
}

}  // namespace emu

// A backend of collectives that treats streams as NCCL does.
//
// A collective waits, on a stream of its own, for what is enqueued on the caller's current stream, runs there, and is
// waited for by streams: `wait()` returns at once and makes the caller's current stream wait. The future of a work is
// complete from the start and carries an event; callbacks run on a stream that waits for it. AVG is known. The bytes travel
// by Gloo, on the thread of that stream. As with NCCL, each device has a communicator of its own, here a Gloo group, made
// in the order in which devices are used first: a rank may use another device than its peers.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "operators.h"

namespace emu {

using c10d::OpType;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

struct Outcome {
  MomentPtr begun = std::make_shared<Moment>(), end;
  std::mutex lock;
  std::exception_ptr problem;

  void fail(std::exception_ptr error) {
    std::lock_guard<std::mutex> hold(lock);
    problem = std::move(error);
  }
  std::exception_ptr error() {
    std::lock_guard<std::mutex> hold(lock);
    return problem;
  }
};

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, int device, std::shared_ptr<Outcome> outcome, Tensors outputs, uint64_t number)
      : c10d::Work(rank, type), device_(device), outcome_(std::move(outcome)), outputs_(std::move(outputs)), number_(number) {}

  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (retrieveOpType() == OpType::BARRIER || timeout > kNoTimeout) host_wait(device_, *outcome_->end, "work.wait");
    return true;
  }
  void synchronize() override {
    if (auto error = outcome_->error()) std::rethrow_exception(error);
    worker(current_stream(device_)).await(outcome_->end);
  }
  void blockCurrentStream() { synchronize(); }  // torch 2.8 does not have it
  bool isCompleted() override {
    ++counters().queries;
    return outcome_->end->query();
  }
  bool isSuccess() const override { return !outcome_->error(); }
  std::exception_ptr exception() const override { return outcome_->error(); }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  float getDuration() const override {
    return std::chrono::duration<float, std::milli>(outcome_->end->at - outcome_->begun->at).count();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  const int device_;
  const std::shared_ptr<Outcome> outcome_;
  const Tensors outputs_;
  const uint64_t number_;
};

inline Tensors views_of(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(kernel_view(tensor));
  return views;
}

inline void finished(const c10::intrusive_ptr<c10d::Work>& work) { work->wait(); }

// Sums of half precision are made in single precision and rounded once.
inline void all_reduce(c10d::Backend& over, at::Tensor tensor, c10d::AllreduceOptions options) {
  const bool average = options.reduceOp == c10d::ReduceOp::AVG;
  if (average) options.reduceOp = c10d::ReduceOp::SUM;
  const bool half = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  const bool copies = half || !tensor.is_contiguous();
  Tensors one{half ? tensor.to(at::kFloat) : tensor.contiguous()};
  finished(over.allreduce(one, options));
  if (average && at::isIntegralType(one[0].scalar_type(), true))
    one[0].div_(over.getSize(), "trunc");
  else if (average)
    one[0].div_(over.getSize());
  if (copies) tensor.copy_(one[0]);
}

class Group final : public c10d::Backend {
 public:
  using Body = std::function<void(c10d::Backend&)>;
  using c10d::Backend::allreduce;

  Group(std::vector<BackendPtr> over, std::string name)
      : c10d::Backend(over[0]->getRank(), over[0]->getSize()), over_(std::move(over)), name_(std::move(name)) {
    for (auto& id : lanes_) id = id_of_its_own();
  }

  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) {  // nor this
    auto set = [timeout](auto& one) {
      if constexpr (requires { one.setTimeout(timeout); }) one.setTimeout(timeout);
    };
    for (auto& one : over_) set(*one);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  c10::Stream lane(int device) const { return stream_of(device, lanes_[device]); }

  // Sends and receives in between begin together, so that two ranks can exchange.
  void startCoalescing() override { together_.emplace(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    auto exchanges = std::exchange(together_, std::nullopt).value_or(Exchanges());
    return enqueue(OpType::COALESCED, "coalesced", last_device_, exchanges.touched, {}, [all = exchanges.begin](c10d::Backend& over) {
      std::vector<c10::intrusive_ptr<c10d::Work>> begun;
      for (const auto& one : all) begun.push_back(one(over));
      for (const auto& one : begun) finished(one);
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return on(OpType::ALLREDUCE, "all_reduce", tensors, tensors, [v = views_of(tensors), options](c10d::Backend& over) {
      for (const auto& view : v) all_reduce(over, view, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return on(OpType::BROADCAST, "broadcast", tensors, tensors, [v = views_of(tensors), options](c10d::Backend& over) {
      for (const auto& view : v) {
        Tensors one{view.contiguous()};
        finished(over.broadcast(one, options));
        if (!view.is_contiguous()) view.copy_(one[0]);
      }
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    const bool mine = options.rootRank == getRank();
    return on(OpType::REDUCE, "reduce", tensors, tensors, [v = views_of(tensors), all, mine](c10d::Backend& over) {
      for (const auto& view : v) {
        const auto sum = mine ? view : view.clone();
        all_reduce(over, sum, all);
      }
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto in = views_of(inputs), out = views_of(outputs.at(0));
    return on(OpType::ALLGATHER, "all_gather", joined(inputs, outputs[0]), outputs[0], [in, out, options](c10d::Backend& over) {
      gather_all(over, in[0], out, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto in = kernel_view(input), out = kernel_view(output);
    return on(OpType::_ALLGATHER_BASE, "all_gather", {input, output}, {output}, [in, out, options](c10d::Backend& over) {
      gather_all(over, in, parts_of(out, over.getSize(), in), options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    c10::intrusive_ptr<c10d::Work> last;
    for (size_t at = 0; at < inputs.size(); ++at) last = _allgather_base(outputs[at], inputs[at], options);
    return last;
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto in = views_of(inputs.at(0));
    auto out = kernel_view(outputs.at(0));
    return scatter_sums(OpType::REDUCE_SCATTER, joined(inputs[0], outputs), outputs, in, out, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto out = kernel_view(output);
    auto in = parts_of(kernel_view(input), getSize(), out);
    return scatter_sums(OpType::_REDUCE_SCATTER_BASE, {input, output}, {output}, in, out, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    c10::intrusive_ptr<c10d::Work> last;
    for (size_t at = 0; at < inputs.size(); ++at) last = _reduce_scatter_base(outputs[at], inputs[at], options);
    return last;
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto in = kernel_view(input), out = kernel_view(output);
    return on(OpType::ALLTOALL_BASE, "all_to_all", {input, output}, {output}, [=](c10d::Backend& over) mutable {
      finished(over.alltoall_base(out, in, out_sizes, in_sizes, options));
    });
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return exchange(OpType::SEND, "send", tensors, {}, [v = views_of(tensors), to, tag](c10d::Backend& over) mutable {
      return over.send(v, to, tag);
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return exchange(OpType::RECV, "recv", tensors, tensors, [v = views_of(tensors), from, tag](c10d::Backend& over) mutable {
      return over.recv(v, from, tag);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return enqueue(OpType::BARRIER, "barrier", current_device, {}, {}, [](c10d::Backend& over) { finished(over.barrier()); });
  }

 private:
  using Begin = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;
  struct Exchanges {
    std::vector<Begin> begin;
    Tensors touched;
  };

  c10::intrusive_ptr<c10d::Work> exchange(OpType type, const char* name, const Tensors& touched, const Tensors& outputs, Begin begin) {
    if (!together_) return on(type, name, touched, outputs, [begin](c10d::Backend& over) { finished(begin(over)); });
    together_->begin.push_back(std::move(begin));
    together_->touched.insert(together_->touched.end(), touched.begin(), touched.end());
    last_device_ = touched.at(0).device().index();
    return {};
  }
  static Tensors joined(Tensors some, const Tensors& more) {
    some.insert(some.end(), more.begin(), more.end());
    return some;
  }
  static Tensors parts_of(const at::Tensor& whole, int count, const at::Tensor& like) {
    Tensors parts;
    for (const auto& part : whole.view({count, -1}).unbind()) parts.push_back(part.view_as(like));
    return parts;
  }
  static void gather_all(c10d::Backend& over, const at::Tensor& in, const Tensors& out, const c10d::AllgatherOptions& options) {
    Tensors inputs{in.contiguous()};
    std::vector<Tensors> outputs(1);
    for (const auto& one : out) outputs[0].push_back(at::empty(one.sizes(), one.options()));
    finished(over.allgather(outputs, inputs, options));
    for (size_t at = 0; at < out.size(); ++at) out[at].copy_(outputs[0][at]);
  }
  c10::intrusive_ptr<c10d::Work> scatter_sums(
      OpType type, const Tensors& touched, const Tensors& outputs, Tensors in, at::Tensor out, const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    return on(type, "reduce_scatter", touched, outputs, [in, out, all](c10d::Backend& over) mutable {
      auto sums = at::stack(in);
      all_reduce(over, sums, all);
      out.copy_(sums[over.getRank()]);
    });
  }

  c10::intrusive_ptr<c10d::Work> on(OpType type, const char* name, const Tensors& touched, const Tensors& outputs, Body body) {
    for (const auto& tensor : touched)
      TORCH_CHECK(
          tensor.device() == touched.at(0).device() && tensor.device().type() == kType,
          "emu: the tensors of one collective must be on one device of emu, not on ", tensor.device());
    return enqueue(type, name, touched.at(0).device().index(), touched, outputs, std::move(body));
  }

  c10::intrusive_ptr<c10d::Work> enqueue(
      OpType type, const char* name, int device, const Tensors& touched, const Tensors& outputs, Body body) {
    failure(device).raise();
    ++counters().collectives;
    last_device_ = device;
    const auto stream = lane(device);
    for (const auto& tensor : touched) Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    worker(stream).await(worker(current_stream(device)).mark());
    auto outcome = std::make_shared<Outcome>();
    auto run = [outcome, device, over = communicator(device), body = std::move(body)] {
      outcome->begun->finish();
      try {
        body(*over);
      } catch (...) {
        outcome->fail(std::current_exception());
        failure(device).stay();
        throw;
      }
    };
    worker(stream).push({name, std::move(run), counters().collective_delay_ns.load()});
    outcome->end = worker(stream).mark();
    auto work = c10::make_intrusive<Work>(getRank(), type, device, outcome, outputs, ++number_);
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    const c10::StreamGuard there(stream);
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  BackendPtr communicator(int device) {
    std::lock_guard<std::mutex> hold(lock_);
    if (number_of_[device] < 0) number_of_[device] = used_++;
    return over_[number_of_[device]];
  }

  std::mutex lock_;
  int used_ = 0, number_of_[kDevices] = {-1, -1};
  const std::vector<BackendPtr> over_;
  const std::string name_;
  c10::StreamId lanes_[kDevices];
  std::atomic<uint64_t> number_{0};
  std::atomic<int> last_device_{0};
  std::optional<Exchanges> together_;
};

}  // namespace emu

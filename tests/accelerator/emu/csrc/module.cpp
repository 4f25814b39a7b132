// What Python sees of the emulated device; the package `emu` gives it the names that torch expects.

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "group.h"

namespace py = pybind11;

C10_REGISTER_GUARD_IMPL(PrivateUse1, emu::Guard)

namespace {

using emu::counters;

py::dict read_counters() {
  auto& all = counters();
  py::dict found;
  found["kernels"] = all.kernels.load();
  found["copies"] = all.copies.load();
  found["collectives"] = all.collectives.load();
  found["host_syncs"] = all.host_syncs.load();
  found["queries"] = all.queries.load();
  found["unforeseen_waits"] = all.unforeseen_waits.load();
  return found;
}

std::vector<std::string> take_sync_reasons() {
  std::lock_guard<std::mutex> hold(counters().lock);
  return std::exchange(counters().sync_reasons, {});
}

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

// Python on a stream: the function is called by the stream's thread when its turn comes.
void launch_python(const c10::Stream& stream, py::function function) {
  auto* kept = new py::function(std::move(function));  // its end needs the interpreter's lock too
  emu::launch(stream.device_index(), "python", [kept] {
    const py::gil_scoped_acquire locked;
    std::unique_ptr<py::function> call(kept);
    try {
      (*call)();
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  });
}

struct Gate {
  emu::MomentPtr opened = std::make_shared<emu::Moment>();
  explicit Gate(const c10::Stream& stream) {
    emu::worker(stream).push({"gate", [gate = opened] { gate->wait(); }});
  }
};

void register_with_torch() {
  static auto* hooks = new emu::Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  c10::SetAllocator(emu::kType, &emu::allocator());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_with_torch();
  m.attr("DEVICES") = emu::kDevices;
  m.def("in_use", [] { return emu::in_use().load(); });
  m.def("counters", &read_counters);
  m.def("take_sync_reasons", &take_sync_reasons);
  m.def("set_kernel_delay", [](double s) { counters().kernel_delay_ns = nanoseconds(s); });
  m.def("set_collective_delay", [](double s) { counters().collective_delay_ns = nanoseconds(s); });
  m.def("set_sync_is_error", [](bool on) { return counters().sync_is_error.exchange(on); });
  m.def("set_poison", [](bool on) { counters().poison = on; });
  m.def("close", [] { counters().closing = true; });
  m.def("current_device", [] { return emu::current_device; });
  m.def("set_device", [](int at) { emu::Guard().setDevice({emu::kType, static_cast<c10::DeviceIndex>(at)}); });
  m.def("synchronize", [](int at) { emu::synchronize_device(at, "device.synchronize"); });
  m.def("memory_allocated", [](int at) { return emu::memory(at).used(); });
  m.def("set_memory_limit", [](int at, size_t bytes) { emu::memory(at).limit = bytes; });
  m.def("memory_limit", [](int at) { return emu::memory(at).limit.load(); });
  m.def("pin", &emu::pin);
  m.def("unpin", &emu::unpin);
  m.def("default_generator", [](int at) { return emu::default_generator(at); });
  m.def("launch", &launch_python);
  m.def("kernel_view", &emu::kernel_view);
  py::class_<Gate>(m, "Gate").def(py::init<const c10::Stream&>()).def("open", [](Gate& gate) { gate.opened->finish(); });
  auto backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<emu::Group, c10::intrusive_ptr<emu::Group>>(m, "Group", backend)
      .def(py::init<std::vector<emu::BackendPtr>, std::string>())
      .def("lane", &emu::Group::lane);
}

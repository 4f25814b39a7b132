// What torch asks of a device: its guard (devices, streams, events), its hooks, its random number generator.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace emu {

// Its numbers stay on the host: a random kernel draws one seed from it when it is launched.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex device) {
    device_ = c10::Device(kType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

inline at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(device < 0 ? current_device : device);
}

inline uint64_t draw_seed(at::Generator generator) {
  std::lock_guard<std::mutex> hold(generator.mutex());
  return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl())->random64();
}

struct Event {
  MomentPtr moment;
  bool timed;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < kDevices, "emu: there is no device ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return pooled(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return pooled(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto id = std::exchange(current_ids[stream.device_index()], stream.id());
    return stream_of(stream.device_index(), id);
  }
  bool queryStream(const c10::Stream& stream) const override {
    ++counters().queries;
    return worker(stream).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(stream.device_index(), *worker(stream).mark(), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device : device, "device.synchronize");
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->moment = worker(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto moment = recorded(event)) worker(stream).await(moment);
  }
  bool queryEvent(void* event) const override {
    ++counters().queries;
    auto moment = recorded(event);
    return !moment || moment->query();
  }
  void synchronizeEvent(void* event) const override {
    if (auto moment = recorded(event)) host_wait(current_device, *moment, "event.synchronize");
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto begin = recorded(first), end = recorded(second);
    TORCH_CHECK(begin && end, "emu: both events must be recorded before their distance is asked for");
    TORCH_CHECK(
        static_cast<Event*>(first)->timed && static_cast<Event*>(second)->timed,
        "emu: both events must be made with enable_timing=True");
    TORCH_CHECK(begin->query() && end->query(), "emu: both events must be done before their distance is asked for");
    return std::chrono::duration<double, std::milli>(end->at - begin->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get()) memory(stream.device_index()).used_by(static_cast<char*>(data.get()), stream.id());
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream pooled(c10::Device device) { return stream_of(index(device), id_from_pool()); }
  static MomentPtr recorded(void* event) { return event ? static_cast<Event*>(event)->moment : nullptr; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }
  at::Device getDeviceFromPtr(void* at) const override {
    const int device = device_at(at);
    TORCH_CHECK(device >= 0, "emu: this address is none of the device's");
    return {kType, static_cast<c10::DeviceIndex>(device)};
  }
  bool isPinnedPtr(const void* at) const override { return pinned().has(at); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace emu

// Streams, events and what the host does with them.
//
// A stream is a queue of items and one thread that runs them in order. A kernel is an item that sleeps before it runs, for
// as long as `kernel_delay` says: who reads too early reads old numbers. An event is a shared flag that an item of one
// stream sets and items of other streams, or the host, wait for; a new recording is a new flag, so a wait that began before
// belongs to the old one. Every wait of the host is counted with its reason, and may be made an error (`sync_is_error`).
//
// An item that throws does not end its thread. The error is kept, and raised by the next thing that the host asks of that
// device, as with CUDA.
#pragma once

#include <Python.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace emu {

constexpr int kDevices = 2;
constexpr int kPool = 8;  // streams that are handed out in turn, beside the default one, which is 0
constexpr auto kType = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;

struct Counters {
  std::atomic<int64_t> kernels{0}, copies{0}, collectives{0}, host_syncs{0}, queries{0}, unforeseen_waits{0};
  std::atomic<int64_t> kernel_delay_ns{0}, collective_delay_ns{0};
  std::atomic<bool> sync_is_error{false}, poison{true}, closing{false};
  std::mutex lock;
  std::vector<std::string> sync_reasons;  // the last ones
};

inline Counters& counters() {
  static auto* all = new Counters();  // leaked, as all that threads use which outlive main()
  return *all;
}

struct Moment {
  std::mutex lock;
  std::condition_variable reached;
  bool done = false;
  Clock::time_point at;

  void finish() {
    {
      std::lock_guard<std::mutex> hold(lock);
      done = true;
      at = Clock::now();
    }
    reached.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock);
    reached.wait(hold, [this] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> hold(lock);
    return done;
  }
};
using MomentPtr = std::shared_ptr<Moment>;

class Failure {  // the first error of a device that nobody has seen yet
 public:
  void keep(const std::string& text) {
    std::lock_guard<std::mutex> hold(lock_);
    if (!there_.exchange(true)) text_ = text;
  }
  // What was to be received has not come, and nothing that follows can be right: every later call raises, too.
  void stay() { stays_ = true; }
  void raise() {
    if (!there_.load(std::memory_order_relaxed)) return;
    std::lock_guard<std::mutex> hold(lock_);
    if (there_.exchange(stays_)) TORCH_CHECK(false, "emu: an earlier kernel failed, asynchronously: ", text_);
  }

 private:
  std::mutex lock_;
  std::atomic<bool> there_{false}, stays_{false};
  std::string text_;
};

inline Failure& failure(int device) {
  static auto* all = new Failure[kDevices];
  return all[device];
}

struct Item {
  std::string name;
  std::function<void()> run;
  int64_t sleep_ns = 0;
};

inline std::atomic<bool>& in_use() {  // a process that uses the device cannot be forked
  static std::atomic<bool> flag{false};
  return flag;
}

class Worker {
 public:
  explicit Worker(int device) : device_(device) {}

  void push(Item item) {
    std::lock_guard<std::mutex> hold(lock_);
    if (!started_) start();
    items_.push_back(std::move(item));
    ++waiting_;
    there_is_one_.notify_one();
  }
  bool idle() {
    std::lock_guard<std::mutex> hold(lock_);
    return waiting_ == 0;
  }
  MomentPtr mark() {
    auto moment = std::make_shared<Moment>();
    push({"event", [moment] { moment->finish(); }});
    return moment;
  }
  void await(const MomentPtr& moment) {
    if (!moment->query()) push({"wait", [moment] { moment->wait(); }});
  }

 private:
  void start();
  void serve();

  const int device_;
  std::mutex lock_;
  std::condition_variable there_is_one_;
  std::deque<Item> items_;
  int64_t waiting_ = 0;  // with the one that runs
  bool started_ = false;
};

inline void enter_thread();  // kernels.h: what an operator needs of the thread that calls it

inline void Worker::start() {
  static const pid_t owner = getpid();
  TORCH_CHECK(owner == getpid(), "emu: this process was forked from one that had used the device; spawn it instead");
  started_ = in_use() = true;
  std::thread([this] { serve(); }).detach();
}

inline void Worker::serve() {
  if (auto* one_thread = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) one_thread(1);
  enter_thread();
  while (true) {
    Item item;
    {
      std::unique_lock<std::mutex> hold(lock_);
      there_is_one_.wait(hold, [this] { return !items_.empty(); });
      item = std::move(items_.front());
      items_.pop_front();
    }
    while (counters().closing) pause();  // the interpreter ends; its memory may go at any time
    try {
      if (item.sleep_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(item.sleep_ns));
      item.run();
    } catch (const std::exception& error) {
      failure(device_).keep(item.name + ": " + error.what());
    }
    item.run = nullptr;  // what it held is free before the stream counts as idle
    std::lock_guard<std::mutex> hold(lock_);
    --waiting_;
  }
}

// --- the streams of all devices ----------------------------------------------------------------------

struct Streams {
  std::mutex lock;
  std::map<c10::StreamId, std::unique_ptr<Worker>> of[kDevices];
  std::atomic<int> next_of_pool{0};
  std::atomic<int> next_own{kPool + 1};
};

inline Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

inline Worker& worker(int device, c10::StreamId id) {
  TORCH_CHECK(device >= 0 && device < kDevices, "emu: there is no device ", device);
  std::lock_guard<std::mutex> hold(streams().lock);
  auto& found = streams().of[device][id];
  if (!found) found = std::make_unique<Worker>(device);
  return *found;
}
inline Worker& worker(const c10::Stream& stream) { return worker(stream.device_index(), stream.id()); }

inline c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}
inline c10::StreamId id_from_pool() { return 1 + streams().next_of_pool++ % kPool; }
inline c10::StreamId id_of_its_own() { return streams().next_own++; }

inline thread_local int current_device = 0;
inline thread_local c10::StreamId current_ids[kDevices] = {};

inline c10::Stream current_stream(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "emu: there is no device ", device);
  return stream_of(device, current_ids[device]);
}

// --- the host waits -----------------------------------------------------------------------------------

inline void count_sync(const std::string& reason) {
  auto& all = counters();
  TORCH_CHECK(!all.sync_is_error, "emu: a synchronising operation while these are errors: ", reason);
  ++all.host_syncs;
  std::lock_guard<std::mutex> hold(all.lock);
  if (all.sync_reasons.size() >= 1000) all.sync_reasons.erase(all.sync_reasons.begin());
  all.sync_reasons.push_back(reason);
}

inline void wait_without_gil(Moment& moment) {
  if (moment.query()) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    moment.wait();
    PyEval_RestoreThread(state);
  } else {
    moment.wait();
  }
}

inline void host_wait(int device, Moment& moment, const std::string& reason) {
  count_sync(reason);
  wait_without_gil(moment);
  failure(device).raise();
}

inline void synchronize_device(int device, const std::string& reason) {
  count_sync(reason);
  std::vector<MomentPtr> ends;
  {
    std::lock_guard<std::mutex> hold(streams().lock);
    for (auto& [id, one] : streams().of[device])
      if (!one->idle()) ends.push_back(one->mark());
  }
  for (auto& end : ends) wait_without_gil(*end);
  failure(device).raise();
}

}  // namespace emu

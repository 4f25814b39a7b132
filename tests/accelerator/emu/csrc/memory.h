// Memory that the host cannot touch, and its allocator.
//
// A device has a range of addresses without any access rights: its tensors point there, and a host that reads one is
// killed (SIGSEGV). The bytes lie elsewhere, at a constant distance that only kernels know (`inside`).
//
// Blocks are handed out and taken back in the order of a stream, without waiting: what is freed may be reused at once by
// the same stream. A block that other streams use must be said so (`record_stream`), as with CUDA; it is then reused when
// these are done. What is handed out is filled with NaN, in the order of the stream.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <unordered_map>

#include "streams.h"

namespace emu {

constexpr size_t kRegion = size_t{8} << 30;  // addresses, not memory
constexpr size_t kUnit = 512;

struct Block {
  size_t size;
  c10::StreamId stream;
  std::set<c10::StreamId> others;
};

struct Freed {
  char* at;
  Block block;
  std::vector<MomentPtr> until;
};

class Memory {
 public:
  explicit Memory(int device) : device_(device) {
    outside_ = map(PROT_NONE);
    inside_ = map(PROT_READ | PROT_WRITE);
  }

  bool has(const void* at) const { return at >= outside_ && at < outside_ + kRegion; }
  void* inside(void* at) const { return inside_ + (static_cast<char*>(at) - outside_); }

  char* take(size_t bytes, c10::StreamId stream) {
    const size_t size = (bytes + kUnit - 1) / kUnit * kUnit;
    char* at = nullptr;
    {
      std::lock_guard<std::mutex> hold(lock_);
      settle();
      auto& free = free_[{stream, size}];
      TORCH_CHECK_WITH(
          OutOfMemoryError, used_ + size <= limit && (!free.empty() || next_ + size <= kRegion),
          "emu out of memory. Tried to allocate ", bytes, " bytes on device ", device_, "; ", used_, " are in use.");
      if (free.empty()) {
        at = outside_ + next_;
        next_ += size;
      } else {
        at = free.back();
        free.pop_back();
      }
      used_ += size;
      blocks_[at] = {size, stream, {}};
    }
    if (counters().poison)
      worker(device_, stream).push({"poison", [to = inside(at), bytes] { std::memset(to, 0xff, bytes); }});
    return at;
  }

  void give_back(char* at) {
    std::lock_guard<std::mutex> hold(lock_);
    auto found = blocks_.find(at);
    Freed freed{at, found->second, {}};
    used_ -= freed.block.size;
    blocks_.erase(found);
    for (auto id : freed.block.others) freed.until.push_back(worker(device_, id).mark());
    freed_.push_back(std::move(freed));
    settle();
  }

  void used_by(char* at, c10::StreamId stream) {
    std::lock_guard<std::mutex> hold(lock_);
    auto found = blocks_.find(at);
    if (found != blocks_.end() && found->second.stream != stream) found->second.others.insert(stream);
  }

  size_t used() {
    std::lock_guard<std::mutex> hold(lock_);
    return used_;
  }

  std::atomic<size_t> limit{kRegion};

 private:
  static char* map(int rights) {
    void* at = mmap(nullptr, kRegion, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "emu: no room for ", kRegion, " bytes of addresses: ", std::strerror(errno));
    madvise(at, kRegion, MADV_DONTDUMP);
    return static_cast<char*>(at);
  }

  void settle() {
    std::vector<Freed> left;
    for (auto& one : freed_) {
      bool done = true;
      for (auto& moment : one.until) done = done && moment->query();
      if (done)
        free_[{one.block.stream, one.block.size}].push_back(one.at);
      else
        left.push_back(std::move(one));
    }
    freed_ = std::move(left);
  }

  const int device_;
  char* outside_;
  char* inside_;
  std::mutex lock_;
  size_t next_ = 0, used_ = 0;
  std::unordered_map<char*, Block> blocks_;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<char*>> free_;
  std::vector<Freed> freed_;
};

inline Memory& memory(int device) {
  static Memory* all[kDevices] = {new Memory(0), new Memory(1)};
  return *all[device];
}

inline int device_at(const void* at) {
  for (int device = 0; device < kDevices; ++device)
    if (memory(device).has(at)) return device;
  return -1;
}

inline void* inside(void* at) {
  const int device = device_at(at);
  return device < 0 ? nullptr : memory(device).inside(at);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    void* at = bytes ? memory(device).take(bytes, current_ids[device]) : nullptr;
    return {at, at, &give_back, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
  }
  static void give_back(void* at) {
    if (at) memory(device_at(at)).give_back(static_cast<char*>(at));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const int device = device_at(to);
    worker(current_stream(device)).push({"copy_data", [=] {
      std::memcpy(inside(to), inside(const_cast<void*>(from)), bytes);
    }});
  }
};

inline Allocator& allocator() {
  static auto* one = new Allocator();
  return *one;
}

// --- pinned memory: the host's own, of which the device knows -----------------------------------------

struct Pinned {
  std::mutex lock;
  std::map<const char*, size_t> blocks;

  bool has(const void* pointer) {
    const auto* at = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> hold(lock);
    auto next = blocks.upper_bound(at);
    if (next == blocks.begin()) return false;
    --next;
    return at < next->first + next->second;
  }
};

inline Pinned& pinned() {
  static auto* one = new Pinned();
  return *one;
}

// Memory that exists already, such as a mapped file.
inline void pin(size_t at, size_t bytes) {
  std::lock_guard<std::mutex> hold(pinned().lock);
  pinned().blocks[reinterpret_cast<const char*>(at)] = bytes;
}
inline void unpin(size_t at) {
  std::lock_guard<std::mutex> hold(pinned().lock);
  pinned().blocks.erase(reinterpret_cast<const char*>(at));
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    TORCH_CHECK(at, "emu: no memory for ", bytes, " pinned bytes");
    std::lock_guard<std::mutex> hold(pinned().lock);
    pinned().blocks[static_cast<char*>(at)] = bytes + 1;
    return {at, at, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  static void give_back(void* at) {
    {
      std::lock_guard<std::mutex> hold(pinned().lock);
      pinned().blocks.erase(static_cast<char*>(at));
    }
    std::free(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

inline PinnedAllocator& pinned_allocator() {
  static auto* one = new PinnedAllocator();
  return *one;
}

// A storage of the device gets another size: what fits of its bytes comes along, in the order of the current stream.
inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const int device = storage->device().index();
  const int before = std::exchange(current_device, device);
  c10::DataPtr grown = allocator().allocate(bytes);
  current_device = before;
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept) {
    worker(current_stream(device)).push({"resize", [to = inside(grown.get()), from = inside(storage->mutable_data()), kept] {
      std::memcpy(to, from, kept);
    }});
  }
  storage->set_data_ptr_noswap(std::move(grown));
  storage->set_nbytes(bytes);
}

}  // namespace emu

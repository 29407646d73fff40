// Memory for large tensors from one address range, which keeps free memory. See training/memory.
//
// A PyTorch allocator: while enabled it serves large tensors, and PyTorch's own serves the rest. Adjacent free spans
// are merged, and a tensor takes the smallest span that fits, the first of equal ones. All sizes are multiples of 64
// bytes, so that a tensor fits into the space of one of the same size.

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kUnit = 64, kLarge = 256 << 10;

class Range {
 public:
  // Reserves addresses for `size` bytes of tensors. The kernel allocates memory when they are used.
  bool keep(size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    return keeps_ = first_ || reserve(size);
  }

  // Return free memory, and stay enabled.
  void trim_all() {
    std::lock_guard<std::mutex> guard(mutex_);
    trim_spans();
  }

  // Disable, and return free memory; with the last tensor also the addresses.
  void let_go() {
    std::lock_guard<std::mutex> guard(mutex_);
    trim_spans();
    keeps_ = false;
    if (taken_.empty()) unmap();
  }

  // Null if no span is large enough, or if disabled.
  void* take(size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto best = by_size_.lower_bound({size, 0});
    if (!keeps_ || best == by_size_.end()) return nullptr;
    auto [length, start] = *best;
    remove(start, length);
    if (length > size) add(start + size, length - size);
    taken_.emplace(start, size);
    return reinterpret_cast<void*>(start);
  }

  bool holds(void* place) const {
    auto start = reinterpret_cast<uintptr_t>(place);
    return first_ <= start && start < last_;
  }

  // Frees a pointer. False if it is not from this range.
  bool give(void* place) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto start = reinterpret_cast<uintptr_t>(place);
    auto tensor = taken_.extract(start);
    if (tensor.empty()) return false;
    c10::profiledCPUMemoryReporter().Delete(place);  // before another tensor may lie there
    auto size = tensor.mapped();
    auto next = by_start_.lower_bound(start);
    if (next != by_start_.begin()) {
      auto [before, length] = *std::prev(next);
      if (before + length == start) {
        remove(before, length);
        start = before;
        size += length;
      }
    }
    if (next != by_start_.end() && next->first == start + size) {
      auto length = next->second;
      remove(next->first, length);
      size += length;
    }
    add(start, size);
    if (!keeps_) trim(start, size);
    if (!keeps_ && taken_.empty()) unmap();
    return true;
  }

  std::mutex mutex_;

 private:
  bool reserve(size_t size) {
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return false;
    madvise(start, size, MADV_HUGEPAGE);
    first_ = reinterpret_cast<uintptr_t>(start);
    last_ = first_ + size;
    add(first_, size);
    return true;
  }

  void unmap() {
    if (first_) munmap(reinterpret_cast<void*>(first_.load()), last_ - first_);
    by_start_.clear();
    by_size_.clear();
    first_ = last_ = 0;
  }

  void trim_spans() {
    for (auto [start, size] : by_start_) trim(start, size);
  }

  static void trim(uintptr_t start, size_t size) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    auto first = (start + page - 1) / page * page, last = (start + size) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }

  void add(uintptr_t start, size_t size) {
    by_start_.emplace(start, size);
    by_size_.emplace(size, start);
  }

  void remove(uintptr_t start, size_t size) {
    by_start_.erase(start);
    by_size_.erase({size, start});
  }

  bool keeps_ = false;
  std::atomic<uintptr_t> first_{0}, last_{0};
  std::unordered_map<uintptr_t, size_t> taken_;
  std::map<uintptr_t, size_t> by_start_;
  std::set<std::pair<size_t, uintptr_t>> by_size_;
};

Range& range() {
  static auto* only = new Range;  // tensors may outlive what ends with the process
  return *only;
}

void release(void* place) {
  if (!range().holds(place) || !range().give(place)) c10::GetDefaultCPUAllocator()->raw_deleter()(place);
}

class Keeping final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* place = nullptr;
    if (size >= kLarge) place = range().take((size + kUnit - 1) / kUnit * kUnit);
    if (!place) return c10::GetDefaultCPUAllocator()->allocate(size);
    c10::profiledCPUMemoryReporter().New(place, size);
    return {place, place, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

}  // namespace

// Enable, with a range of `size` bytes of addresses. 0 if it cannot be reserved.
extern "C" int keep_tensors(size_t size) {
  static const bool is_set = [] {
    // A lock held by another thread during a fork would never be released in the child.
    pthread_atfork([] { range().mutex_.lock(); }, [] { range().mutex_.unlock(); }, [] { range().mutex_.unlock(); });
    c10::SetCPUAllocator(new Keeping, 1);
    return true;
  }();
  return is_set && range().keep(size);
}

// Return free memory, and keep memory freed from now on.
extern "C" void trim_tensors() { range().trim_all(); }

// Disable, and return free memory.
extern "C" void let_tensors_go() { range().let_go(); }

// Parallel regions in the threads of torch.
//
// A second OpenMP beside torch's would start threads of its own, which take the cores from torch's. So these are functions of
// the very library that torch has loaded, found when this one is loaded.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <type_traits>

namespace multilora {

// The functions of torch's OpenMP by their standard names, and the region that GCC makes of `#pragma omp parallel`.
// Source: OpenMP Application Programming Interface 5.2, chapter 18; GNU libgomp, "The libgomp ABI".
struct OpenMp {
  int (*omp_get_max_threads)();
  int (*omp_get_num_threads)();
  int (*omp_get_thread_num)();
  int (*omp_in_parallel)();
  void (*GOMP_parallel)(void (*body)(void*), void* argument, unsigned num_threads, unsigned flags);
};

extern OpenMp openmp;

// Finds them. Raises Error where torch has no OpenMP.
void find_openmp();

inline bool in_parallel_region() { return openmp.omp_in_parallel(); }

// Threads of a region that this thread would begin.
inline int64_t num_threads() { return openmp.omp_get_max_threads(); }

// Calls body(begin, end) for parts of begin .. end - 1, one of each thread and of at least `grain` numbers, or all of them at
// once where that is not worth a region, or within one. Raises the error of one of the calls.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (begin >= end) {
    return;
  }
  const int64_t count = end - begin;
  if (count <= grain || count == 1 || in_parallel_region() || num_threads() == 1) {
    return body(begin, end);
  }
  struct Region {
    int64_t begin, end, grain;
    const Body& body;
    std::atomic<bool> has_failed{false};
    std::exception_ptr error;

    void run() {
      const int64_t all = end - begin;
      const int64_t threads = std::min<int64_t>(openmp.omp_get_num_threads(), (all + grain - 1) / grain);
      const int64_t size = (all + threads - 1) / threads, first = begin + openmp.omp_get_thread_num() * size;
      if (first >= end) {
        return;
      }
      try {
        body(first, std::min(end, first + size));
      } catch (...) {
        if (!has_failed.exchange(true)) {
          error = std::current_exception();
        }
      }
    }
  } region{begin, end, std::max<int64_t>(1, grain), body};
  openmp.GOMP_parallel([](void* it) { static_cast<Region*>(it)->run(); }, &region, 0, 0);
  if (region.error) {
    std::rethrow_exception(region.error);
  }
}

}  // namespace multilora

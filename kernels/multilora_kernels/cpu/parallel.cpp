#include "parallel.h"

#include <dlfcn.h>

#include "checks.h"

namespace multilora {

OpenMp openmp;

void find_openmp() {
  // A handle finds the functions of all libraries that its own needs, under whichever name torch brings its OpenMP.
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  MULTILORA_CHECK(torch, "torch has loaded no libtorch_cpu.so");
  const auto find = [&](auto& function, const char* name) {
    void* place = dlsym(torch, name);
    MULTILORA_CHECK(place, "torch's libraries have no ", name, ": its parallel regions are not OpenMP's");
    function = reinterpret_cast<std::decay_t<decltype(function)>>(place);
  };
  find(openmp.omp_get_max_threads, "omp_get_max_threads");
  find(openmp.omp_get_num_threads, "omp_get_num_threads");
  find(openmp.omp_get_thread_num, "omp_get_thread_num");
  find(openmp.omp_in_parallel, "omp_in_parallel");
  find(openmp.GOMP_parallel, "GOMP_parallel");
}

}  // namespace multilora

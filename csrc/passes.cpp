// Picks the widest passes that this processor runs.
#include "passes.h"

#include <cstdlib>
#include <cstring>

namespace ring_reduce {

namespace {

const Passes& widest_passes() {
#if defined(__x86_64__)
  // For tests of the narrower passes; a wider one than the processor has can't be asked for.
  const char* limit = std::getenv("RING_REDUCE_ISA");
  const auto allowed = [limit](const char* isa) { return limit == nullptr || std::strcmp(limit, isa) == 0; };
  if (allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return avx512_passes();
  }
  // Every processor with AVX2 has F16C; clang's builtin does not know the name.
  if (allowed("avx2") && __builtin_cpu_supports("avx2")) return avx2_passes();
#endif
  return baseline_passes();
}

}  // namespace

const Passes& passes() {
  static const Passes& widest = widest_passes();
  return widest;
}

}  // namespace ring_reduce

#if defined(__x86_64__)

#define DYNORM_SET avx512
#define DYNORM_VECTOR "vector_avx512.h"
#include "kernels.h"

const dynorm::Kernels& dynorm::kernels_avx512() {
  static const Kernels table = avx512::make("cpu-avx512");
  return table;
}

#endif

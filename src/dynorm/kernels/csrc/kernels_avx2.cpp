#if defined(__x86_64__)

#define DYNORM_SET avx2
#define DYNORM_VECTOR "vector_avx2.h"
#include "kernels.h"

const dynorm::Kernels& dynorm::kernels_avx2() {
  static const Kernels table = avx2::make("cpu-avx2");
  return table;
}

#endif

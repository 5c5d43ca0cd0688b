#define DYNORM_SET portable
#define DYNORM_VECTOR "vector_portable.h"
#include "kernels.h"

const dynorm::Kernels& dynorm::kernels_portable() {
  static const Kernels table = portable::make("cpu-portable");
  return table;
}

// For processors without kernels of their own.
#include "collectives/kernels.h"

namespace sparkhvd {

const KernelTable& FastestKernels() { return GenericKernels(); }

}  // namespace sparkhvd

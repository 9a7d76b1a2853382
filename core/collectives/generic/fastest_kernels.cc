// The kernel selection for processors without specialized kernels.
#include "collectives/kernels.h"

namespace sparkhvd {

const KernelTable& FastestKernels() { return GenericKernels(); }

}  // namespace sparkhvd

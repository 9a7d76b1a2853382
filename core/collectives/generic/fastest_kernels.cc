// The kernels for processors without specialised ones.
#include "collectives/kernels.h"

namespace sparkhvd {

const KernelTable& FastestKernels() { return GenericKernels(); }

}  // namespace sparkhvd

#include "scheduler/substitute.h"

#include <utility>

#include "collectives/identity.h"

namespace sparkhvd {

std::shared_ptr<Operation> SubstituteFor(const Request& agreed) {
  Request request = agreed;
  request.prescale = 1.0;
  if (request.kind == OperationKind::kAllgather) request.shape[0] = 0;
  const size_t count = ElementCount(request.shape).value_or(0);
  std::vector<std::byte> content(count * SizeOf(request.dtype));
  FillIdentity(request.dtype, request.op, content.data(), count);
  return std::make_shared<Operation>(std::move(request), std::move(content));
}

}  // namespace sparkhvd

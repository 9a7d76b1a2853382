// Registers the methods of Engine that work on the calling thread without negotiation.
#pragma once

#include "bindings/submission_binding.h"

namespace sparkhvd::bindings {

void RegisterDirectCalls(EngineClass& engine);

}  // namespace sparkhvd::bindings

// Registers the methods of Engine that submit operations.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/py_engine.h"

namespace sparkhvd::bindings {

using EngineClass = py::class_<PyEngine, std::shared_ptr<PyEngine>>;

void RegisterSubmissions(EngineClass& engine);

}  // namespace sparkhvd::bindings

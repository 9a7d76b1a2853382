// What a message between two hosts costs.
#pragma once

namespace sparkhvd {

// The numbers by which algorithms are chosen. They are given and not measured: ranks have to choose
// alike, and another choice would round results differently.
struct LinkCosts {
  double per_message = 30e-6;  // seconds
  double per_byte = 0.32e-9;   // seconds; 25 Gbit/s, which the ranks of a host share
};

}  // namespace sparkhvd

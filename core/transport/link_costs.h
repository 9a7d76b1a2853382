// What a message between two hosts costs.
#pragma once

namespace sparkhvd {

// Algorithms are chosen by these costs. The costs are configured instead of measured, because all
// ranks must choose the same algorithm, and a different algorithm would round results differently.
struct LinkCosts {
  double per_message = 30e-6;  // seconds
  double per_byte = 0.32e-9;   // seconds; 25 Gbit/s, which the ranks of a host share
};

}  // namespace sparkhvd

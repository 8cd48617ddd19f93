// Division by numbers that a launch fixes.
#pragma once

#include "ptx.cuh"

// Divides what is below 2^31. Integer division is 40 instructions, one after the other; cluster sizes and the like come
// out of constant memory, 100 cycles each at the start of a kernel.
struct Divisor {
  u32 multiplier;
  int shift;
};

DEVICE int divide(int number, Divisor by) {
  return static_cast<u64>(static_cast<u32>(number)) * by.multiplier >> by.shift;
}

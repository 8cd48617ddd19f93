// Instructions of a relay as functions, one line of PTX each.
#pragma once

#include "ptx.cuh"

DEVICE int load_shared_2(u32 address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

// From shared memory to that of a CTA of the cluster, whose barrier counts the bytes.
DEVICE void copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same of a number.
DEVICE void send_4(u32 address, u32 barrier, float value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

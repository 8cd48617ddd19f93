// Instructions of rows in slices as functions, one line of PTX each.
#pragma once

#include "ptx.cuh"

DEVICE int load_shared_2(u32 address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

// A number to a CTA of the cluster, whose barrier counts the bytes.
DEVICE void send_4(u32 address, u32 barrier, float value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

DEVICE void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// That shared memory has been read, and that what was written is there.
DEVICE void await_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void await_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

DEVICE void store_16(void* target, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE bool mbarrier_test_cluster(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

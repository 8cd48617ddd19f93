// PTX for the CTAs of a cluster, which top-k alone uses.
#pragma once
#include "ptx.cuh"

// Who waits for this reads what the others wrote before to shared memory.
DEVICE void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// To an address of a cluster's shared memory.
DEVICE void store_peer_if(bool condition, u32 target, u64 entry) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.shared::cluster.u64 [%0], %1;\n}" ::"r"(target),
               "l"(entry), "r"(static_cast<u32>(condition))
               : "memory");
}

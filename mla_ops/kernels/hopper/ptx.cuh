// Hopper's instructions as functions, one line of PTX each: barriers, copies, clusters. memory.cuh has loads and stores,
// arithmetic.cuh conversions and arithmetic.
#pragma once

#include "memory.cuh"

// Leaves the size of a kernel's dynamic shared memory in its machine code, without an instruction. The host reads it
// there. tests/test_aot_cuda.py compares it with the layout.
#define EXPORT_SHARED_BYTES(LAYOUT) static __constant__ __attribute__((used)) int shared_bytes = LAYOUT::BYTES

// ---- mbarriers ------------------------------------------------------------------------------------------------------

DEVICE void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A warp's arrival at a barrier, once all of its lanes have read or written what that is about: one arrives for all.
// racecheck knows only of what the arriving lane did, so that builds for it define EVERY_LANE_ARRIVES. A warp counts as
// ARRIVALS_OF_A_WARP.
#ifdef EVERY_LANE_ARRIVES
constexpr u32 ARRIVALS_OF_A_WARP = 32;
#else
constexpr u32 ARRIVALS_OF_A_WARP = 1;
#endif

DEVICE bool arrives(int lane) { return ARRIVALS_OF_A_WARP == 32 || lane == 0; }

DEVICE void warp_arrive(u32 barrier, int lane) {
  if (arrives(lane)) mbarrier_arrive(barrier);
}

DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns when the phase of this parity has completed; parity 1 of a fresh barrier counts as complete. All lanes of a
// warp ask for the same: to bring them together again would take 25 cycles.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra.uni again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether that is so now.
DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The same for what CTAs of the cluster sent.
DEVICE void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra.uni again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- barriers and fences --------------------------------------------------------------------------------------------

template <int ID, int THREADS>
DEVICE void named_barrier() {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

DEVICE void named_barrier(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A named barrier that tells every thread whether any of them brought `value`.
template <int ID, int THREADS>
DEVICE bool named_barrier_any(bool value) {
  u32 any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<u32>(value)), "n"(ID), "n"(THREADS)
      : "memory");
  return any != 0;
}

// Makes this thread's writes to shared memory visible to wgmma and bulk copies.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

template <int REGISTERS>
DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Lets a kernel that was launched to overlap with this one take the places of CTAs that leave: the merge of parts, top-k
// over scores, or the next wave of tokens, which reads nothing that this one writes.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until the kernel in front is over and what it wrote can be read; not at all where this one was not launched to
// overlap.
// The last thing that a wave does: what follows it waits for no other.
DEVICE void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- clusters -------------------------------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same, read where this stands and not kept from before.
DEVICE u32 cluster_rank_here() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of a cluster, in two halves. It orders nothing that a thread wrote: a release would wait for
// its stores to global memory.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A barrier of all threads of a cluster, behind which each reads what the others wrote to shared memory.
DEVICE void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in a peer's shared memory.
template <class T>
DEVICE T* peer_pointer(T* here, u32 rank) {
  T* peer;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(here), "r"(rank));
  return peer;
}

DEVICE u32 peer_address(u32 address, u32 rank) {
  u32 peer;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// An arrival at a barrier of any CTA of the cluster, by an address that `peer_address` gave.
DEVICE void mbarrier_arrive_peer(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same; who waits for it as `mbarrier_wait_cluster` does sees what this thread wrote, to global memory as well.
DEVICE void mbarrier_release_peer(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores to a peer's shared memory; the barrier, which lies there too, counts the bytes when they can be read.
DEVICE void send_float2(u32 address, u32 barrier, float a, float b) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(a), "f"(b), "r"(barrier)
               : "memory");
}

DEVICE void send_16(u32 address, u32 barrier, const u32 (&words)[4]) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}

// An address `here` is this CTA's own, which no barrier counts. All lanes of a warp say the same of it.
DEVICE void send_8_unless(bool here, u32 address, u32 barrier, u32 a, u32 b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "@p bra.uni own;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];\n"
      "bra.uni done;\n"
      "own: st.shared.v2.b32 [%0], {%1, %2};\n"
      "done:\n"
      "}" ::"r"(address),
      "r"(a), "r"(b), "r"(barrier), "r"(static_cast<u32>(here))
      : "memory");
}

DEVICE void send_16_unless(bool here, u32 address, u32 barrier, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %6, 0;\n"
      "@p bra.uni own;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];\n"
      "bra.uni done;\n"
      "own: st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "done:\n"
      "}" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier), "r"(static_cast<u32>(here))
      : "memory");
}

// All lanes of a warp, together. ptxas takes a `__syncwarp` of all lanes for granted where it has just let a branch
// keep them apart, and what the first ones then do to the warp's uniform registers the others find.
DEVICE void converge() {
  u32 all = ~0u;
  asm volatile("" : "+r"(all));
  asm volatile("bar.warp.sync %0;" ::"r"(all) : "memory");
}

// ---- copies ---------------------------------------------------------------------------------------------------------

DEVICE void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

DEVICE void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "%4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The other way, up to what `await_bulk_stores` waits for: that shared memory has been read.
DEVICE void bulk_store(void* destination, u32 source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

DEVICE void await_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// A tensor map as the driver encodes it, for `copy_box`.
struct alignas(64) TensorMap {
  u64 words[16];
};

DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// A box of a tensor in three dims, the fastest first; zeros where it leaves the tensor.
DEVICE void copy_box(u32 destination, const TensorMap& map, int x, int y, int z, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

DEVICE void copy_box(u32 destination, const TensorMap& map, int x, int y, int z, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// The same to one place in the shared memory of each CTA of the cluster that `ctas` has a bit for. Each of them has a
// barrier at one place, which counts the bytes.
DEVICE void copy_box_to(u32 ctas, u32 destination, const TensorMap& map, int x, int y, int z, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(static_cast<unsigned short>(ctas))
      : "memory");
}

// 16 bytes to shared memory, asynchronously, past L1.
DEVICE void copy_16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// The same, with offsets that are the instruction's.
template <int TO, int FROM>
DEVICE void copy_16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(destination), "l"(source), "n"(TO), "n"(FROM)
               : "memory");
}

// The same of `bytes` of them, zeros behind.
template <int TO, int FROM>
DEVICE void copy_16_or_zeros(u32 destination, const void* source, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16, %4;" ::"r"(destination), "l"(source), "n"(TO),
               "n"(FROM), "r"(bytes)
               : "memory");
}

// The same through L1.
template <int TO, int FROM>
DEVICE void copy_16_or_zeros_by_l1(u32 destination, const void* source, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0 + %2], [%1 + %3], 16, %4;" ::"r"(destination), "l"(source), "n"(TO),
               "n"(FROM), "r"(bytes)
               : "memory");
}

DEVICE void copy_8(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source) : "memory");
}

// An arrival at a barrier for this thread once all its copies so far are there.
DEVICE void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies what may begin at any element.
DEVICE void copy_4(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}

DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of this thread's groups of copies but the last one or two; for all at any other number.
DEVICE void wait_for_copies_but(int groups) {
  if (groups == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (groups == 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else
    wait_for_copies();
}

template <int GROUPS>
DEVICE void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

DEVICE void prefetch_to_l2(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source)); }

// Bytes from a multiple of 16 on, 16 or a multiple of it.
DEVICE void prefetch_bulk_to_l2(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

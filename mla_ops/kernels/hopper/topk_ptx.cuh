// PTX that top-k alone uses.
#pragma once
#include "ptx.cuh"

// Sums of what the lanes up to this one have.
DEVICE u32 inclusive_scan(u32 value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    asm volatile(
        "{\n.reg .pred p;\n.reg .u32 t;\nshfl.sync.up.b32 t|p, %0, %1, 0, -1;\n@p add.u32 %0, %0, t;\n}"
        : "+r"(value)
        : "r"(step));
  return value;
}

// One more in a word of shared memory.
DEVICE void count_at(u32 address) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory"); }

DEVICE void count_if(bool condition, u32 address) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}" ::"r"(address),
               "r"(static_cast<u32>(condition))
               : "memory");
}

// The number that a word of shared memory has; it becomes one more.
DEVICE u32 next_number(u32 address) {
  u32 number;
  asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(number) : "r"(address) : "memory");
  return number;
}

// The place of a rank among bins.
struct Place {
  u32 bin, above, inside;
};

// Reads shared memory behind a barrier. The compiler is not told of the read, which would cost registers.
DEVICE Place place_at(u32 address) {
  Place v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.bin), "=r"(v.above) : "r"(address));
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.inside) : "r"(address + 8));
  return v;
}

// Adds where a score reaches the least that is wanted.
DEVICE void add_if_reaches(u32& sum, float score, float least, u32 amount) {
  asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p add.u32 %0, %0, %3;\n}"
      : "+r"(sum)
      : "f"(score), "f"(least), "r"(amount));
}

DEVICE void add_if_above(u32& sum, float score, float bound, u32 amount) {
  asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\n@p add.u32 %0, %0, %3;\n}"
      : "+r"(sum)
      : "f"(score), "f"(bound), "r"(amount));
}

// A score behind a place in 8 bytes of shared memory, and the address of what comes behind it.
DEVICE void append_if_reaches(u32& address, float score, float least, u32 place) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p st.shared.v2.b32 [%0], {%3, %1};\n@p add.u32 %0, %0, 8;\n}"
      : "+r"(address)
      : "f"(score), "f"(least), "r"(place)
      : "memory");
}

DEVICE void append_if(bool condition, u32& address, float score, u32 place) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.shared.v2.b32 [%0], {%3, %1};\n@p add.u32 %0, %0, 8;\n}"
      : "+r"(address)
      : "f"(score), "r"(static_cast<u32>(condition)), "r"(place)
      : "memory");
}

// Where a bit is set.
template <u32 BIT>
DEVICE void append_word_if_bit(u32 bits, u32& address, u32 word) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 t;\nand.b32 t, %2, %3;\nsetp.ne.u32 p, t, 0;\n@p st.shared.b32 [%0], %1;\n"
      "@p add.u32 %0, %0, 4;\n}"
      : "+r"(address)
      : "r"(word), "r"(bits), "n"(BIT)
      : "memory");
}

// All bits of each of two bfloat16 that reaches another one.
DEVICE u32 both_reach(u32 two, u32 least) {
  u32 reached;
  asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(reached) : "r"(two), "r"(least));
  return reached;
}

DEVICE void store_int_if(bool condition, int* target, int value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.b32 [%0], %1;\n}" ::"l"(target), "r"(value),
               "r"(static_cast<u32>(condition))
               : "memory");
}

DEVICE uint4 load_words_once(const u32* source) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

// Elements that are not loaded have no value.
DEVICE float4 load_once_16_if(bool condition, const float* source) {
  float4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "l"(source), "r"(static_cast<u32>(condition))
      : "memory");
  return v;
}

// ---- clusters: a release of all threads of a CTA waits for memory, bytes that a barrier counts need none --------------

// Stores to a peer's shared memory; the barrier, which lies there too, counts the bytes when they can be read.
DEVICE void send_8(u32 address, u32 barrier, u64 value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address),
               "l"(value), "r"(barrier)
               : "memory");
}

DEVICE void send_4(u32 address, u32 barrier, u32 value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(value), "r"(barrier)
               : "memory");
}

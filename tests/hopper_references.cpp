// A row's first references by one barrier and by those of later turns: the Hopper kernels' own code, compiled for a CPU.
// `test_hopper_references.py` builds it.
#include <cmath>

#include "hopper_simt.h"

#define named_barrier ptx_named_barrier
#define named_barrier_any ptx_named_barrier_any
#define exp2_approx ptx_exp2_approx
#define load_shared_float ptx_load_shared_float
#define load_shared_float2 ptx_load_shared_float2
#define store_shared_float ptx_store_shared_float
#define store_shared_float2 ptx_store_shared_float2
#include "ptx.cuh"
#undef named_barrier
#undef named_barrier_any
#undef exp2_approx
#undef load_shared_float
#undef load_shared_float2
#undef store_shared_float
#undef store_shared_float2

template <class T>
T& at(u32 address) {
  return *reinterpret_cast<T*>(simt::shared_memory() + address);
}
template <int ID, int THREADS>
void named_barrier() {
  simt::meet_cta();
}
template <int ID, int THREADS>
bool named_barrier_any(bool value) {
  return __syncthreads_or(value);
}
static float exp2_approx(float x) { return std::exp2(x); }
static float load_shared_float(u32 address) { return at<float>(address); }
static float2 load_shared_float2(u32 address) { return at<float2>(address); }
static void store_shared_float(u32 address, float value) { at<float>(address) = value; }
static void store_shared_float2(u32 address, float a, float b) { at<float2>(address) = {a, b}; }

#include "softmax.cuh"

// scores [128, HEADS / 2] of the threads become relative to references [HEADS]. `alive` [4]: warps that have a key.
// Returns whether there is one.
template <int HEADS>
int first_references(const int* alive, int by_one, float* scores, float* references) {
  using L = Layout<HEADS, FP8_DS_MLA>;
  int any = 0;
  simt::launch(1, 1, 128, L::BYTES, 1, [&]() {
    const int thread = threadIdx.x;
    if (thread < HEADS) store_shared_float2(L::COLUMNS + thread * 8, 1.f, 0.f);
    simt::meet_cta();
    float s[HEADS / 2], sums[HEADS / 4] = {};
    std::memcpy(s, scores + thread * (HEADS / 2), sizeof(s));
    bool found;
    if (by_one) {
      found = set_references<L>(s, 0, L::SCORES, alive[thread / 32], thread);
    } else {
      found = named_barrier_any<SCORE_BARRIER, 128>(alive[thread / 32]);
      if (found) raise_references<L>(s, sums, false, RAISED_TO, 0, thread);
    }
    simt::meet_cta();
    std::memcpy(scores + thread * (HEADS / 2), s, sizeof(s));
    if (thread < HEADS) references[thread] = load_shared_float(L::COLUMNS + thread * 8 + 4);
    if (thread == 0) any = found;
  });
  return any;
}

extern "C" int first(int heads, const int* alive, int by_one, float* scores, float* references) {
  return (heads == 16   ? first_references<16>
          : heads == 24 ? first_references<24>
                        : first_references<32>)(alive, by_one, scores, references);
}

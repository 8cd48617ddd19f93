// What CTAs that share work evenly leave for the merge (`balance.cuh`, `merge_cuts.cu`).
#pragma once

#include "ptx.cuh"

struct Parts {
  float* lse;     // [2 workers, num_heads]: of tokens that a worker before has begun, then of those that go on
  // [workers]: the token that an interval begins in, and whether it is cut there; the first has whether this launch is
  // the one that has the call's tokens.
  int2* records;
  float* out;     // [2 workers, num_heads, 512]
};

DEVICE Parts parts_in(void* exchange, int workers, int num_heads) {
  float* const lse = static_cast<float*>(exchange);
  const int before_records = 2 * workers * num_heads, before_out = (before_records + 2 * workers + 3) / 4 * 4;
  return {lse, reinterpret_cast<int2*>(lse + before_records), lse + before_out};
}

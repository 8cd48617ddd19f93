// Parts that CTAs leave in memory for one another when they share all rows evenly (`balance.cuh`, `cuts.cuh`).
#pragma once

#include "ptx.cuh"

struct Parts {
  int* balanced;  // whether these CTAs have the call's tokens, for the merge of another launch's parts
  int4* sharers;  // [workers * head_tiles]: of the cut token that an interval begins in, and of that in which it ends
  float* lse;     // [2 workers, num_heads]: of tokens that a worker before has begun, then of those that go on
  float* out;     // [2 workers, num_heads, 512]
};

DEVICE Parts parts_in(void* exchange, int workers, int head_tiles, int num_heads) {
  float* const first = static_cast<float*>(exchange);
  const int before_lse = 4 + 4 * workers * head_tiles, before_out = (before_lse + 2 * workers * num_heads + 3) / 4 * 4;
  return {static_cast<int*>(exchange), reinterpret_cast<int4*>(first + 4), first + before_lse, first + before_out};
}

// Parts that CTAs leave in memory for one another when they share all rows evenly (`balance.cuh`, `cuts.cuh`).
#pragma once

#include "ptx.cuh"

struct Parts {
  int* balanced;  // whether these CTAs have the call's tokens, for the merge of another launch's parts
  int4* sharers;  // [workers * head_tiles]: of the cut token that an interval begins in, and of that in which it ends
  // [2 workers, even_heads]: of tokens that a worker before has begun, then of those that go on: lse, and the factor that
  // makes a result of accumulators
  float2* heads;
  float4* out;  // [2 workers, head_tiles, 8 warps, packets' quads, 32 lanes]: accumulators as they are
};

DEVICE int even_heads(int num_heads) { return num_heads + (num_heads & 1); }  // copies have multiples of 16 bytes

DEVICE Parts parts_in(void* exchange, int workers, int head_tiles, int num_heads) {
  float* const first = static_cast<float*>(exchange);
  const int before_heads = 4 + 4 * workers * head_tiles;
  return {static_cast<int*>(exchange), reinterpret_cast<int4*>(first + 4),
          reinterpret_cast<float2*>(first + before_heads),
          reinterpret_cast<float4*>(first + before_heads + 4 * workers * even_heads(num_heads))};
}

// Four matrices of a warp in shared memory, as `stmatrix` and `ldmatrix` take them: lane n says where row n is. The model
// that includes this has `at`.
#pragma once

static void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const int lane = threadIdx.x % 32;
  const u32 words[4] = {a, b, c, d};
  const auto rows = simt::meet_warp(address);
  for (int i = 0; i < 4; ++i) at<u32>(static_cast<u32>(rows[i * 8 + lane / 4]) + lane % 4 * 4) = words[i];
}

static uint4 load_matrices(u32 address) {
  const int lane = threadIdx.x % 32;
  const auto rows = simt::meet_warp(address);
  u32 words[4];
  for (int i = 0; i < 4; ++i) words[i] = at<u32>(static_cast<u32>(rows[i * 8 + lane / 4]) + lane % 4 * 4);
  return {words[0], words[1], words[2], words[3]};
}

// Lanes have pairs of two columns of a matrix whose rows go to the addresses.
template <class... Words>
void store_matrices_transposed(u32 address, Words... given) {
  const int lane = threadIdx.x % 32;
  const auto rows = simt::meet_warp(address);
  const u32 words[] = {given...};
  for (int i = 0; i < static_cast<int>(sizeof...(given)); ++i)
    for (int e = 0; e < 2; ++e)
      at<u16>(static_cast<u32>(rows[i * 8 + lane % 4 * 2 + e]) + lane / 4 * 2) = words[i] >> 16 * e;
}

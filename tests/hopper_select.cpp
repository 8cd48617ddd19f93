// Selection of keys by the Hopper kernel's own code, compiled for a CPU: `test_hopper_select.py` builds it.
#include "hopper_indexer.h"

#include "select_rows.cuh"

template <int HEADS, int TOKENS, Source SOURCE>
int choose(const SelectParams& s, int ctas, int bytes, int seed) {
  using L = SelectLayout<HEADS, TOKENS>;
  if (bytes != Fixed<L>::BYTES + 8 * TOKENS * s.capacity) return 2;
  shared_size = bytes;
  begun.clear(), barriers.clear(), flights.clear();
  simt::launch(ctas / s.cluster, s.cluster, THREADS, bytes, seed, [&] {
    const int units = gridDim.x / s.cluster, unit = units - 1 - blockIdx.x / s.cluster;
    select_rows<L, SOURCE>(s, simt::shared_memory(), unit, blockIdx.x % s.cluster);
  });
  return 0;
}

// A launch; returns 1 where there is no such kernel here, 2 where the host counts another number of bytes.
extern "C" int select_keys(const void* params, int heads, int tokens, const char* source, int ctas, int bytes,
                           int seed) {
  alignas(SelectParams) unsigned char copy[sizeof(SelectParams)];
  std::memcpy(copy, params, sizeof(SelectParams));
  const SelectParams& s = reinterpret_cast<const SelectParams&>(copy);
  const int kernel = heads * 100 + tokens * 10 + (source[0] == 'F' ? 0 : source[0] == 'B' ? 1 : 2);
  if (kernel == 6410) return choose<64, 1, FLAT>(s, ctas, bytes, seed);
  if (kernel == 6420) return choose<64, 2, FLAT>(s, ctas, bytes, seed);
  if (kernel == 6440) return choose<64, 4, FLAT>(s, ctas, bytes, seed);
  if (kernel == 3240) return choose<32, 4, FLAT>(s, ctas, bytes, seed);
  if (kernel == 3211) return choose<32, 1, BOXES>(s, ctas, bytes, seed);
  if (kernel == 3241) return choose<32, 4, BOXES>(s, ctas, bytes, seed);
  if (kernel == 3221) return choose<32, 2, BOXES>(s, ctas, bytes, seed);
  return 1;
}

extern "C" int bytes_of_params() { return sizeof(SelectParams); }
extern "C" int bytes_of_choice(int tokens) {
  return tokens == 1 ? sizeof(Choice<1>) : tokens == 2 ? sizeof(Choice<2>) : sizeof(Choice<4>);
}

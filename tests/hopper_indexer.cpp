// Scores of the indexer by the Hopper kernel's own code, compiled for a CPU: `test_hopper_indexer.py` builds it.
#include "hopper_indexer.h"
#include "indexer_scores.cuh"

template <int HEADS, int TOKENS, Source SOURCE, bool PLANES = false>
int score(const Params& p, int ctas, int seed) {
  using L = ScoresLayout<HEADS, TOKENS, SOURCE>;
  if (ctas % L::CLUSTER) return 2;
  shared_size = L::BYTES;
  begun.clear(), barriers.clear(), flights.clear(), waited.clear(), early = false;
  simt::launch(ctas / L::CLUSTER, L::CLUSTER, L::THREADS, L::BYTES, seed, [&] { make_scores<L, SOURCE, PLANES>(p, 0); });
  return early || waited.size() != static_cast<size_t>(ctas) ? 3 : 0;
}

// A launch; returns 1 where there is no such kernel here, 3 where a score is written, or a CTA ends, before the launch in
// front is over.
extern "C" int scores(const void* params, int heads, int tokens, const char* source, int ctas, int seed,
                      int planes) {
  alignas(Params) unsigned char bytes[sizeof(Params)];
  std::memcpy(bytes, params, sizeof(Params));
  const Params& p = reinterpret_cast<const Params&>(bytes);
  const int kernel = heads * 100 + tokens * 10 + (source[0] == 'F' ? 0 : source[0] == 'B' ? 1 : 2);
  if (planes && kernel == 6440) return score<64, 4, FLAT, true>(p, ctas, seed);
  if (planes && kernel == 3280) return score<32, 8, FLAT, true>(p, ctas, seed);
  if (planes) return 1;
  if (kernel == 6440) return score<64, 4, FLAT>(p, ctas, seed);
  if (kernel == 3280) return score<32, 8, FLAT>(p, ctas, seed);
  if (kernel == 6411) return score<64, 1, BOXES>(p, ctas, seed);
  if (kernel == 6421) return score<64, 2, BOXES>(p, ctas, seed);
  if (kernel == 3241) return score<32, 4, BOXES>(p, ctas, seed);
  if (kernel == 3281) return score<32, 8, BOXES>(p, ctas, seed);
  if (kernel == 3212) return score<32, 1, ANYWHERE>(p, ctas, seed);
  if (kernel == 6442) return score<64, 4, ANYWHERE>(p, ctas, seed);
  return 1;
}
extern "C" int bytes_of_params() { return sizeof(Params); }

template <int TOKENS, Source SOURCE>
int walk(const Params& p, int ctas, int* out, int room) {
  constexpr int step = STEP<TOKENS, SOURCE>;
  Divisor of_parts = {0, 31};
  for (int bits = ctas - 1; bits; bits /= 2) ++of_parts.shift;
  of_parts.multiplier = (1ull << of_parts.shift) / ctas + 1;
  int total = 0, count = 0;
  for (int token = 0; token < p.num_tokens; token += step) total += group_at<TOKENS, SOURCE>(p, token).units;
  for (int cta = 0; cta < ctas; ++cta) {
    const int begin = units_before(total, cta, ctas, of_parts);
    Part part = {0, begin, units_before(total, cta + 1, ctas, of_parts) - begin, total};
    if (part.count == 0) continue;
    find_begin<TOKENS, SOURCE>(p, part);
    for (int token = part.token; part.count; token += step) {
      const Group group = group_at<TOKENS, SOURCE>(p, token);
      if (group.units == 0) continue;
      int first_tile = group.first_tile, tiles = group.tiles;
      take_tiles<TOKENS, SOURCE>(p, part, first_tile, tiles);
      if (tiles == 0) continue;
      if (count == room) return -1;
      int* line = out + 6 * count++;
      line[0] = cta, line[1] = token, line[2] = group.count, line[3] = first_tile, line[4] = tiles;
      line[5] = group.end;
    }
  }
  return count;
}

// Lines of (CTA, first token, tokens, first tile, tiles, end) of a launch; how many.
extern "C" int parts_of(int flat, int tokens, int num_tokens, int num_columns, int num_requests, const int* starts,
                        const int* ends, const int* requests, int ctas, int* out, int room) {
  Params p = {};
  p.num_tokens = num_tokens, p.num_columns = num_columns, p.num_requests = num_requests;
  p.row_starts = starts, p.row_ends = ends, p.req_id_per_token = requests;
  switch (tokens) {
    case 1:
      return walk<1, BOXES>(p, ctas, out, room);
    case 2:
      return walk<2, BOXES>(p, ctas, out, room);
    case 4:
      return flat ? walk<4, FLAT>(p, ctas, out, room) : walk<4, BOXES>(p, ctas, out, room);
    default:
      return flat ? walk<8, FLAT>(p, ctas, out, room) : walk<8, BOXES>(p, ctas, out, room);
  }
}

// Groups of query tokens and CTAs' parts by the Hopper indexer's own code, compiled for a CPU.
// `test_hopper_indexer.py` builds it, without what is written in PTX.

#include "hopper_on_cpu.h"

// Of code that nobody calls here.
template <class T>
T __shfl_sync(unsigned, T, int);

#include "indexer_rows.cuh"

template <int TOKENS, Source SOURCE>
int walk(const Params& p, int ctas, int* out, int room) {
  constexpr int step = STEP<TOKENS, SOURCE>;
  int total = 0, count = 0;
  for (int token = 0; token < p.num_tokens; token += step) total += group_at<TOKENS, SOURCE>(p, token).tiles;
  for (int cta = 0; cta < ctas; ++cta) {
    const int begin = tiles_before(total, cta, ctas);
    Part part = {0, begin, tiles_before(total, cta + 1, ctas) - begin};
    if (part.count == 0) continue;
    find_begin<TOKENS, SOURCE>(p, part);
    for (int token = part.token; part.count; token += step) {
      const Group group = group_at<TOKENS, SOURCE>(p, token);
      const int tiles = min(group.tiles - part.skip, part.count);
      if (tiles <= 0) continue;
      if (count == room) return -1;
      int* line = out + 6 * count++;
      line[0] = cta, line[1] = token, line[2] = group.count, line[3] = group.first_tile + part.skip, line[4] = tiles;
      line[5] = group.end;
      part.skip = 0, part.count -= tiles;
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

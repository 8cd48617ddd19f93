// The parts of `prefill_short`: a warp's rows, how a region's work is dealt out, the table of the other tiles.
#pragma once

#include "prefill.cuh"

constexpr int REGION = 128, THREADS = 128, WARPS = THREADS / 32;
constexpr int LENGTHS = 256;  // kinds of requests in the table, by keys

// Queries of one tile among a region's tokens. A warp's 16 rows are of `16 >> log_width` heads, `1 << log_width`
// queries and as many keys of each: with fewer than 16 queries of one head, the warp has all keys at once.
struct alignas(16) Segment {
  int token, rows;
  int visible;  // keys that the first query sees, were there as many
  int begin_k, len_k;
  int log_width;
  int unused[2];
};

DEVICE u32 word(const uint4& v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; }

DEVICE uint4 load_or_zeros(bool there, const u16* source) {
  return there ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
}

// ---- a warp's rows --------------------------------------------------------------------------------------------------

template <int DIM, int DIM_V, class T>
DEVICE void attend(const Params& p, const Segment& segment, uint4* queries, int number, int lane) {
  constexpr int BLOCKS = DIM / 32, BLOCKS_V = DIM_V / 64, CHAINS = DIM > 192 ? 1 : 2,
                TOGETHER = BLOCKS_V < 2 ? BLOCKS_V : 2;  // blocks of values
  const int g = lane >> 2, c = lane & 3, log_width = segment.log_width, width = 1 << log_width;
  const int slices = log_width < 4 ? 1 : (segment.rows + 15) >> 4, pack = number / slices,
            first_row = (slices - 1 - number % slices) * 16, rows = min(segment.rows - first_row, width),
            first_head = pack << (4 - log_width);
  const int last_visible = segment.visible + first_row + rows - 1,
            end = p.causal ? min(max(last_visible, 0), segment.len_k) : segment.len_k;
  auto head_of = [&](int row) { return first_head + (row >> log_width); };
  auto kv_head_of = [&](int row) {
    const int head = head_of(row);
    return p.heads_per_kv_head == 1 ? head : head / p.heads_per_kv_head;
  };

  // rows of queries, and of a step's keys: g and g + 8
  bool live[2], there_k[2];
  int begin[2], count[2];  // columns of scores that the row sees: of its own head
  const u16* k_row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = g + i * 8, within = row & (width - 1);
    live[i] = within < rows && head_of(row) < p.num_heads;
    begin[i] = row & ~(width - 1) & 15;
    const int visible = p.causal ? min(max(segment.visible + first_row + within, 0), segment.len_k) : segment.len_k;
    count[i] = visible;
    there_k[i] = head_of(row) < p.num_heads;
    k_row[i] = p.k_rows + (segment.begin_k + within) * p.k_token_stride + kv_head_of(row) * p.k_head_stride + c * 8;
    const u16* q_row =
        p.q_rows + (segment.token + first_row + within) * p.q_token_stride + head_of(row) * p.q_head_stride + c * 8;
    const bool reads = live[i] && end > 0;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
      copy_16_or_zeros<0, 0>(shared_address(queries + (i * BLOCKS + block) * THREADS),
                             (reads ? q_row : p.q_rows) + block * 32,
                             reads ? 16 : 0);
  }
  // rows of a step's values: 2 c, 2 c + 1, 2 c + 8, 2 c + 9; dims such that a row of results lies in order
  const u16* v_row[4];
  bool there_v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = c * 2 + (i & 1) + (i >> 1) * 8, within = row & (width - 1);
    there_v[i] = head_of(row) < p.num_heads;
    v_row[i] = p.v_rows + (segment.begin_k + within) * p.v_token_stride + kv_head_of(row) * p.v_head_stride +
               ((g & 1) * 4 + (g >> 1)) * 8;
  }

  float o[BLOCKS_V][8][4];
#pragma unroll
  for (int block = 0; block < BLOCKS_V; ++block)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[block][n][e] = 0.f;
  float running_max[2] = {NO_SCORE_YET, NO_SCORE_YET}, sum[2] = {0.f, 0.f};

  for (int first_key = 0; first_key < end; first_key += 16) {
    uint4 k[2][BLOCKS], v[TOGETHER][4];
    float s[2][CHAINS][4];  // scores, by halves of the keys
    auto load_keys = [&](int half) {
      const bool there = there_k[half] && first_key + ((g + half * 8) & (width - 1)) < end;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) k[half][block] = load_or_zeros(there, k_row[half] + block * 32);
      k_row[half] += 16 * p.k_token_stride;
    };
    auto load_values = [&](int from) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = there_v[i] && first_key + ((c * 2 + (i & 1) + (i >> 1) * 8) & (width - 1)) < end;
#pragma unroll
        for (int block = 0; block < TOGETHER; ++block)
          v[block][i] = load_or_zeros(there, v_row[i] + (from + block) * 64);
        if (from + TOGETHER == BLOCKS_V) v_row[i] += 16 * p.v_token_stride;
      }
    };
    auto multiply_keys = [&](int from, int to) {
#pragma unroll
      for (int half = from; half < to; ++half)
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[half][chain][e] = 0.f;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const uint4 a = queries[block * THREADS], b = queries[(BLOCKS + block) * THREADS];
#pragma unroll
        for (int half = from; half < to; ++half) {
          T::multiply(s[half][0], a.x, b.x, a.y, b.y, k[half][block].x, k[half][block].y);
          T::multiply(s[half][CHAINS - 1], a.z, b.z, a.w, b.w, k[half][block].z, k[half][block].w);
        }
      }
    };
    if (DIM > 192) {  // so many dims have no registers for all of it at one time
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_keys(half);
        if (half == 0 && first_key == 0) wait_for_copies();
        multiply_keys(half, half + 1);
      }
      load_values(0);
    } else {
      load_keys(0);
      load_keys(1);
      load_values(0);
      if (first_key == 0) wait_for_copies();
      multiply_keys(0, 2);
    }
    float alpha[2];
    bool moves = false;
    u32 weights[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float w[4], largest = -INFINITY;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = (e >> 1) * 8 + c * 2 + (e & 1) + first_key - begin[i];
        const bool seen = column >= 0 && column < count[i];
        float score = s[e >> 1][0][i * 2 + (e & 1)];
        if (CHAINS == 2) score += s[e >> 1][CHAINS - 1][i * 2 + (e & 1)];
        w[e] = seen ? score : -INFINITY;
        largest = fmaxf(largest, w[e]);
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * p.scale_log2;
      const float now = fmaxf(running_max[i], largest);
      alpha[i] = exp2_approx(running_max[i] - now);
      moves |= now > running_max[i];
      running_max[i] = now;
      float scale = p.scale_log2;
      if (is_far(now)) {
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = __fmul_rn(w[e], scale);
        scale = 1.f;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = exp2_approx(fmaf(w[e], scale, -now));
      sum[i] = fmaf(sum[i], alpha[i], w[0] + w[1] + (w[2] + w[3]));
      weights[i] = T::pack(w[0], w[1]);
      weights[i + 2] = T::pack(w[2], w[3]);
    }
    if (__any_sync(~0u, moves)) {
#pragma unroll
      for (int block = 0; block < BLOCKS_V; ++block)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[block][n][e] *= alpha[e >> 1];
    }
#pragma unroll
    for (int block = 0; block < BLOCKS_V; ++block) {
      if (block && block % TOGETHER == 0) load_values(block);
      const uint4* values = v[block % TOGETHER];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const u32 order = n & 1 ? 0x7632 : 0x5410;
        T::multiply(o[block][n], weights[0], weights[1], weights[2], weights[3],
                    __byte_perm(word(values[0], n / 2), word(values[1], n / 2), order),
                    __byte_perm(word(values[2], n / 2), word(values[3], n / 2), order));
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = g + i * 8;
    const i64 token = segment.token + first_row + (row & (width - 1));
    float total = sum[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool none = total == 0.f;
    const float factor = none ? 0.f : 1.f / total;
    if (live[i] && c == 0) {
      const float lse = none ? -INFINITY : (running_max[i] + log2f(total)) * 0.6931471805599453f;
      p.lse[token * p.lse_token_stride + head_of(row) * p.lse_head_stride] = running_max[i] == INFINITY ? INFINITY : lse;
    }
    u16* to = p.out + token * p.out_token_stride + head_of(row) * p.out_head_stride + c * 8;
#pragma unroll
    for (int block = 0; block < BLOCKS_V; ++block)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        u32 w[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          w[n] = T::pack(o[block][2 * n][i * 2 + side] * factor, o[block][2 * n + 1][i * 2 + side] * factor);
        if (live[i]) store_streaming_16(to + block * 64 + side * 32, make_uint4(w[0], w[1], w[2], w[3]));
      }
  }
}

// ---- dealing out a region -------------------------------------------------------------------------------------------

struct Shared {
  int first[REGION];  // the first piece of work of each segment; no piece's number behind the last segment
  Segment segments[REGION];
  u32 sums[WARPS];
  int next;
};

// The segment that begins with this thread's token, and how many pieces of work it is; 0 where none begins.
DEVICE int segment_of(const Params& p, int token, Segment& segment) {
  if (token >= p.num_tokens) return 0;
  int low = 0, high = p.num_requests;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (start_of(p.cu_seqlens_q, middle, p.num_tokens) <= token)
      low = middle;
    else
      high = middle - 1;
  }
  const Request request = nth_request(p, low);
  const int query = token - request.begin_q, within = query & (QUERIES - 1);
  if (query < 0 || (within && threadIdx.x)) return 0;
  const Tile tile = nth_tile(p, request, query / QUERIES);
  if (tile.rows <= within || !is_short(p, request, tile)) return 0;
  segment.token = token;
  segment.rows = min(tile.rows - within, REGION - static_cast<int>(threadIdx.x));
  segment.visible = tile.last + within + 1;
  segment.begin_k = tile.begin_k;
  segment.len_k = tile.len_k;
  const int widest = max(tile.rows, tile.end);
  segment.log_width = widest > 8 ? 4 : widest > 4 ? 3 : widest > 2 ? 2 : widest > 1 ? 1 : 0;
  const int heads = 16 >> segment.log_width;
  return (segment.log_width < 4 ? 1 : (segment.rows + 15) / 16) * ((p.num_heads + heads - 1) / heads);
}

template <int DIM, int DIM_V, class T>
DEVICE void do_share(const Params& p, Shared& shared, uint4* queries, int region, int share) {
  const int thread = threadIdx.x, lane = thread & 31, warp = uniform(thread >> 5);
  Segment segment;
  const u32 pieces = segment_of(p, region * REGION + thread, segment);
  // segments in the upper 8 bits: the last sum of 128 segments is not used as a place
  u32 before = pieces ? 1u << 24 | pieces : 0u;
  const u32 own = before;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) shared.sums[warp] = before;
  shared.first[thread] = 0x7fffffff;
  if (thread == 0) shared.next = 0;
  __syncthreads();
  u32 all = 0;
  before -= own;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i < warp) before += shared.sums[i];
    all += shared.sums[i];
  }
  if (pieces) {
    shared.first[before >> 24] = before & 0xffffff;
    shared.segments[before >> 24] = segment;
  }
  __syncthreads();
  const int total = all & 0xffffff, begin = static_cast<i64>(total) * share / p.shares,
            end = static_cast<i64>(total) * (share + 1) / p.shares;
  while (true) {
    int piece = 0;
    if (lane == 0) piece = atomicAdd(&shared.next, 1);
    piece = begin + uniform(piece);
    if (piece >= end) return;
    const uint4 first = reinterpret_cast<const uint4*>(shared.first)[lane];
    const u32 number = static_cast<u32>(piece);
    const int here = (first.x <= number) + (first.y <= number) + (first.z <= number) + (first.w <= number);
    const int n = __reduce_add_sync(~0u, here) - 1;
    attend<DIM, DIM_V, T>(p, shared.segments[n], queries, piece - shared.first[n], lane);
  }
}

// ---- the table of the other tiles -----------------------------------------------------------------------------------

// Calls `each` for every request that has tiles which are not short: with its last tile, and how many there are.
template <class Each>
DEVICE void for_long_requests(const Params& p, const Each& each) {
  for (int n = threadIdx.x; n < p.num_requests; n += THREADS) {
    const Request r = nth_request(p, n);
    if (r.len_q <= 0) continue;
    const int last = (r.len_q - 1) / QUERIES;
    if (is_short(p, r, nth_tile(p, r, last))) continue;
    // the first queries see nothing where there are more of them than keys
    const int first = p.causal ? max(r.len_q - r.len_k, 0) / QUERIES : 0;
    each(r, last, last + 1 - first);
  }
}

DEVICE int length_of(const Request& r) { return min((r.len_k - 1) / QUERIES, LENGTHS - 1); }

DEVICE void write_plan(const Params& p, Shared& shared) {
  int* place = reinterpret_cast<int*>(&shared);  // places for the tiles of the next request of each length
  const int thread = threadIdx.x;
  for (int i = thread; i < LENGTHS; i += THREADS) place[i] = 0;
  __syncthreads();
  for_long_requests(p, [&](const Request& r, int, int count) { atomicAdd(place + length_of(r), count); });
  __syncthreads();
  if (thread < 32) {
    // a lane has lengths next to each other, the first lane the longest
    constexpr int EACH = LENGTHS / 32;
    int counts[EACH], before = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) before += counts[i] = place[LENGTHS - 1 - thread * EACH - i];
    const int own = before;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (thread >= step) before += other;
    }
    if (thread == 31) *reinterpret_cast<uint4*>(p.plan) = make_uint4(0, min(before, p.most_tiles), 0, 0);
    before -= own;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      place[LENGTHS - 1 - thread * EACH - i] = before;
      before += counts[i];
    }
  }
  __syncthreads();
  for_long_requests(p, [&](const Request& r, int last, int count) {
    const int first = atomicAdd(place + length_of(r), count);
    // there are more than have room only where cu_seqlens do not ascend
    for (int i = 0; i < min(count, p.most_tiles - first); ++i) {
      const Tile tile = nth_tile(p, r, last - i);
      uint4* to = reinterpret_cast<uint4*>(p.plan->tiles + first + i);
      to[0] = make_uint4(tile.token, tile.rows, tile.last, tile.end);
      to[1] = make_uint4(tile.begin_k, tile.len_k, 0, 0);
    }
  });
}

// A CTA. Where there is a table, the first writes it.
template <int DIM, int DIM_V, class T>
DEVICE void run(const Params& p, Shared& shared, uint4* queries, int cta) {
  if (p.plan && cta == 0) {
    write_plan(p, shared);
  } else {
    const int n = cta - (p.plan ? 1 : 0);
    do_share<DIM, DIM_V, T>(p, shared, queries, n / p.shares, n % p.shares);
  }
}

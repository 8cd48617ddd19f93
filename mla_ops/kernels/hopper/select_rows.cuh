// The k best keys of query tokens, chosen while their scores are made: none is written.
//
// A CTA or a cluster has up to TOKENS neighbouring query tokens. Tiles of keys go to its CTAs in turn, and the tiles of a
// segment are spread over the whole row, so that each CTA and each segment has a fair sample. A consumer appends what
// might still be among the k best to the CTA's entries of the row, in shared memory. After each segment the entries are
// counted. Where the next one might not find room, all but the k best go, and only what is above the least of these is
// appended from then on.
//
// A CTA that has a row alone keeps less than k when that happens first: what is likely to be among the k best of the row,
// by the part of it that was seen. Where it ends with less than k, the row is read again without a guess.
//
// At the end of a row each CTA of a cluster hands its best to one of them, a few more than its share of k. That one
// selects. Where a CTA held back an entry that could be better than the last one chosen, all hand on everything.
//
// So the result is exact in whatever order scores come, and no room can overflow. It does not depend on the order of the
// entries: all of them differ (topk_select.cuh), and those chosen leave through a bitmap of columns.
#pragma once

#include "indexer_scores.cuh"
#include "topk_select.cuh"

struct SelectParams {
  Params scores;  // without `out`
  int* indices;
  int* counts;
  i64 indices_pitch;
  int k;
  int cluster;
  int capacity;  // entries of a row: at least k and a segment's; in a cluster k and what all CTAs hand on as well
  int segment;   // tiles
  int share;     // entries that a CTA of a cluster hands on at first
  int translate;

  // Where a column's key lies, -1 where the table does not say.
  DEVICE int translated(int column, int request) const {
    if (!translate) return column;
    const int block = divide(column, scores.of_block_size);
    if (request < 0 || request >= scores.num_requests || block >= scores.table_width) return -1;
    const int found = scores.block_table[request * scores.table_stride + block];
    const i64 slot = static_cast<i64>(found) * scores.block_size + (column - block * scores.block_size);
    return found < 0 || slot > 0x7fffffff ? -1 : static_cast<int>(slot);
  }
};

// What the threads and the CTAs of a cluster tell one another.
template <int TOKENS>
struct alignas(16) Choice {
  Control control;
  u64 gates[TOKENS];        // the least entry that counts
  float floors[TOKENS];     // a smaller score is below the gate
  u32 counts[TOKENS];       // entries
  u64 cuts[MAX_CLUSTER];    // of each CTA: entries below it were held back; 0: none were
  u32 sent[MAX_CLUSTER], all[MAX_CLUSTER];  // entries that each CTA hands on, and that it has
  u32 base;                 // of what is handed on, behind the choosing CTA's own entries
  u32 again;                // whether all CTAs hand on everything; of one CTA: whether it reads the row again
};

// Beside the count of an announcement's tokens: the last segment; no guess may be made; tiles from one to the next.
constexpr u32 LAST = 1 << 4, SURE = 1 << 5, APART_SHIFT = 6;
constexpr u32 WINDOW = BINS * 32;  // columns that the bins hold a bit of each

// Fewer tiles on their way leave room for entries: what tiles of more columns take longer to use.
template <int HEADS, int TOKENS>
using SelectLayout = IndexerLayout<HEADS, TOKENS, TOKENS == 1 ? 12 : HEADS * TOKENS == 256 ? 4 : 8>;

template <class L>
constexpr u32 CHOICE = (L::BYTES + 15) / 16 * 16;

// Shared memory besides the entries.
template <class L>
struct Fixed {
  static constexpr u32 BYTES = CHOICE<L> + sizeof(Choice<L::TOKENS>) + BINS * 4;
};

// Threads that bring keys. Blocks that do not fit a tile, which four warps would bring, are for other launches.
constexpr int BRINGERS = 32;

// Whether a group has a row of more than k keys. All keys of the others are chosen.
template <class L, Source SOURCE>
DEVICE bool is_scored(const SelectParams& s, int token, int count) {
  for (int t = 0; t < count; ++t) {
    const Bounds row = bounds_of<SOURCE>(s.scores, token + t);
    if (row.end - row.start > s.k) return true;
  }
  return false;
}

// ---- the producer ---------------------------------------------------------------------------------------------------

template <int TOKENS>
DEVICE u32 load_again(const Choice<TOKENS>& choice) {
  return *const_cast<const volatile u32*>(&choice.again);
}

// The barriers of `meet_peers`, which are of all a cluster's threads that have not left.
template <class L, Source SOURCE>
DEVICE void attend(const SelectParams& s, const Choice<L::TOKENS>& choice, int token, int count) {
  for (int t = 0; t < count; ++t) {
    const Bounds row = bounds_of<SOURCE>(s.scores, token + t);
    if (row.end - row.start <= s.k) continue;
    __syncwarp();
    cluster_meet(), cluster_meet(), cluster_meet();
    if (load_again(choice)) cluster_meet();
  }
}

template <class L, Source SOURCE>
DEVICE void produce_units(const SelectParams& s, u32 shared, const Choice<L::TOKENS>& choice, int first, int rank) {
  const Params& p = s.scores;
  const int thread = threadIdx.x - CONSUMERS, lane = thread & 31;
  const bool leads = thread < 32;
  Slot slot = {0, 0};
  int stage = 0;
  u32 parity = 1;
  auto announce = [&](int token, u32 count, int first_tile, int tiles) {
    mbarrier_wait(shared + L::QUERY_FREE + stage * 8, parity);
    if (leads && lane == 0) {
      store_shared_16(shared + L::GROUP + stage * 16, token, count, first_tile, tiles);
      mbarrier_arrive(shared + L::GROUP_FULL + stage * 8);
      const u32 full = shared + L::QUERY_FULL + stage * 8;
      if (tiles) {
        mbarrier_arrive_expect(full, L::QUERY_BYTES);
        copy_box(shared + L::QUERY + stage * L::QUERY_BYTES, p.queries, 0, 0, token, full);
      } else if (count) {
        mbarrier_arrive(full);
      }
    }
    __syncwarp();
    if (++stage == QUERY_STAGES) stage = 0, parity ^= 1;
  };
  for (int token = first; token < min(first + L::TOKENS, p.num_tokens); ++token) {
    const Group group = group_at<L::TOKENS, SOURCE>(p, token);
    if (group.count == 0) continue;
    int tiles = 0;
    if (is_scored<L, SOURCE>(s, token, group.count)) tiles = max((group.tiles - rank + s.cluster - 1) / s.cluster, 0);
    // segment i has tiles i, i + segments, ... of this CTA's
    const int segments = max((tiles + s.segment - 1) / s.segment, 1), apart = segments * s.cluster;
    u32 sure = 0;
    do {
      for (int i = 0; i < segments; ++i) {
        const int now = (tiles - i + segments - 1) / segments, first_tile = group.first_tile + rank + i * s.cluster;
        announce(token, group.count | (i + 1 == segments ? LAST : 0) | sure | apart << APART_SHIFT, first_tile, now);
        if constexpr (SOURCE == FLAT)
          bring_flat<L>(p, shared, lane, first_tile, now, slot, apart);
        else
          bring_boxes<L>(p, shared, lane, token, group.end, first_tile, now, slot, apart);
      }
      if (s.cluster > 1) break;
      __syncwarp();
      named_barrier<2, CONSUMERS + BRINGERS>();
      sure = SURE;
    } while (load_again(choice));
    if (s.cluster > 1) attend<L, SOURCE>(s, choice, token, group.count);
    token += group.count - 1;
  }
  announce(0, 0, 0, 0);
}

// ---- the consumers --------------------------------------------------------------------------------------------------

template <class L, Source SOURCE>
struct Chosen {
  using S = Share<L::TOKENS>;
  static_assert(S::TOKENS == 1, "a lane has scores of one token");
  static constexpr bool IN_PARTS = true;
  static constexpr int OWN = BINS / CONSUMERS;  // words of the bitmap that a thread has

  const SelectParams& s;
  int apart;
  unsigned char* const shared;
  // of this lane's token
  Bounds row;

  DEVICE Chosen(const SelectParams& params, unsigned char* shared_memory)
      : s(params), apart(0), shared(shared_memory) {}

  // Functions of one address, so that the loop over tiles has registers for products.
  DEVICE Choice<L::TOKENS>& choice() const { return *reinterpret_cast<Choice<L::TOKENS>*>(shared + CHOICE<L>); }
  DEVICE u32* bins() const { return reinterpret_cast<u32*>(shared + CHOICE<L> + sizeof(Choice<L::TOKENS>)); }
  DEVICE u64* entries_of(int t) const { return reinterpret_cast<u64*>(bins() + BINS) + t * s.capacity; }

  // A key that all entries of a row in this CTA reach.
  DEVICE u32 least_key(int t) const { return static_cast<u32>(choice().gates[t] >> 32); }

  // By all consumers, before a barrier.
  DEVICE void clear() const {
    for (u32 i = threadIdx.x; i < BINS; i += CONSUMERS) bins()[i] = 0;
    if (threadIdx.x < L::TOKENS) set(threadIdx.x, 0, 0);
  }

  // Entries of a row so far, and the least that counts from now on. By one thread.
  DEVICE void set(int t, u32 count, u64 gate) const {
    const u32 key = static_cast<u32>(gate >> 32);
    choice().counts[t] = count, choice().gates[t] = gate;
    choice().floors[t] = key < LOWEST_KEY ? -INFINITY : score_of(key);
  }

  DEVICE void begin(const uint4& group, int lane) {
    const int t = S::first_token(lane), count = group.y % LAST;
    apart = group.y >> APART_SHIFT;
    row = {0, 0};
    if (t < count && S::stores(lane)) row = bounds_of<SOURCE>(s.scores, group.x + t);
  }

  DEVICE void put(int, int column, float score, int lane) const {
    const int t = S::first_token(lane);
    bool passes = column >= row.start && column < row.end && !(score < choice().floors[t]);
    if (!__any_sync(~0u, passes)) return;
    const u64 entry = entry_of(key_of(score), column);
    passes = passes && entry >= choice().gates[t];
    const u32 mask = __ballot_sync(~0u, passes);
    constexpr u32 LANES = L::TOKENS == 1 ? ~0u : L::TOKENS == 2 ? 0x55555555u : 0x11111111u;  // of a token
    const u32 same = mask & LANES << lane % L::TOKENS;
    u32 place = 0;
    if (lane < L::TOKENS && same) place = atomicAdd(&choice().counts[t], static_cast<u32>(__popc(same)));
    place = __shfl_sync(~0u, place, lane % L::TOKENS) + __popc(same & (1u << lane) - 1);
    if (passes) entries_of(t)[place] = entry;
  }

  DEVICE void end(const uint4& group) const {
    const int count = group.y % LAST;
    meet<CONSUMERS>();
    if (group.y & LAST) {
      if (s.cluster > 1 || is_complete(group.x, count)) finish(group.x, count);
      meet<CONSUMERS>();
      if (threadIdx.x < L::TOKENS) set(threadIdx.x, 0, 0);
      meet<CONSUMERS>();
      return;
    }
    u32 full = 0;  // a bit for each token
#pragma unroll
    for (int t = 0; t < L::TOKENS; ++t) full |= (choice().counts[t] + s.segment * TILE > s.capacity) << t;
    meet<CONSUMERS>();  // before anybody appends
    if (full == 0) return;
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      if ((full >> t & 1) == 0) continue;
      const u32 have = choice().counts[t];
      const bool guesses = s.cluster == 1 && !(group.y & SURE) && choice().gates[t] == 0;
      const u32 kept = guesses ? likely(group.x + t, have) : s.k;
      const u64 least = keep_best<CONSUMERS>(choice().control, bins(), entries_of(t), have, kept, least_key(t));
      if (threadIdx.x == 0) set(t, kept, least);
    }
    meet<CONSUMERS>();
  }

  // Entries among those of a fair sample of a row of `seen` columns that may be of its k best: six deviations more than
  // there are on average.
  DEVICE u32 likely(int token, u32 seen) const {
    const Bounds bounds = bounds_of<SOURCE>(s.scores, token);
    const float mean = static_cast<float>(seen) * s.k / (bounds.end - bounds.start);
    return min(static_cast<u32>(s.k), static_cast<u32>(mean + 6.f * sqrtf(mean) + 4.f));
  }

  // Whether there are k entries of each row that has as many keys. Tells the producer.
  DEVICE bool is_complete(int token, int count) const {
    bool complete = true;
    for (int t = 0; t < count; ++t) {
      const Bounds bounds = bounds_of<SOURCE>(s.scores, token + t);
      complete = complete && (bounds.end - bounds.start <= s.k || choice().counts[t] >= s.k);
    }
    if (threadIdx.x == 0) choice().again = !complete;
    named_barrier<2, CONSUMERS + BRINGERS>();
    return complete;
  }

  DEVICE void finish(int token, int count) const {
    const int rank = blockIdx.x % s.cluster;
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const Bounds bounds = bounds_of<SOURCE>(s.scores, token + t);
      const u32 length = bounds.end - bounds.start;
      if (length <= s.k) {
        if (rank == t % s.cluster) write_all(token + t, bounds.start, length);
      } else if (s.cluster == 1) {
        write(token + t, bounds, entries_of(t), choice().counts[t]);
      } else {
        meet_peers(token + t, t, rank, bounds);
      }
    }
  }

  DEVICE void meet_peers(int token, int t, int rank, const Bounds& bounds) const {
    const u32 thread = threadIdx.x, leader = t % s.cluster, length = bounds.end - bounds.start;
    const u32 most = ((length + 2 * TILE) / TILE / s.cluster + 1) * TILE;  // keys of a CTA
    const u32 share = most + length <= s.capacity ? most : s.share;        // where there is room, all
    const u32 room = min(s.cluster * share, length);
    Control& control = choice().control;
    u64* const mine = entries_of(t);
    u32 have = choice().counts[t];
    if (have + room > s.capacity) {
      keep_best<CONSUMERS>(control, bins(), mine, have, s.k, least_key(t));
      have = s.k;
    }
    u64 cut = 1;
    u32 sent = have;
    if (have > share) cut = select_listed<CONSUMERS>(control, bins(), mine, have, share, least_key(t)), sent = share;
    if (thread < s.cluster) {
      peer_pointer(choice().sent, thread)[rank] = sent, peer_pointer(choice().all, thread)[rank] = have;
      peer_pointer(choice().cuts, thread)[rank] = sent < have ? cut : 0;
      if (rank == leader) *peer_pointer(&choice().base, thread) = have;
    }
    if (thread == 0) control.listed = 0;
    cluster_meet();
    u32 before = 0, total = 0;
    for (u32 i = 0; i < s.cluster; ++i) {
      if (i == rank) before = total;
      total += choice().sent[i];
    }
    u64* const target = peer_pointer(mine, leader) + choice().base + before;
#pragma unroll 1
    for (u32 i = thread; i < have; i += CONSUMERS) {
      const u64 entry = mine[i];
      if (entry >= cut) target[atomicAdd(&control.listed, 1u)] = entry;
    }
    cluster_meet();
    const u64* list = mine + have;
    u64 threshold = 0;
    if (rank == leader) {
      if (total > s.k) threshold = select_listed<CONSUMERS>(control, bins(), list, total, s.k, 0);
      u32 again = 0;
      for (u32 i = 0; i < s.cluster; ++i) again |= choice().cuts[i] > threshold;
      if (thread < s.cluster) *peer_pointer(&choice().again, thread) = again;
    }
    cluster_meet();
    if (choice().again) {
      if (rank == leader) {
        list = mine, total = have;
#pragma unroll 1
        for (u32 other = 0; other < s.cluster; ++other)
          if (other != rank) take_all(t, other, total);
        threshold = total > s.k ? select_listed<CONSUMERS>(control, bins(), list, total, s.k, 0) : 0;
      }
      cluster_meet();  // the others' entries have been read
    }
    if (rank == leader) write_chosen(token, bounds, list, total, threshold);
  }

  // All of another CTA's entries behind the `total` that are there. Where there is no room, all but the k best go.
  DEVICE void take_all(int t, u32 other, u32& total) const {
    u64* const mine = entries_of(t);
    const u64* const theirs = peer_pointer(mine, other);
#pragma unroll 1
    for (u32 at = 0; at < choice().all[other];) {
      if (total == s.capacity) {
        keep_best<CONSUMERS>(choice().control, bins(), mine, total, s.k, 0);
        total = s.k;
      }
      const u32 taken = min(choice().all[other] - at, s.capacity - total);
      for (u32 i = threadIdx.x; i < taken; i += CONSUMERS) mine[total + i] = theirs[at + i];
      total += taken, at += taken;
      meet<CONSUMERS>();
    }
  }

  DEVICE void write(int token, const Bounds& bounds, const u64* list, u32 count) const {
    const u64 threshold = count > s.k ? select_listed<CONSUMERS>(choice().control, bins(), list, count, s.k, 0) : 0;
    write_chosen(token, bounds, list, count, threshold);
  }

  DEVICE int request_of(int token) const { return s.translate ? __ldg(s.scores.req_id_per_token + token) : 0; }

  // Columns of entries from `threshold` on, ascending: k.
  DEVICE void write_chosen(int token, const Bounds& bounds, const u64* list, u32 count, u64 threshold) const {
    int* const out = s.indices + token * s.indices_pitch;
    const int request = request_of(token);
    if (threadIdx.x == 0) s.counts[token] = s.k;
    u32 done = 0;
#pragma unroll 1
    for (int first = bounds.start; first < bounds.end; first += WINDOW) {
#pragma unroll 1
      for (u32 i = threadIdx.x; i < count; i += CONSUMERS) {
        const u64 entry = list[i];
        const u32 place = position_of(entry) - first;
        if (entry >= threshold && place < WINDOW) atomicOr(&bins()[place / 32], 1u << place % 32);
      }
      meet<CONSUMERS>();
      u32* const words = bins() + threadIdx.x * OWN;
      u32 sum = 0, total;
#pragma unroll
      for (int i = 0; i < OWN; ++i) sum += __popc(words[i]);
      u32 place = done + exclusive_scan<CONSUMERS>(choice().control, sum, total);
#pragma unroll 1
      for (int i = 0; i < OWN; ++i) {
#pragma unroll 1
        for (u32 left = words[i]; left; left &= left - 1)
          out[place++] = s.translated(first + (threadIdx.x * OWN + i) * 32 + __ffs(left) - 1, request);
        words[i] = 0;
      }
      done += total;
      meet<CONSUMERS>();
    }
  }

  // All columns, which are not more than k.
  DEVICE void write_all(int token, int start, int length) const {
    int* const out = s.indices + token * s.indices_pitch;
    const int request = request_of(token);
    if (threadIdx.x == 0) s.counts[token] = length;
#pragma unroll 1
    for (int i = threadIdx.x; i < s.k; i += CONSUMERS) out[i] = i < length ? s.translated(start + i, request) : -1;
  }
};

// ---- a CTA ----------------------------------------------------------------------------------------------------------

template <class L, Source SOURCE>
DEVICE void select_rows(const SelectParams& s, unsigned char* shared_memory, int unit, int rank) {
  const u32 shared = shared_address(shared_memory);
  const int first = unit * L::TOKENS;
  begin_barriers<L, SOURCE>(s.scores, shared);
  prefetch_rows<L, SOURCE>(s.scores);
  Chosen<L, SOURCE> chosen(s, shared_memory);
  if (threadIdx.x < CONSUMERS) chosen.clear();
  __syncthreads();
  if (s.cluster > 1) cluster_meet();  // all CTAs have begun
  if (uniform(threadIdx.x >> 7) == 2) {
    fewer_registers<L::PARTS == 2 ? 32 : SOURCE == FLAT ? 40 : 72>();
    if (threadIdx.x < CONSUMERS + BRINGERS)
      produce_units<L, SOURCE>(s, shared, chosen.choice(), first, rank);
  } else {
    more_registers<L::PARTS == 2 ? 240 : SOURCE == FLAT ? 232 : 216>();
    consume<L, SOURCE>(s.scores, shared, chosen);
  }
}

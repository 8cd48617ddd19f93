// The k best columns of a row of scores, by a CTA or by the CTAs of a cluster.
//
// 1. A sample of the row, in registers, gives a score that a few more than k columns are likely to reach: the gate.
// 2. Each CTA reads its part of the row once, chunks of it under way to L2 and one to registers, and appends what reaches
//    the gate to its entries, in the order of columns. Where these might not hold the next chunk, all but its own k best
//    go, and the gate rises above them.
// 3. The CTAs of a cluster hand their entries to the first. Were there less than k in all, the row is read again without
//    a gate.
// 4. The first selects (topk_select.cuh), and writes what is chosen in order.
//
// So the result is exact whatever the sample was like, and no buffer can overflow: there is room for k entries and a
// chunk.
//
// PLANES: scores lie by planes (planes.cuh); LONG: rows may have more than 65,536 columns, up to twice as many. The gate is one of upper halves, and upper halves alone are read, half the
// memory; lower halves decide in the bin of the rank (topk_planes.cuh). Where that finds less than k, or too much to keep,
// scores are read whole, as above.
//
// A row that a CTA's registers hold needs none of this where rows are few, however wide the tensor (topk_short.cuh).
#pragma once
#include "topk_planes.cuh"

// Scores that reach the gate go on. A gate without a score lets everything pass, NaN too.
struct Gate {
  u32 key;
  bool is_score;
  float score;

  DEVICE explicit Gate(u32 least) : key(least), is_score(least > LOWEST_KEY), score(score_of(least)) {}
};

// Keys of a thread's scores of the sample; 0 is none.
template <int VECTORS>
struct Sampled {
  u32 keys[VECTORS][4];

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) use(keys[i / 4][i % 4], 0u);
  }
};

// SAMPLED groups of four of a sample for each thread. FEW_ROWS: latency is all, and registers hold short rows.
template <int THREADS, int VECTORS, int SAMPLED, bool FEW_ROWS, bool PLANES = false, bool LONG = false>
struct Selection {
  static_assert(!PLANES || (!FEW_ROWS && SAMPLED == 2), "a thread has a piece of the sample of many rows");
  static constexpr u32 STEP = THREADS * VECTORS;  // groups of 4 columns of a chunk
  static constexpr u32 CHUNK = STEP * 4;
  static constexpr u32 HELD = THREADS < 1024 ? 4 : 2;  // groups of a thread, which registers hold
  // Groups that are on their way to L2 in front of those that are read; more of many rows take L2 from one another.
  static constexpr u32 AHEAD = (FEW_ROWS ? 4 : 2) * STEP;
  static_assert(VECTORS <= 4, "counts of the groups of a warp share a word");

  using Four = typename FourOf<PLANES>::Type;
  const Params& p;
  Control& control;
  u32* const bins;
  u64* const entries;
  Row row;
  u32 first, vectors;  // this CTA's part, in groups of 4 columns
  int part_end;        // column behind it
  u32 whole, whole_end;  // groups of the part that the row has all columns of
  u32 least;             // key that all entries reach
  u32 turn;              // of LONG planes, as `UpperListed` has it

  DEVICE Selection(const Params& params, unsigned char* shared)
      : p(params),
        control(*reinterpret_cast<Control*>(shared)),
        bins(reinterpret_cast<u32*>(shared + sizeof(Control))),
        entries(reinterpret_cast<u64*>(bins + BINS)) {}

  // The rank in a sample that is likely to be below the k-th best: its own and some standard deviations, since scores
  // next to one another are not independent.
  DEVICE u32 sample_rank(int length) const {
    const float mean = 4.f * p.sampled * p.k / length;
    return static_cast<u32>(mean + p.deviations * sqrtf(mean) + 4.f);
  }

  // Groups of four of the sample. All of the row's that are whole may be in it, in runs of four: longer runs are read in
  // less time, but say less of a row whose neighbours score alike, so its gate fails more often.
  DEVICE void place_sample(u32 (&groups)[SAMPLED]) const {
    const u32 first_whole = (row.start + 3) / 4, runs = (row.end / 4 - first_whole) / 4;
#pragma unroll
    for (int i = 0; i < SAMPLED; ++i) {
      const u32 number = i * THREADS + threadIdx.x;
      groups[i] = first_whole + number / 4 * runs / (p.sampled / 4) * 4 + number % 4;
    }
  }

  DEVICE void load_sample(const u32 (&groups)[SAMPLED], float4 (&x)[SAMPLED]) const {
#pragma unroll
    for (int i = 0; i < SAMPLED; ++i) {
      x[i] = {absent(), absent(), absent(), absent()};
      if (i * THREADS + threadIdx.x < p.sampled) {
        if constexpr (PLANES) {
          Halves halves;
          halves.load(words(), 4 * groups[i]), x[i] = halves.scores(row, 4 * groups[i]);
        } else {
          x[i] = load_once_16(row.scores + 4 * static_cast<i64>(groups[i]));
        }
      }
    }
  }

  // The same by upper halves: word of a thread's piece, of eight columns of a run of sixteen.
  DEVICE u32 place_piece() const {
    const u32 first_run = (row.start + 15) / 16, runs = row.end / 16 - first_run, number = threadIdx.x;
    return word_of((first_run + number / 2 * runs / (p.sampled / 4)) * 16 + number % 2 * 4);
  }

  DEVICE void load_piece(u32 word, float4 (&x)[SAMPLED]) const {
    uint4 own = {~0u, ~0u, ~0u, ~0u};  // absent
    if (threadIdx.x * 2 < p.sampled) own = load_words_once(words() + word);
    auto low = [](u32 word) { return __uint_as_float(word << 16); };
    auto high = [](u32 word) { return __uint_as_float(word & 0xffff0000u); };
    x[0] = {low(own.x), low(own.y), low(own.z), low(own.w)};
    x[1] = {high(own.x), high(own.y), high(own.z), high(own.w)};
  }

  // A key that this rank of the sample reaches, or one a little below.
  DEVICE u32 gate_of(const float4 (&x)[SAMPLED], u32 rank) {
    Sampled<SAMPLED> own;
#pragma unroll
    for (int i = 0; i < SAMPLED; ++i) {
      const u32 there = PLANES || i * THREADS + threadIdx.x < p.sampled ? ~0u : 0;
      own.keys[i][0] = key_of(x[i].x) & there, own.keys[i][1] = key_of(x[i].y) & there;
      own.keys[i][2] = key_of(x[i].z) & there, own.keys[i][3] = key_of(x[i].w) & there;
    }
    __syncthreads();  // bins are at 0
    const bool few_wanted = rank >= 32 && rank < 2 * p.sampled;
    const FirstBins first_bins(control, bins, few_wanted);
    if (few_wanted) own.each([&](u32 key, u32) { first_bins.count(key); });
    return static_cast<u32>(select<THREADS, false, MORE>(control, bins, own, rank, first_bins.least, first_bins.shift,
                                                         rank / p.spare + 2, few_wanted) >>
                            32);
  }

  // A warp's groups of a chunk stand next to one another.
  DEVICE u32 group(u32 at, int vector) const {
    return at + (threadIdx.x / 32 * VECTORS + vector) * 32 + threadIdx.x % 32;
  }

  DEVICE void prefetch(u32 at, u32 count) const {
    if (threadIdx.x == 0 && at < vectors) {
      const u32 whole = min(count, vectors - at);
      prefetch_bulk_to_l2(row.scores + 4 * static_cast<i64>(first + at), whole * 16);
    }
  }

  // Asks for the chunk that comes AHEAD of one: lines by many threads take fewer instructions than a copy, but many rows
  // take longer by them.
  DEVICE void prefetch_ahead(u32 at) const {
    if constexpr (!FEW_ROWS)
      prefetch(at + AHEAD, STEP);
    else if (threadIdx.x < STEP / 8 && at + AHEAD + STEP <= vectors)
      prefetch_to_l2(row.scores + 4 * static_cast<i64>(first + at + AHEAD) + thread_here() * 32);
  }

  DEVICE const u32* words() const { return reinterpret_cast<const u32*>(row.scores); }

  // Scores of a chunk. What the row does not have is absent, and not read.
  DEVICE void load(u32 at, Halves (&x)[VECTORS]) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (group(at, i) < vectors) x[i].load(words(), 4 * (first + group(at, i)));
  }

  DEVICE void load(u32 at, float4 (&x)[VECTORS]) const {
    const float* const from = row.scores + 4 * static_cast<i64>(first + group(at, 0));
    if (at >= whole && at + STEP <= whole_end) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) x[i] = load_once_16(from + i * 128);
      return;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 own = group(at, i);
      x[i] = {absent(), absent(), absent(), absent()};
      if (own >= whole && own < whole_end) {
        x[i] = load_once_16(from + i * 128);
      } else if (own < vectors) {
        int column = 4 * (first + own);
        hold(column);  // else what it takes is kept in registers throughout
        if (row.has(column)) x[i].x = from[i * 128];
        if (row.has(column + 1)) x[i].y = from[i * 128 + 1];
        if (row.has(column + 2)) x[i].z = from[i * 128 + 2];
        if (row.has(column + 3)) x[i].w = from[i * 128 + 3];
      }
    }
  }

  // Whether this CTA's part has a column; none in front of it is asked for.
  DEVICE bool has(int column) const {
    return static_cast<u32>(column - row.start) < static_cast<u32>(part_end - row.start);
  }

  DEVICE bool passes(const Gate& gate, float x, int column) const { return has(column) && key_of(x) >= gate.key; }

  // Makes entries of the scores that were appended from number `begin` on. If that is the last of them, all are COUNTED in
  // the bins of `select_listed` at the same time.
  template <bool COUNTED = false>
  DEVICE void order(u32 begin, u32 end) const {
    const u32 lowest = max(least, 1u), bins_at = shared_address(bins);
    const int shift = shift_of_listed(least);
#pragma unroll FEW_ROWS ? 1 : 4
    for (u32 i = (COUNTED ? 0 : begin) + threadIdx.x; i < end; i += THREADS) {
      u32* const key = reinterpret_cast<u32*>(entries + i) + 1;
      u32 made = *key;
      if (!COUNTED || i >= begin) *key = made = key_of(__uint_as_float(made));
      if (COUNTED) count_at(bins_at + 4 * min(made - lowest >> shift, BINS - 1));
    }
    __syncthreads();
  }

  // All of this CTA's part, whose first chunk is in `next`. Returns the number of entries; more than `enough` are counted.
  template <bool SCORES>
  DEVICE u32 read(Gate gate, Four (&next)[VECTORS], u32 enough) {
    const u32 base = shared_address(entries);
    u32 have = 0, ordered = 0, parity = 0;
#pragma unroll 1
    for (u32 at = 0; at < vectors; at += STEP) {
      float x[VECTORS][4];
      u32 counts = 0;  // a byte for each group
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int column = 4 * (first + group(at, i));
        float4 own;
        if constexpr (PLANES)
          own = next[i].scores(row, column);
        else
          own = next[i];
        x[i][0] = own.x, x[i][1] = own.y, x[i][2] = own.z, x[i][3] = own.w;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (SCORES)
            add_if_reaches(counts, x[i][j], gate.score, 1 << 8 * i);
          else
            counts += passes(gate, x[i][j], column + j) << 8 * i;
        }
      }
      load(at + STEP, next);
      prefetch_ahead(at);
      const u32 inclusive = inclusive_scan(counts);
      const u32 of_warp = __shfl_sync(~0u, inclusive, 31);
      u32 sum = 0, total;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) sum += of_warp >> 8 * i & 0xff;
      u32 place = have + before_warp<THREADS>(control, sum, parity, total);
      if (sum) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
          u32 own = base + 8 * (place + ((inclusive - counts) >> 8 * i & 0xff));
          const int column = 4 * (first + group(at, i));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (SCORES)
              append_if_reaches(own, x[i][j], gate.score, ~column - j);
            else
              append_if(passes(gate, x[i][j], column + j), own, x[i][j], ~column - j);
          }
          place += of_warp >> 8 * i & 0xff;
        }
      }
      have += total;
      if (have + CHUNK > p.capacity && at + STEP < vectors) {
        __syncthreads();
        order(ordered, have);
        const u64 threshold = keep_best<THREADS>(control, bins, entries, have, p.k, least);
        have = ordered = p.k;
        gate = Gate(static_cast<u32>(threshold >> 32) + 1);  // columns to come lose against equal ones
      }
      parity ^= 1;
    }
    __syncthreads();
    if (have > enough)
      order<true>(ordered, have);
    else
      order(ordered, have);
    return have;
  }

  // Words of upper halves that there is room for; entries of some of them need room, too.
  DEVICE u32 room_for_words() const { return p.capacity + p.capacity / 2; }

  // Column that those of words are counted from.
  DEVICE int origin() const { return LONG ? row.start & ~63 : 0; }

  // Words of all columns whose upper half reaches that of `least`, in order. Returns how many those are, or more than there
  // is room for. `column` is a thread's first one.
  DEVICE u32 read_upper(int column) {
    using Own = Pieces<THREADS>;
    const u32 base = shared_address(entries), lane = threadIdx.x % 32, odd = lane % 2, gate = gate_of_key(least);
    const u32* from = words() + word_of(column);
    u32 have = 0, parity = 0, columns = column - origin() | column - origin() + 8 << 16;
    if (LONG) turn = ~0u;
    Own x, next;
    x.load(from, row.end - column);
#pragma unroll 1
    for (int at = row.start & ~63; at < row.end; at += Own::COLUMNS) {
      u32 bits = x.reaching(gate);
      if (at < row.start || at + Own::COLUMNS > row.end) bits &= Own::inside(row.start - column, row.end - column);
      next.load(from + Own::COLUMNS, row.end - column - Own::COLUMNS);
      const u32 bytes = Own::word_bytes(bits), others = __shfl_sync(~0u, bytes, lane ^ 1);
      const u32 low = Own::low(bytes), both = low + Own::high(bytes), inclusive = inclusive_scan(both);
      const u32 of_warp = __shfl_sync(~0u, inclusive, 31), of_first = of_warp & 0xffff;
      u32 total, place = have + before_warp<THREADS>(control, of_first + (of_warp >> 16), parity, total);
      have += total, parity ^= 1;
      if (have > 4 * room_for_words()) break;
      // An even thread has the first four of sixteen columns, the thread behind it the next four, and so on.
      place += base;
      const u32 before = inclusive - both, first = before - (odd ? Own::high(others) : 0),
                second = before + low + (odd ? 0 : Own::low(others));
      x.template append<0>(bits, place + (first & 0xffff), columns);
      x.template append<2>(bits, place + (second & 0xffff), columns);
      x.template append<1>(bits, place + of_first + (first >> 16), columns);
      x.template append<3>(bits, place + of_first + (second >> 16), columns);
      column += Own::COLUMNS, columns += Own::COLUMNS * 0x00010001u, from += Own::COLUMNS;
      if (LONG && at - origin() == 65536 - Own::COLUMNS)  // the low half would carry into the high one
        turn = have / 4, columns = Own::first() | Own::first() + 8 << 16;
      x = next;
    }
    __syncthreads();
    return have / 4;
  }

  // Writes the best of `count` words. Returns false, and nothing is written, where too many have one upper half.
  DEVICE bool write_upper(i64 number, int request, u32 count) {
    const u32 wanted = p.k;
    u32* const own = reinterpret_cast<u32*>(entries);
    u64* const rest = entries + (count + 1) / 2;
    u32 bound = LOWEST_KEY & 0xffff0000u;
    const u32 room = (p.capacity - (count + 1) / 2) * 2 / 3 - 1;
    const UpperListed<THREADS, LONG> listed{
        own, count, words(), rest, room, static_cast<u32>(origin()), LONG ? turn : 0};
    if (count > wanted) {
      bound = select<THREADS>(control, bins, listed, wanted, least, max(shift_of_listed(least), 16)) >> 32;
      if (bound == 0) return false;
    }
    const float most = upper_of(__float_as_uint(score_of(bound)));
    int* to = p.indices + number * p.indices_pitch;
    hold(to);  // else it is made again for each word
    each_by_warps<THREADS>(
        control, own, count, NO_WORD, [&](u32 word) { return !(upper_of(word) <= most); },
        [&](bool chosen, u32 place, u32 word, u32 number) {
          const int column = listed.column_of(word, number);
          if (p.block_size == 0)
            store_int_if(chosen, to + place, column);
          else if (chosen)
            to[place] = p.translated(column, request);
        });
    return true;
  }

  // All entries of a cluster into the first CTA's memory, in the order of CTAs. Returns how many it has then.
  DEVICE u32 gather(u32 rank, const u32* counts, u32 total, u32 have) {
    if (total <= p.capacity) {
      const u32 gathered = shared_address(&control.gathered);
      if (rank > 0) {
        u32 begin = 0;
        for (u32 i = 0; i < rank; ++i) begin += counts[i];
        const u32 target = peer_address(shared_address(entries), 0) + begin * 8, barrier = peer_address(gathered, 0);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < have; i += THREADS) send_8(target + i * 8, barrier, entries[i]);
      } else {
        if (threadIdx.x == 0) mbarrier_arrive_expect(gathered, (total - have) * 8);
        __syncwarp();
        mbarrier_wait_cluster(gathered, 0);
      }
      return total;
    }
    cluster_meet();  // entries are there
    if (rank == 0) {
#pragma unroll 1
      for (u32 other = 1; other < p.cluster; ++other) {
        const u64* const theirs = peer_pointer(entries, other);
#pragma unroll 1
        for (u32 at = 0; at < counts[other];) {
          if (have == p.capacity) {
            keep_best<THREADS>(control, bins, entries, have, p.k, least);
            have = p.k;
          }
          const u32 taken = min(counts[other] - at, p.capacity - have);
          for (u32 i = threadIdx.x; i < taken; i += THREADS) entries[have + i] = theirs[at + i];
          have += taken, at += taken;
          __syncthreads();
        }
      }
    }
    cluster_meet();  // the others' memory has been read
    return have;
  }

  DEVICE void write(i64 number, int request, u32 count, u32 wanted, bool counted) {
    int* const out = p.indices + number * p.indices_pitch;
    const u64 threshold = count > wanted ? select_listed<THREADS>(control, bins, entries, count, wanted, least, counted) : 1;
    if (!p.sorted) {
      int* to = out;
      hold(to);  // else it is made again for each entry
      auto put = [&](u32 place, u64 entry) { to[place] = p.translated(position_of(entry) - row.skew, request); };
      auto each = [&](auto use) {
        each_by_warps<THREADS>(control, entries, count, u64(0), [&](u64 entry) { return entry >= threshold; }, use);
      };
      if constexpr (FEW_ROWS)
        each_chosen<THREADS>(control, entries, count, threshold, put);
      else if (p.block_size == 0)
        each([&](bool chosen, u32 place, u64 entry, u32) {
          store_int_if(chosen, to + place, ~row.skew - static_cast<int>(entry));  // the position, less the skew
        });
      else
        each([&](bool chosen, u32 place, u64 entry, u32) {
          if (chosen) put(place, entry);
        });
      for (u32 i = wanted + threadIdx.x; i < p.k; i += THREADS) out[i] = -1;
      return;
    }
    each_chosen<THREADS>(control, entries, count, threshold, [&](u32 place, u64 entry) { entries[place] = entry; });
    __syncthreads();
    sort<THREADS>(entries, wanted);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.k; i += THREADS)
      out[i] = i < wanted ? p.translated(position_of(entries[i]) - row.skew, request) : -1;
  }

  // Reads until enough is found, with the gate of `least` first, and writes. The first chunk is in `next`.
  DEVICE void finish(i64 number, int request, int length, u32 rank, bool alone, Four (&next)[VECTORS]) {
    const u32 wanted = min(length, p.k), enough = alone ? wanted : ~0u;
    u32 have, total;
#pragma unroll 1
    for (u32 round = 0;; ++round) {
      const Gate gate(least);
      have = gate.is_score ? read<true>(gate, next, enough) : read<false>(gate, next, enough);
      total = have;
      if (!alone) {
        if (have > max(p.capacity / p.cluster, static_cast<u32>(p.k))) {  // else the first CTA might have to drop all these
          keep_best<THREADS>(control, bins, entries, have, p.k, least);
          have = p.k;
        }
        u32* const counts = control.counts[round];
        const u32 told = shared_address(&control.told[round]);
        if (threadIdx.x < p.cluster)
          send_4(peer_address(shared_address(&counts[rank]), threadIdx.x), peer_address(told, threadIdx.x), have);
        __syncwarp();
        mbarrier_wait_cluster(told, 0);
        total = 0;
        for (u32 i = 0; i < p.cluster; ++i) total += counts[i];
        if (total >= wanted) have = gather(rank, counts, total, have);
      }
      if (total >= wanted) break;
      least = 0;
      u32 again = 0;
      hold(again);  // else its columns are kept in registers from the first time on
      load(again, next);
    }
    if (rank == 0) write(number, request, have, wanted, alone);
  }

  DEVICE void run(i64 number, u32 rank) {
    row.scores = p.scores + number * p.pitch;
    row.skew = PLANES ? 0 : static_cast<int>(reinterpret_cast<u64>(row.scores) / 4 % 4);
    row.scores -= row.skew;
    hold(row.scores);
    const Params::Given given = p.given_of(number);
    clear_bins<THREADS>(bins);
    int start, end;
    p.columns_of(given, start, end);
    auto wait = [] {
      wait_for_prerequisites();  // only scores may come from the launch in front
      launch_dependents();
    };
    if (FEW_ROWS) wait();
    const int length = end - start;
    row.start = start + row.skew, row.end = end + row.skew;
    const u32 row_first = row.start / 4, row_vectors = (row.end + 3) / 4 - row_first;
    u32 groups[SAMPLED];
    float4 sample[SAMPLED];
    if (!FEW_ROWS) {  // likewise
      u32* const own = reinterpret_cast<u32*>(entries) + threadIdx.x;
      if (PLANES)
        groups[0] = place_piece();
      else
        place_sample(groups);
#pragma unroll
      for (int i = 0; i < SAMPLED; ++i) own[i * THREADS] = groups[i];
      wait();
#pragma unroll
      for (int i = 0; i < SAMPLED; ++i) groups[i] = own[i * THREADS];
      if (length >= p.gated && PLANES)
        load_piece(groups[0], sample);
      else if (length >= p.gated)
        load_sample(groups, sample);
    }
    if (rank == 0 && threadIdx.x == 0) p.lengths[number] = min(length, p.k);
    if (length <= p.k && !p.sorted) return write_all<THREADS>(p, number, given.request, start, length, rank);

    if (FEW_ROWS && row_vectors <= HELD * THREADS) {
      if (rank > 0) return;
      Held<THREADS, HELD, (THREADS < 1024)> held(4 * row_first, row_vectors);
      held.load(row.scores, row.skew, p.num_columns);
      __syncthreads();  // bins are at 0
      const FirstBins first_bins(control, bins, length > 2 * p.k);
      held.count(row, p.num_columns, first_bins);
      return held.choose(p, control, bins, number, given.request, row, first_bins);
    }
    const u32 share = FEW_ROWS ? max((row_vectors + p.cluster - 1) / p.cluster, p.least) : row_vectors;
    const u32 before = min(rank * share, row_vectors);
    const bool alone = !FEW_ROWS || row_vectors <= share;  // many rows need no cluster
    if (alone && rank > 0) return;
    first = row_first + before, vectors = min(share, row_vectors - before);
    part_end = min(row.end, static_cast<int>(4 * (first + vectors)));
    whole = (row.start + 3) / 4 > first, whole_end = min(vectors, row.end / 4 - first);
    if (!alone) {
      if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&control.gathered), 1);
        for (u64& barrier : control.told) mbarrier_init(shared_address(&barrier), 1);
        fence_barrier_init();
        for (u64& barrier : control.told) mbarrier_arrive_expect(shared_address(&barrier), p.cluster * 4);
      }
      __syncwarp();
      cluster_arrive();
    }

    // The sample comes first: what is prefetched would stand in its way.
    Four next[VECTORS];
    if (FEW_ROWS) {
      place_sample(groups);
      if (length >= p.gated) load_sample(groups, sample);
    }
    if (!PLANES) load(0, next), prefetch(STEP, AHEAD - STEP);
    const u32 rank_in_sample = sample_rank(max(length, 1));
    least = length >= p.gated && rank_in_sample <= 2 * p.sampled ? gate_of(sample, rank_in_sample) : 0;
    if (!alone) cluster_wait();  // all CTAs have begun

    if constexpr (PLANES) {
      const bool gated = least > LOWEST_KEY;
      if (length <= static_cast<int>(room_for_words())) least = max(least, LOWEST_KEY + 1);
      least &= 0xffff0000u;
      int column = (row.start & ~63) + Pieces<THREADS>::first();
      hold(column);  // else it is made again for each chunk
      __syncthreads();  // bins are at 0
      const u32 have = least > LOWEST_KEY ? read_upper(column) : 0;
      const bool many = have >= static_cast<u32>(p.k);
      if (many && have <= room_for_words() && write_upper(number, given.request, have)) return;
      Selection(p, reinterpret_cast<unsigned char*>(&control)).run_whole(number, many && gated);
    } else {
      finish(number, given.request, length, rank, alone, next);
    }
  }

  // A row of planes whose upper halves say too little; a gate of whole scores, if it is to have one, says more.
  DEVICE void run_whole(i64 number, bool gated) {
    row.scores = p.scores + number * p.pitch, row.skew = 0;
    const Params::Given given = p.given_of(number);
    p.columns_of(given, row.start, row.end);
    const int length = row.end - row.start;
    first = row.start / 4, vectors = (row.end + 3) / 4 - first, part_end = row.end, least = 0;
    __syncthreads();  // nobody needs words any more
    if (gated) {
      u32 groups[SAMPLED];
      float4 sample[SAMPLED];
      place_sample(groups), load_sample(groups, sample);
      least = gate_of(sample, sample_rank(length));
    }
    Four next[VECTORS];
    load(0, next), prefetch(STEP, AHEAD - STEP);
    finish(number, given.request, length, 0, true, next);
  }
};

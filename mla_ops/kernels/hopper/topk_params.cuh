// Arguments of a launch of top-k.
#pragma once
#include "topk_select.cuh"

struct Params {
  const float* scores;     // [num_rows, num_columns]
  const int* starts;       // [num_rows]; null: 0
  const int* ends;         // [num_rows]; null: all columns
  int* indices;            // [num_rows, k]
  int* lengths;            // [num_rows]
  const int* block_table;  // [num_requests, table_width]
  const int* requests;     // [num_rows]; null: not asked for
  i64 pitch;
  i64 indices_pitch;
  i64 table_pitch;
  u32 num_rows;
  int num_columns;
  int k;
  int table_width;
  int num_requests;
  int block_size;    // 0: columns as they are
  int known_only;    // a row of a request that there is not has no columns
  u32 cluster;
  u32 capacity;  // entries: at least k and a chunk, the power of two from k on
  u32 least;     // groups of 4 columns that a CTA takes at least, where there are several
  u32 gated;     // columns of a row from which on there is a gate; at least those of a sample and 8
  u32 sampled;   // groups of 4 columns
  u32 spare;     // part of the gate's rank in a sample by which it may lie below it
  float deviations;  // by which the gate's rank in a sample is more than its mean
  int sorted;
  u32 turn_bits;  // a CTA of such a cluster writes the columns of 2^turn_bits turns of a warp of each CTA
  int ahead;  // groups of a thread that its registers ask for before a row's length is known: all or none

  // The part of a row that memory has; bounds may hold any number.
  struct Given {
    int start, end, request;
  };

  DEVICE Given given_of(i64 row) const {
    return {starts == nullptr ? 0 : starts[row], ends == nullptr ? num_columns : ends[row],
            requests == nullptr ? 0 : requests[row]};
  }

  // The row's columns.
  DEVICE void columns_of(const Given& given, int& start, int& end) const {
    start = min(max(given.start, 0), num_columns);
    end = min(max(given.end, start), num_columns);
    if (known_only && static_cast<u32>(given.request) >= static_cast<u32>(num_requests)) end = start;
  }

  // No entry's place is less (topk_select.cuh).
  DEVICE u32 last_place() const { return ~static_cast<u32>(num_columns + 3); }

  // The slot of a column's key, -1 if the table has none.
  DEVICE int translated(int column, int request) const {
    if (block_size == 0) return column;
    const int block = column / block_size;
    if (static_cast<u32>(request) >= static_cast<u32>(num_requests) || block >= table_width) return -1;
    const int found = block_table[request * table_pitch + block];
    const i64 slot = static_cast<i64>(found) * block_size + (column - block * block_size);
    return found < 0 || slot > 0x7fffffff ? -1 : static_cast<int>(slot);
  }
};

// A row, with columns counted from a multiple of 16 bytes.
struct Row {
  const float* scores;
  int start, end;
  int skew;  // column 0 has it

  DEVICE bool has(int column) const { return static_cast<u32>(column - start) < static_cast<u32>(end - start); }
};

DEVICE float absent() { return __uint_as_float(0x7fffffff); }

// `sparse_attention.cu` for few rows that share clusters where their lengths differ (`packed_rows.cuh`).

#define SHARES_CLUSTERS 1
#include "sparse_attention.cu"

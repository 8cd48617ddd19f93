// `sparse_attention.cu` for rows that may have as many CTAs as their lengths ask for (`row_ctas.cuh`).

#define BY_LENGTH 1
#include "sparse_attention.cu"

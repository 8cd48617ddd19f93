// `sparse_attention_bf16_64.cu` for rows that may have as many CTAs as their lengths ask for (`row_ctas.cuh`).

#define BY_LENGTH 1
#include "sparse_attention_bf16_64.cu"

// Token-level sparse MLA over a paged cache of fp8, for SM90: rows that can not be taken in slices (`slices.cuh`), a CTA each,
// by a launch behind that one.

#include "slices_layout.cuh"
#include "sparse_attention.cu"

// A CTA that attends to one row.
constexpr Launch ALONE = static_cast<Launch>(static_cast<int>(Launch::HELD_BY_ONE) + 1);

template <>
DEVICE Row first_row<ALONE>(const Params& p, u32) {
  return row_of(p, token_of(p), blockIdx.x, 0, 1, 0);
}
template <>
DEVICE Row next_row<ALONE, false>(const Params& p, u32, const Row& row) {
  Row next = row;
  next.token = p.num_tokens;
  return next;
}
template <>
DEVICE Row next_row<ALONE, true>(const Params& p, u32, const Row& row) {
  return next_row<ALONE, false>(p, 0, row);
}

template <Format FORMAT>
__global__ void __launch_bounds__(512, 1) sparse_attention_alone(const __grid_constant__ Params p) {
  using L = Layout<64, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  wait_for_prerequisites();
  if (__ldcg(is_refused(p, blockIdx.x))) attend<64, FORMAT, ALONE>(p);
}

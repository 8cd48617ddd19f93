// FlashInfer's own checks of what its SM120 kernels take, over tensors of the CPU that say they are of a GPU.

#include "attention_resolve.cu"
#include "attention_validation.h"

namespace {

using namespace flashinfer::sparse_mla_sm120;
using Maybe = tvm::ffi::Optional<TensorView>;

DLTensor on_gpu(const TensorView& view) {
  static_assert(sizeof(TensorView) == sizeof(DLTensor));
  DLTensor tensor = reinterpret_cast<const DLTensor&>(view);
  tensor.device = {kDLCUDA, 0};
  return tensor;
}

ffi::Array<int64_t> inspect(TensorView q, TensorView cache, TensorView indices, TensorView out, Maybe lengths,
                            Maybe sink, Maybe extra, Maybe extra_indices, Maybe extra_lengths, Maybe lse, Maybe mid,
                            Maybe mid_lse, int64_t model) {
  DLTensor tensors[] = {on_gpu(q), on_gpu(cache), on_gpu(indices), on_gpu(out)};
  DLTensor options[8];
  Maybe given[] = {lengths, sink, extra, extra_indices, extra_lengths, lse, mid, mid_lse};
  for (int i = 0; i < 8; ++i) {
    if (!given[i].has_value()) continue;
    options[i] = on_gpu(given[i].value());
    given[i] = TensorView(options + i);
  }
  return inspect_attention_metadata<false>(tensors, tensors + 1, tensors + 2, tensors + 3, given[0], given[1], given[2],
                                           given[3], given[4], given[5], given[6], given[7], model, false, 512);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(inspect, inspect);

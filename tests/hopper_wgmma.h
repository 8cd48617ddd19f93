// Products of a warpgroup by a CPU: what comes of a warp's rows. `hopper_on_cpu.py` puts it in place of wgmma.cuh.
#pragma once

#include "ptx.cuh"

DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int PENDING>
DEVICE void wgmma_wait() {}
DEVICE u64 tile_descriptor(u32 address, u32, u32) { return address >> 4; }

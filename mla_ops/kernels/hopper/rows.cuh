// Rows of the quantised cache formats, in bytes: `python -m mla_ops.kernels.cuda.rows` writes them.
// BYTES: from one token's data to the next one's; LATENT: e4m3 from the first byte on; GROUP: of them share a scale;
// SCALE_BYTES: a token's scales, in the row or, if SCALES_APART, behind all rows of the block; ROPE_AT: 64 bfloat16.
#pragma once

struct RowOfFp8DsMla {
  static constexpr int BYTES = 656, LATENT = 512, GROUP = 128, SCALE_BYTES = 16, ROPE_AT = 528;
  static constexpr bool SCALES_APART = false;
};

struct RowOfFp8DsMlaV4 {
  static constexpr int BYTES = 576, LATENT = 448, GROUP = 64, SCALE_BYTES = 8, ROPE_AT = 448;
  static constexpr bool SCALES_APART = true;
};

struct RowOfFp8Index {
  static constexpr int BYTES = 128, LATENT = 128, GROUP = 128, SCALE_BYTES = 4;
  static constexpr bool SCALES_APART = true;
};

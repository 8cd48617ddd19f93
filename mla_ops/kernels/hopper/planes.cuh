// Scores by planes, for a top-k that reads half of them: upper halves of 64 columns, a line of memory, then their lower
// halves.
//
// A word has halves of two columns, the first of the low 16 bits: column c of sixteen and the one eight behind it, as a
// thread of the scores has them. Rows begin at multiples of 256 bytes.
#pragma once
#include "memory.cuh"

constexpr u32 LOWER_HALVES = 32;  // words behind the upper ones

// Word of a column's upper half, which is of its high 16 bits if `in_high_bits(column)`.
DEVICE u32 word_of(u32 column) { return column / 64 * 64 + column % 64 / 16 * 8 + column % 8; }
DEVICE bool in_high_bits(u32 column) { return column / 8 % 2; }

// Bits of a score, of words with its halves.
DEVICE u32 whole_bits(u32 upper, u32 lower, bool high_bits) {
  return __byte_perm(lower, upper, high_bits ? 0x7632 : 0x5410);
}

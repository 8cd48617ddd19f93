"""CUDA C++ kernels for Hopper. docs/kernels/index.md defines their words: row, turn, share, part, group, wave, wide."""

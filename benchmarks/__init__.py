"""One file a family: time, bytes/s and FLOP/s of each op beside the floor, with a correctness check in every row."""

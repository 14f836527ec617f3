// What device code sees of the emulator: its lane, and the points where a wave moves as one.
#pragma once
#include <stdint.h>
#include <string.h>

namespace simt {
struct Index { unsigned x, y, z; };
struct Fiber { Index tid; unsigned linear; };
extern Fiber *cur; // the lane that runs now
extern Index block_idx, block_dim, grid_dim;
extern int wave;
extern unsigned char *lds;
enum Access { READ, WRITE, ATOMIC };

inline int lane() { return cur->linear % wave; }
// Suspends the lane until every lane at the same program point has arrived, then reads `src`'s register.
__attribute__((noinline)) void permute(void *value, int bytes, int src_lane);
__attribute__((noinline)) void barrier();
// An access to memory, ahead of it: if to shared memory, the lanes of a wave make it together, and it's checked.
__attribute__((noinline)) void touch(const void *address, size_t bytes, Access kind);

template <class V> __attribute__((noinline)) V bpermute(V value, int src) {
  static_assert(sizeof(V) <= 8, "a register pair");
  permute(&value, sizeof(V), src);
  return value;
}
} // namespace simt

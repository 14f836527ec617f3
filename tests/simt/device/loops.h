// Which iteration of which loop a lane is in, from the basic blocks that it enters.
//
// At -O0 a function's blocks lie in the order of its text, so a jump backwards, or to itself, is a loop's next
// iteration: from the jump's target to where it came from is the loop. A frame is known by its base and its return
// address, since a function called next has the same base.
#pragma once
#include <algorithm>
#include <map>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

namespace simt {
enum { FRAMES = 24, NESTED = 12 };
struct Loop { uintptr_t first; int64_t iteration; const uintptr_t *end; };
inline std::map<uintptr_t, uintptr_t> &loop_ends() { // first block -> last block of each loop met so far
  static std::map<uintptr_t, uintptr_t> ends;
  return ends;
}
struct Frame {
  uintptr_t base, returns_to, block;
  int depth; // loops that it is in, outermost first
  Loop loops[NESTED];
  int64_t iteration(uintptr_t first) const {
    for (int i = 0; i < depth; i++) if (loops[i].first == first) return loops[i].iteration;
    return 0;
  }
};
struct Loops {
  Frame frames[FRAMES];
  int depth = 0;
  void clear() { depth = 0; }
  const Frame *at(uintptr_t base) const {
    for (int i = depth; i--;) if (frames[i].base == base) return &frames[i];
    return nullptr;
  }
  void enter(uintptr_t base, uintptr_t returns_to, uintptr_t block) {
    while (depth && frames[depth - 1].base < base) depth--; // what was called has returned
    if (depth && frames[depth - 1].base == base && frames[depth - 1].returns_to != returns_to) depth--;
    if (!depth || frames[depth - 1].base != base) {
      if (depth == FRAMES) { fprintf(stderr, "simt: calls nested deeper than %d\n", FRAMES); abort(); }
      frames[depth++] = {base, returns_to, block, 0, {}};
      return;
    }
    Frame &f = frames[depth - 1];
    if (block <= f.block) {
      uintptr_t &end = loop_ends()[block];
      end = std::max(end, f.block);
      while (f.depth && f.loops[f.depth - 1].first > block) f.depth--; // loops within this one
      if (!f.depth || f.loops[f.depth - 1].first != block) {
        if (f.depth == NESTED) { fprintf(stderr, "simt: loops nested deeper than %d\n", NESTED); abort(); }
        f.loops[f.depth++] = {block, 0, &end};
      }
      f.loops[f.depth - 1].iteration++;
    }
    while (f.depth && *f.loops[f.depth - 1].end < block) f.depth--; // left behind
    f.block = block;
  }
};
// Negative where the first is earlier. Of two lanes within one loop the one in the earlier iteration is; a lane
// that isn't in it yet, or no longer, is ordered by its place.
inline int compare(const Frame *a, uintptr_t pc_a, const Frame *b, uintptr_t pc_b) {
  if (a && b)
    for (int i = 0, j = 0; i < a->depth || j < b->depth;) {
      bool mine = j >= b->depth || (i < a->depth && a->loops[i].first <= b->loops[j].first);
      const Loop &loop = mine ? a->loops[i] : b->loops[j];
      uintptr_t first = loop.first, end = *loop.end;
      if (i < a->depth && a->loops[i].first == first) i++;
      if (j < b->depth && b->loops[j].first == first) j++;
      if (a->block < first || a->block > end || b->block < first || b->block > end) continue;
      int64_t difference = a->iteration(first) - b->iteration(first);
      if (difference) return difference < 0 ? -1 : 1;
    }
  return pc_a < pc_b ? -1 : pc_a > pc_b;
}
} // namespace simt

// The emulator: one fiber per lane, one program counter per wave, shared memory with a shadow.
//
// A lane runs until it shuffles, meets a barrier or touches shared memory, and parks there. Of a wave's parked
// lanes the group at the lowest program point goes next, with only its lanes active, as structured control flow
// with an EXEC mask does it; a branch that all lanes agree on is therefore taken by all, and no lane visits the
// other side. At -O0 addresses follow the source, so the stack of return addresses orders program points.
//
// Within a loop a lane in an earlier iteration goes first, and only lanes in the same one are a group: a lane counts
// the backward jumps of each loop that it is in (loops.h).
//
// A barrier is per wave: it counts when any of a wave's lanes reaches it, and ended waves aren't waited for.
// Kernels are compiled with -fsanitize=thread and -fsanitize-coverage=trace-pc; their hooks, below, are how each
// access and each basic block comes here. Memory, its bounds and its races are in memory.h.
#include "simt.h"
#include "loops.h"
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <vector>

namespace simt {
enum { STACK_BYTES = 256 << 10 };
enum State { READY, SHUFFLE, BARRIER, ACCESS, DONE };
enum Policy { ZERO, STALE, OWN, POISON };  // what a shuffle reads from a lane that isn't active
enum Order { FORWARD, BACKWARD, RANDOM };  // which wave runs next

unsigned char *lds;
Fiber *cur;
Index block_idx, block_dim, grid_dim;
int wave = 64;

struct Lane : Fiber {
  void *sp;
  State state;
  void *value; int bytes, src;
  uint64_t reg; // what this lane last gave to a shuffle
  uintptr_t pc[FRAMES]; int depth;
  const Frame *frame[FRAMES]; // that pc is in
  Loops loops;
};

static std::vector<Lane> lanes;
static void *scheduler_sp;
static int policy;
static bool inside; // whether a lane runs, and not the emulator
static void (*kernel)(void **);
static void **kernel_args;
static char *stacks;

static void park(State state, void *frame);
extern "C" void *__real_memcpy(void *, const void *, size_t);
#include "memory.h"

// switch_stack(save, load): saves callee-saved registers and the stack pointer, and continues on another stack.
extern "C" void switch_stack(void **save, void *load);
#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif
asm(".text\n.globl switch_stack\nswitch_stack:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void trampoline() {
  kernel(kernel_args);
  settle();
  Lane *l = (Lane *)cur;
  l->state = DONE;
  switch_stack(&l->sp, scheduler_sp);
}
static void start(Lane &l) {
  void **top = (void **)(stacks + size_t(l.linear + 1) * STACK_BYTES);
  *--top = nullptr;            // keeps the stack aligned as at a call
  *--top = (void *)trampoline; // where `ret` goes
  for (int i = 0; i < 6; i++) *--top = nullptr;
  l.sp = top;
  l.state = READY;
  l.reg = 0;
  l.loops.clear();
}
// Return addresses, outermost first: in lexicographic order they are in program order.
static __attribute__((noinline)) void park(State state, void *frame) {
  Lane *l = (Lane *)cur;
  settle();
  uintptr_t inner_first[FRAMES];
  const Frame *frames[FRAMES];
  char *low = stacks + size_t(l->linear) * STACK_BYTES, *high = low + STACK_BYTES;
  l->depth = 0;
  for (void **f = (void **)frame; (char *)f >= low && (char *)f < high - 16 && l->depth < FRAMES; f = (void **)f[0]) {
    frames[l->depth] = l->loops.at((uintptr_t)f[0]);
    inner_first[l->depth++] = (uintptr_t)f[1];
  }
  std::reverse_copy(inner_first, inner_first + l->depth, l->pc);
  std::reverse_copy(frames, frames + l->depth, l->frame);
  l->state = state;
  report->switches++;
  switch_stack(&l->sp, scheduler_sp);
}
void permute(void *value, int bytes, int src) {
  Lane *l = (Lane *)cur;
  l->value = value; l->bytes = bytes; l->src = src;
  park(SHUFFLE, __builtin_frame_address(0));
}
void barrier() { park(BARRIER, __builtin_frame_address(0)); }

// Whether `a` is at an earlier program point than `b`: by call stack, outermost first, and by iteration.
static bool before(const Lane *a, const Lane *b) {
  for (int k = 0; k < a->depth && k < b->depth; k++) {
    int order = compare(a->frame[k], a->pc[k], b->frame[k], b->pc[k]);
    if (order) return order < 0;
  }
  return a->depth < b->depth;
}
static void shuffle(const std::vector<Lane *> &group, int low) {
  std::vector<char> active(wave, 0);
  report->shuffles++;
  for (Lane *l : group) { active[l->linear - low] = 1; l->reg = 0; memcpy(&l->reg, l->value, l->bytes); }
  for (Lane *l : group) {
    int s = l->src & (wave - 1);
    uint64_t r = ~0ull;
    if (active[s]) r = lanes[low + s].reg;
    else {
      report->inactive_reads++;
      if (policy == ZERO) r = 0;
      if (policy == STALE) r = low + s < (int)lanes.size() ? lanes[low + s].reg : 0;
      if (policy == OWN) r = l->reg;
    }
    memcpy(l->value, &r, l->bytes);
  }
}
enum Wave { RUNNING, WAITING, ENDED };
// Runs wave `w` to its next barrier or its end; with `one`, a single group of lanes by one step.
static Wave advance(int w, bool reverse_lanes, bool one) {
  int low = w * wave, high = std::min<int>(low + wave, lanes.size());
  for (;;) {
    for (int i = 0; i < high - low; i++) {
      Lane &l = lanes[reverse_lanes ? high - 1 - i : low + i];
      if (l.state == READY) { cur = &l; inside = true; switch_stack(&scheduler_sp, l.sp); inside = false; }
    }
    Lane *first = nullptr;
    size_t live = 0;
    for (int i = low; i < high; i++)
      if (lanes[i].state != DONE) { live++; if (!first || before(&lanes[i], first)) first = &lanes[i]; }
    if (!first) return ENDED;
    std::vector<Lane *> group;
    for (int i = low; i < high; i++)
      if (lanes[i].state != DONE && !before(first, &lanes[i])) group.push_back(&lanes[i]);
    if (first->state == BARRIER) {
      if (group.size() < live) report->divergent_barriers++;
      for (Lane *l : group) l->state = READY; // when the wave is released
      return WAITING;
    }
    if (first->state == SHUFFLE) shuffle(group, low);
    for (Lane *l : group) l->state = READY;
    if (one) return RUNNING;
  }
}
static void run_block(Order order, bool reverse_lanes, uint32_t &random) {
  int waves = (lanes.size() + wave - 1) / wave;
  std::vector<Wave> state(waves, RUNNING);
  for (;;) {
    std::vector<int> running;
    for (int w = 0; w < waves; w++) if (state[w] == RUNNING) running.push_back(w);
    if (running.empty()) {
      bool released = false;
      for (Wave &s : state) if (s == WAITING) { s = RUNNING; released = true; }
      if (!released) return;
      interval++;
      continue;
    }
    random = random * 1664525u + 1013904223u;
    int w = order == FORWARD ? running.front() : order == BACKWARD ? running.back() : running[(random >> 16) % running.size()];
    state[w] = advance(w, reverse_lanes, order == RANDOM);
  }
}
} // namespace simt
using namespace simt;

// `sizes` has the bytes of each argument that is a tensor, and 0 for a number; `writable` says which are outputs.
extern "C" void simt_run(void (*entry)(void **), void **args, int count, const int64_t *sizes, const int *writable,
                         const unsigned *grid, const unsigned *block, unsigned shared_bytes, int wave_size,
                         int inactive, int order, int reverse_lanes, uint32_t seed, int fill, Report *out,
                         int64_t *writes) {
  kernel = entry; wave = wave_size; policy = inactive; report = out; dynamic_bytes = shared_bytes;
  grid_dim = {grid[0], grid[1], grid[2]}; block_dim = {block[0], block[1], block[2]};
  size_t n = size_t(block[0]) * block[1] * block[2];
  lanes.assign(n, Lane{});
  Mapping stack(n * STACK_BYTES), local(2 * WIDE + LDS_BYTES);
  stacks = stack.memory;
  lds = (unsigned char *)local.memory + WIDE;
  Arena arena(args, count, sizes, writable);
  kernel_args = arena.pointers.data();
  interval = 0;
  for (unsigned z = 0; z < grid[2]; z++) for (unsigned y = 0; y < grid[1]; y++) for (unsigned x = 0; x < grid[0]; x++) {
    block_idx = {x, y, z};
    memset(lds, fill, LDS_BYTES);
    shadow.assign(dynamic_bytes, Shadow{});
    interval++;
    for (size_t i = 0; i < n; i++) {
      lanes[i].linear = i;
      lanes[i].tid = {unsigned(i % block[0]), unsigned(i / block[0] % block[1]), unsigned(i / block[0] / block[1])};
      start(lanes[i]);
    }
    run_block((Order)order, reverse_lanes, seed);
  }
  arena.copy_back(args, writes);
}

// GCC's thread-sanitizer instrumentation calls these ahead of every access to memory that has an address.
// A copy of variable length is a call, which the linker's --wrap brings here.
extern "C" {
void *__real_memmove(void *, const void *, size_t);
void *__real_memset(void *, int, size_t);
void *__wrap_memcpy(void *to, const void *from, size_t n) {
  touch(from, n, READ);
  touch(to, n, WRITE);
  return __real_memcpy(to, from, n);
}
void *__wrap_memmove(void *to, const void *from, size_t n) {
  touch(from, n, READ);
  touch(to, n, WRITE);
  return __real_memmove(to, from, n);
}
void *__wrap_memset(void *to, int value, size_t n) {
  touch(to, n, WRITE);
  return __real_memset(to, value, n);
}
#define SIMT_HOOK(N)                                                                  \
  void __tsan_read##N(void *a) { touch(a, N, READ); }                                \
  void __tsan_write##N(void *a) { touch(a, N, WRITE); }                                \
  void __tsan_unaligned_read##N(void *a) { touch(a, N, READ); }                      \
  void __tsan_unaligned_write##N(void *a) { touch(a, N, WRITE); }
SIMT_HOOK(1) SIMT_HOOK(2) SIMT_HOOK(4) SIMT_HOOK(8) SIMT_HOOK(16)
#undef SIMT_HOOK
void __tsan_read_range(void *a, size_t n) { touch(a, n, READ); }
void __tsan_write_range(void *a, size_t n) { touch(a, n, WRITE); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
// At the start of each basic block.
void __sanitizer_cov_trace_pc() {
  void **own = (void **)__builtin_frame_address(0), **caller = (void **)own[0];
  if (!inside) return;
  report->blocks++;
  ((Lane *)cur)->loops.enter((uintptr_t)caller, (uintptr_t)caller[1], (uintptr_t)own[1]);
}
}

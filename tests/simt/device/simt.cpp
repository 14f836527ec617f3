// The emulator: one fiber per lane, one program counter per wave, shared memory with a shadow.
//
// A lane runs until it shuffles, meets a barrier or touches shared memory, and parks there. Of a wave's parked
// lanes the group at the lowest program point goes next, with only its lanes active, as structured control flow
// with an EXEC mask does it; a branch that all lanes agree on is therefore taken by all, and no lane visits the
// other side. At -O0 addresses follow the source, so the stack of return addresses orders program points.
//
// A barrier is per wave: it counts when any of a wave's lanes reaches it, and ended waves aren't waited for.
// Kernels are compiled with -fsanitize=thread; its hooks, below, are how each access comes here.
#include "simt.h"
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <vector>

namespace simt {
enum { LDS_BYTES = 160 << 10, GUARD_BYTES = 16 << 10, STACK_BYTES = 256 << 10, FRAMES = 24 };
enum State { READY, SHUFFLE, BARRIER, ACCESS, DONE };
enum Policy { ZERO, STALE, OWN, POISON };  // what a shuffle reads from a lane that isn't active
enum Order { FORWARD, BACKWARD, RANDOM };  // which wave runs next

alignas(1024) unsigned char lds[LDS_BYTES + GUARD_BYTES];
Fiber *cur;
Index block_idx, block_dim, grid_dim;
int wave = 64;

struct Lane : Fiber {
  void *sp;
  State state;
  void *value; int bytes, src;
  uint64_t reg; // what this lane last gave to a shuffle
  uintptr_t pc[FRAMES]; int depth;
};
struct Shadow { // of one byte of shared memory
  uint32_t written_in = 0, read_in = 0; // barrier interval, from 1
  uint32_t readers = 0;                 // waves that read it in that interval
  int16_t writer = -1;
};
struct Report {
  int64_t shuffles, inactive_reads, divergent_barriers, races, wave_synchronous, out_of_bounds, uninitialised, switches;
  int64_t race_offset, race_first, race_second; // of the first race: byte, and the two threads
};

static std::vector<Lane> lanes;
static std::vector<Shadow> shadow;
static void *scheduler_sp;
static Report *report;
static int policy;
static uint32_t interval;
static unsigned dynamic_bytes;
static void (*kernel)(void **);
static void **kernel_args;
static char *stacks;

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
}
// Return addresses, outermost first: in lexicographic order they are in program order.
static __attribute__((noinline)) void park(State state, void *frame) {
  Lane *l = (Lane *)cur;
  uintptr_t inner_first[FRAMES];
  char *low = stacks + size_t(l->linear) * STACK_BYTES, *high = low + STACK_BYTES;
  l->depth = 0;
  for (void **f = (void **)frame; (char *)f >= low && (char *)f < high - 16 && l->depth < FRAMES; f = (void **)f[0])
    inner_first[l->depth++] = (uintptr_t)f[1];
  std::reverse_copy(inner_first, inner_first + l->depth, l->pc);
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

static void race(int64_t offset, int first, int second) {
  if (!report->races++) { report->race_offset = offset; report->race_first = first; report->race_second = second; }
}
// Two accesses of different waves to one byte, one of them a write, in one barrier interval: unordered.
// Of different lanes of one wave: ordered by the wave's program counter alone, which is counted apart.
static void check(int64_t at, size_t bytes, bool write) {
  int thread = cur->linear, w = thread / wave;
  bool crossed = false, synchronous = false, uninitialised = false;
  int other = -1;
  for (int64_t i = at; i < at + (int64_t)bytes; i++) {
    Shadow &s = shadow[i];
    bool fresh = s.written_in == interval && s.writer != thread;
    if (fresh && s.writer / wave != w) { crossed = true; other = s.writer; }
    else if (fresh && !write) synchronous = true;
    if (write && s.read_in == interval && (s.readers & ~(1u << w))) { crossed = true; other = -2; }
    if (!write && !s.written_in) uninitialised = true;
    if (write) { s.written_in = interval; s.writer = thread; }
    else { if (s.read_in != interval) s.readers = 0; s.read_in = interval; s.readers |= 1u << w; }
  }
  if (crossed) race(at, other, thread);
  report->wave_synchronous += synchronous;
  report->uninitialised += uninitialised;
}
void touch(const void *address, size_t bytes, bool write) {
  int64_t at = (const unsigned char *)address - lds;
  if (at < 0 || at >= LDS_BYTES + GUARD_BYTES) return; // not shared memory
  park(ACCESS, __builtin_frame_address(0));
  if (at + (int64_t)bytes > dynamic_bytes) report->out_of_bounds++;
  else check(at, bytes, write);
}

static bool before(const Lane *a, const Lane *b) {
  return std::lexicographical_compare(a->pc, a->pc + a->depth, b->pc, b->pc + b->depth);
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
      if (l.state == READY) { cur = &l; switch_stack(&scheduler_sp, l.sp); }
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

extern "C" void simt_run(void (*entry)(void **), void **args, const unsigned *grid, const unsigned *block,
                         unsigned shared_bytes, int wave_size, int inactive, int order, int reverse_lanes,
                         uint32_t seed, int fill, Report *out) {
  kernel = entry; kernel_args = args; wave = wave_size; policy = inactive; report = out; dynamic_bytes = shared_bytes;
  grid_dim = {grid[0], grid[1], grid[2]}; block_dim = {block[0], block[1], block[2]};
  size_t n = size_t(block[0]) * block[1] * block[2];
  lanes.assign(n, Lane{});
  void *memory = mmap(nullptr, n * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) { perror("simt: stacks"); abort(); }
  stacks = (char *)memory;
  for (unsigned z = 0; z < grid[2]; z++) for (unsigned y = 0; y < grid[1]; y++) for (unsigned x = 0; x < grid[0]; x++) {
    block_idx = {x, y, z};
    memset(lds, fill, sizeof lds);
    shadow.assign(dynamic_bytes, Shadow{});
    interval = 1;
    for (size_t i = 0; i < n; i++) {
      lanes[i].linear = i;
      lanes[i].tid = {unsigned(i % block[0]), unsigned(i / block[0] % block[1]), unsigned(i / block[0] / block[1])};
      start(lanes[i]);
    }
    run_block((Order)order, reverse_lanes, seed);
  }
  munmap(memory, n * STACK_BYTES);
}

// GCC's thread-sanitizer instrumentation calls these ahead of every access to memory that has an address.
extern "C" {
#define SIMT_HOOK(N)                                                                  \
  void __tsan_read##N(void *a) { touch(a, N, false); }                                \
  void __tsan_write##N(void *a) { touch(a, N, true); }                                \
  void __tsan_unaligned_read##N(void *a) { touch(a, N, false); }                      \
  void __tsan_unaligned_write##N(void *a) { touch(a, N, true); }
SIMT_HOOK(1) SIMT_HOOK(2) SIMT_HOOK(4) SIMT_HOOK(8) SIMT_HOOK(16)
#undef SIMT_HOOK
void __tsan_read_range(void *a, size_t n) { touch(a, n, false); }
void __tsan_write_range(void *a, size_t n) { touch(a, n, true); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

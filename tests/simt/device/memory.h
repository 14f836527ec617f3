// Memory of a launch: shared memory and the tensors, each in the middle of space that nothing may touch, with a
// shadow of every byte that may be written. Part of simt.cpp.
#pragma once

enum { LDS_BYTES = 160 << 10, WIDE = 16 << 20 };

struct Mapping { // memory that costs nothing until it is touched
  size_t bytes;
  char *memory;
  explicit Mapping(size_t n) : bytes(n) {
    void *found = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) { perror("simt: memory"); abort(); }
    memory = (char *)found;
  }
  ~Mapping() { munmap(memory, bytes); }
};
struct Shadow { // of one byte
  uint32_t written_in = 0, read_in = 0, atomic_in = 0; // barrier interval, from 1
  uint32_t readers = 0, adders = 0;                    // waves that read it, or were atomic, in that interval
  int16_t writer = -1;                                 // thread, of the last plain write
};
struct Report {
  int64_t shuffles, inactive_reads, divergent_barriers, races, wave_synchronous, out_of_bounds, uninitialised, switches;
  int64_t same_value, blocks, race_offset, race_first, race_second; // of the first race: byte, and the two threads
};
static Report *report;
static uint32_t interval;
static unsigned dynamic_bytes;
static std::vector<Shadow> shadow;

struct Tensor { char *memory; int64_t bytes, writes; bool writable; std::vector<Shadow> shadow; };
struct Arena;
static Arena *arena;
struct Arena { // the tensors, copied apart from each other
  std::vector<Tensor> tensors;
  std::vector<void *> pointers;
  Mapping space;
  static size_t total(int count, const int64_t *sizes) {
    size_t n = WIDE;
    for (int i = 0; i < count; i++) if (sizes[i]) n += WIDE + (sizes[i] + 4095) / 4096 * 4096;
    return n;
  }
  Arena(void **args, int count, const int64_t *sizes, const int *writable) : space(total(count, sizes)) {
    char *next = space.memory + WIDE;
    tensors.reserve(count);
    for (int i = 0; i < count; i++) {
      pointers.push_back(args[i]);
      if (!sizes[i]) continue;
      tensors.push_back({next, sizes[i], 0, bool(writable[i]), {}});
      if (writable[i]) tensors.back().shadow.assign(sizes[i], Shadow{});
      memcpy(next, *(void **)args[i], sizes[i]);
      pointers.back() = &tensors.back().memory;
      next += WIDE + (sizes[i] + 4095) / 4096 * 4096;
    }
    arena = this;
  }
  ~Arena() { arena = nullptr; }
  bool holds(const char *p) const { return p >= space.memory && p < space.memory + space.bytes; }
  Tensor *at(const char *p, size_t n) {
    for (Tensor &t : tensors) if (p >= t.memory && p + n <= t.memory + t.bytes) return &t;
    return nullptr;
  }
  // Outputs go back to the caller; `writes` gets the writes to each of the tensors, in order.
  void copy_back(void **args, int64_t *writes) {
    size_t next = 0;
    for (size_t i = 0; i < pointers.size(); i++)
      if (next < tensors.size() && pointers[i] == &tensors[next].memory) {
        Tensor &t = tensors[next++];
        if (t.writable) memcpy(*(void **)args[i], t.memory, t.bytes);
        writes[i] = t.writes;
      }
  }
};

static void race(int64_t offset, int first, int second) {
  if (!report->races++) { report->race_offset = offset; report->race_first = first; report->race_second = second; }
}
// A write over another wave's write in one interval is harmless where it changes nothing, which is seen after it.
static struct { const unsigned char *address; int bytes, first, second; int64_t offset; unsigned char old[16]; } open;
static void settle() {
  if (!open.address) return;
  if (memcmp(open.address, open.old, open.bytes)) race(open.offset, open.first, open.second);
  else report->same_value++;
  open.address = nullptr;
}
// Two accesses of different waves to one byte, one of them a write, in one barrier interval: unordered.
// Of different lanes of one wave: ordered by the wave's program counter alone, which is counted apart.
static void check(std::vector<Shadow> &bytes_of, const void *address, int64_t at, size_t bytes, Access kind, bool local) {
  int thread = cur->linear, w = thread / wave, other = -1;
  bool crossed = false, over = false, synchronous = false, uninitialised = false;
  for (int64_t i = at; i < at + (int64_t)bytes; i++) {
    Shadow &s = bytes_of[i];
    if (s.read_in != interval) s.readers = 0;
    if (s.atomic_in != interval) s.adders = 0;
    bool fresh = s.written_in == interval && s.writer != thread;
    if (fresh && s.writer / wave != w) { (kind == WRITE ? over : crossed) = true; other = s.writer; }
    else if ((fresh || s.adders & 1u << w) && kind == READ) synchronous = true;
    if (kind != READ && s.readers & ~(1u << w)) { crossed = true; other = -2; }
    if (kind != ATOMIC && s.adders & ~(1u << w)) { crossed = true; other = -2; }
    if (kind != WRITE && !s.written_in && !s.atomic_in) uninitialised = true;
    if (kind == WRITE) { s.written_in = interval; s.writer = thread; }
    if (kind == READ) { s.read_in = interval; s.readers |= 1u << w; }
    if (kind == ATOMIC) { s.atomic_in = interval; s.adders |= 1u << w; }
  }
  if (crossed || (over && bytes > sizeof open.old)) race(at, other, thread);
  else if (over) {
    open = {(const unsigned char *)address, int(bytes), other, thread, at, {}};
    __real_memcpy(open.old, address, bytes); // not the wrapped one, which is an access
  }
  report->wave_synchronous += synchronous;
  report->uninitialised += uninitialised && local;
}
void touch(const void *address, size_t bytes, Access kind) {
  if (!inside || !bytes) return;
  const char *p = (const char *)address;
  int64_t at = (const unsigned char *)address - lds;
  if (at >= -WIDE && at < LDS_BYTES + WIDE) {
    park(ACCESS, __builtin_frame_address(0));
    if (at < 0 || at + (int64_t)bytes > dynamic_bytes) report->out_of_bounds++;
    else check(shadow, address, at, bytes, kind, true);
    return;
  }
  if (!arena->holds(p)) return; // a lane's own stack, or the emulator
  settle();
  Tensor *t = arena->at(p, bytes);
  if (!t) { report->out_of_bounds++; return; }
  t->writes += kind != READ;
  if (t->writable) check(t->shadow, address, p - t->memory, bytes, kind, false);
  else if (kind != READ) report->out_of_bounds++; // an input is nobody's to write
}

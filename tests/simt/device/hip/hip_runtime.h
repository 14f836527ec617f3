// A stand-in for <hip/hip_runtime.h> on a CPU: what TileLang's HIP sources and headers use of it, over simt.h.
#pragma once
#include "../simt.h"
#include <algorithm>
#include <cmath>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (simt::cur->tid)
#define blockIdx (simt::block_idx)
#define blockDim (simt::block_dim)
#define gridDim (simt::grid_dim)
#define __builtin_amdgcn_wavefrontsize() (simt::wave)
#define __syncthreads() simt::barrier()
static const int &warpSize = simt::wave;
using dim3 = simt::Index;

#define SIMT_VECTOR(T, B)                                               \
  struct T##1 { B x; };                                                 \
  struct alignas(2 * sizeof(B)) T##2 { B x, y; };                       \
  struct T##3 { B x, y, z; };                                           \
  struct alignas(4 * sizeof(B)) T##4 { B x, y, z, w; };                 \
  inline T##2 make_##T##2(B x, B y) { return {x, y}; }                  \
  inline T##4 make_##T##4(B x, B y, B z, B w) { return {x, y, z, w}; }
SIMT_VECTOR(float, float)
SIMT_VECTOR(uint, unsigned)
SIMT_VECTOR(int, int)
SIMT_VECTOR(ushort, unsigned short)
SIMT_VECTOR(short, short)
#undef SIMT_VECTOR

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

// Which lane is read: HIP's documented semantics of the shuffles with a width.
template <class V> V __shfl_xor(V v, int mask, int width = simt::wave) {
  int self = simt::lane(), from = self ^ mask;
  return simt::bpermute(v, from >= ((self + width) & ~(width - 1)) ? self : from);
}
template <class V> V __shfl_down(V v, unsigned delta, int width = simt::wave) {
  int self = simt::lane();
  return simt::bpermute(v, int(self & (width - 1)) + int(delta) >= width ? self : self + int(delta));
}
template <class V> V __shfl_up(V v, unsigned delta, int width = simt::wave) {
  int self = simt::lane(), from = self - int(delta);
  return simt::bpermute(v, from < (self & ~(width - 1)) ? self : from);
}
template <class V> V __shfl(V v, int src, int width = simt::wave) {
  return simt::bpermute(v, (src & (width - 1)) + (simt::lane() & ~(width - 1)));
}
// No two lanes run at once, so a plain read-modify-write is atomic; it is one access, without the hooks of two.
#define SIMT_ATOMIC(NAME, RESULT)                                                                   \
  template <class P, class V> __attribute__((no_sanitize("thread"))) P NAME(P *p, V v) {             \
    simt::touch(p, sizeof(P), simt::ATOMIC);                                                        \
    P old = *p;                                                                                     \
    *p = RESULT;                                                                                    \
    return old;                                                                                     \
  }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicOr, old | v)
#undef SIMT_ATOMIC

struct hip_bfloat16 { // rounds to nearest even; NaN stays NaN
  uint16_t data;
  hip_bfloat16() = default;
  explicit hip_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) data = uint16_t(bits >> 16) | 0x40;
    else data = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t bits = uint32_t(data) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
};

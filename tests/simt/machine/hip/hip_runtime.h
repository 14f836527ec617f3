// A stand-in for <hip/hip_runtime.h> to compile for AMD's machines: what TileLang's HIP sources and headers use of
// it, over clang's builtins. Everything is device code, so nothing of it can be launched or linked.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <utility>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __align__(n) __attribute__((aligned(n)))

struct dim3 { unsigned x, y, z; };
#define INDEX(kind) \
  dim3 { __builtin_amdgcn_##kind##_x(), __builtin_amdgcn_##kind##_y(), __builtin_amdgcn_##kind##_z() }
#define threadIdx INDEX(workitem_id)
#define blockIdx INDEX(workgroup_id)
#define blockDim \
  dim3 { __builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(), __builtin_amdgcn_workgroup_size_z() }
#define gridDim                                                                \
  dim3 {                                                                       \
    __builtin_amdgcn_grid_size_x() / blockDim.x, __builtin_amdgcn_grid_size_y() / blockDim.y, \
        __builtin_amdgcn_grid_size_z() / blockDim.z                            \
  }
static const int warpSize = __AMDGCN_WAVEFRONT_SIZE;

__device__ inline void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

#define VECTOR(T, B)                          \
  struct T##1 { B x; };                       \
  struct alignas(2 * sizeof(B)) T##2 { B x, y; }; \
  struct T##3 { B x, y, z; };                 \
  struct alignas(4 * sizeof(B)) T##4 { B x, y, z, w; }; \
  __device__ inline T##2 make_##T##2(B x, B y) { return {x, y}; } \
  __device__ inline T##4 make_##T##4(B x, B y, B z, B w) { return {x, y, z, w}; }
VECTOR(float, float)
VECTOR(uint, unsigned)
VECTOR(int, int)
VECTOR(ushort, unsigned short)
VECTOR(short, short)
#undef VECTOR

__device__ inline float sqrtf(float x) { return __builtin_sqrtf(x); }
__device__ inline float rsqrtf(float x) { return __builtin_amdgcn_rsqf(x); }
__device__ inline float __frsqrt_rn(float x) { return __builtin_amdgcn_rsqf(x); }
__device__ inline float __expf(float x) { return __builtin_amdgcn_exp2f(x * 1.44269504f); }
__device__ inline float __logf(float x) { return __builtin_amdgcn_logf(x) * 0.69314718f; }
__device__ inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
__device__ inline float max(float a, float b) { return fmaxf(a, b); }
__device__ inline float min(float a, float b) { return fminf(a, b); }
__device__ inline int max(int a, int b) { return a > b ? a : b; }
__device__ inline int min(int a, int b) { return a < b ? a : b; }
__device__ inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
__device__ inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }

// HIP's shuffles: a read from another lane by ds_bpermute, four bytes at a time.
__device__ inline int __lane_id() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
template <class V> __device__ V __from_lane(V v, int lane) {
  static_assert(sizeof(V) == 4);
  return __builtin_bit_cast(V, __builtin_amdgcn_ds_bpermute(lane << 2, __builtin_bit_cast(int, v)));
}
template <class V> __device__ V __shfl_xor(V v, int mask, int width = warpSize) {
  int self = __lane_id(), from = self ^ mask;
  return __from_lane(v, from >= ((self + width) & ~(width - 1)) ? self : from);
}
template <class V> __device__ V __shfl_down(V v, unsigned delta, int width = warpSize) {
  int self = __lane_id();
  return __from_lane(v, int(self & (width - 1)) + int(delta) >= width ? self : self + int(delta));
}
template <class V> __device__ V __shfl_up(V v, unsigned delta, int width = warpSize) {
  int self = __lane_id(), from = self - int(delta);
  return __from_lane(v, from < (self & ~(width - 1)) ? self : from);
}
template <class V> __device__ V __shfl(V v, int src, int width = warpSize) {
  return __from_lane(v, (src & (width - 1)) + (__lane_id() & ~(width - 1)));
}
template <class P, class V> __device__ P atomicAdd(P *p, V v) { return __atomic_fetch_add(p, P(v), __ATOMIC_RELAXED); }
template <class P, class V> __device__ P atomicMax(P *p, V v) { return __atomic_fetch_max(p, P(v), __ATOMIC_RELAXED); }
template <class P, class V> __device__ P atomicMin(P *p, V v) { return __atomic_fetch_min(p, P(v), __ATOMIC_RELAXED); }
template <class P, class V> __device__ P atomicOr(P *p, V v) { return __atomic_fetch_or(p, P(v), __ATOMIC_RELAXED); }

struct hip_bfloat16 { // rounds to nearest even; NaN stays NaN
  uint16_t data;
  __device__ hip_bfloat16() = default;
  __device__ explicit hip_bfloat16(float value) {
    uint32_t bits = __builtin_bit_cast(uint32_t, value);
    data = value != value ? uint16_t(bits >> 16) | 0x40 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  __device__ operator float() const { return __builtin_bit_cast(float, uint32_t(data) << 16); }
};

// What TileLang's common.h uses of composable kernel.
#pragma once
#include <hip/hip_runtime.h>
#define CK_TILE_DEVICE __device__ inline
#define CK_TILE_BUFFER_RESOURCE_3RD_DWORD 0x00020000 // of gfx9

namespace ck_tile {
using int32x4_t = int __attribute__((ext_vector_type(4)));
template <class T> __device__ T max(T a, T b) { return a > b ? a : b; }
template <> __device__ inline float max(float a, float b) { return fmaxf(a, b); }
template <class T> __device__ T min(T a, T b) { return a < b ? a : b; }
template <> __device__ inline float min(float a, float b) { return fminf(a, b); }
} // namespace ck_tile

// What TileLang's common.h uses of composable kernel.
#pragma once
#include <hip/hip_runtime.h>
#define CK_TILE_DEVICE inline

namespace ck_tile {
template <class T> T max(T a, T b) { return a > b ? a : b; }
template <> inline float max(float a, float b) { return fmaxf(a, b); }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <> inline float min(float a, float b) { return fminf(a, b); }
} // namespace ck_tile

// In place of TileLang's copy.h, which is inline assembly: asynchronous copies happen at once. TileLang's own do so
// too for 8 and 16 bytes; of 4 bytes they are asynchronous on the hardware.
#pragma once
#include <tl_templates/hip/common.h>

namespace tl {
inline void cp_async_commit() {}
template <int N = 0> inline void cp_async_wait() {}
template <int N> inline void cp_async_gs(void *to, void const *from) {
  memcpy(to, from, N);
}
template <int N> inline void cp_async_gs_conditional(void *to, void const *from, bool wanted) {
  if (wanted) memcpy(to, from, N);
  else memset(to, 0, N);
}
} // namespace tl

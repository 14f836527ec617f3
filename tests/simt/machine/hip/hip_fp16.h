// Nothing of it is used here.
#pragma once
#include <hip/hip_runtime.h>

// Matrix instructions, transposed loads and printing are not emulated; a kernel that uses them fails to compile.
#pragma once
#include <tl_templates/hip/common.h>

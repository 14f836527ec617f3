// Matrix instructions and transposed loads are not compiled here; a kernel that uses them fails to compile.
#pragma once
#include <tl_templates/hip/common.h>

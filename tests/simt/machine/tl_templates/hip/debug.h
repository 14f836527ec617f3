// Printing is not compiled here.
#pragma once
#include <tl_templates/hip/common.h>

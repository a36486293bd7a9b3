/* The text before every CUDA kernel. */
#include "codegen/emit.h"
const char emit_prelude_cuda[] = "";

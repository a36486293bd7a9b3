/* Parameters and operands of every CUDA kernel of attention: softmax(q k^T * SCALE, masked) v. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY attention
#define POINTERS 9
#endif

#define OPERANDS a.p
#include "../c/attention_operands.h"

struct arguments {
    char *p[POINTERS];
};

/* The gradient of attention; DELTA is workspace in f32 (f64 for f64). */
#pragma once
#ifndef MLUA_EMBEDDED
#define DELTA_AT 9
#endif
#include "../c/attention_grad_operands.h"
#include "attention.cuh"

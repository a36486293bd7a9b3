/* A step whose results are all bf16 takes the quick functions (prelude.cuh). */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define QUICK 1
#endif
#if QUICK && !defined MLUA_EMULATED
#define ml_exp_f32 ml_quick_exp_f32
#define ml_sigmoid_f32 ml_quick_sigmoid_f32
#define ml_tanh_f32 ml_quick_tanh_f32
#endif

/* The function of a row's halves that RAGGED_DOT may end with, and of up to two numbers of the row.
 */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define GATED 1
#define GATED_BODY const float y = x0 * ml_sigmoid_f32(x0) * x1; /* generated from the graph */
#define GATED_RESULT y
#define ROW_NUMBERS(batch, row) 0.0f, 0.0f
#endif

#if GATED
#ifndef MLUA_EMULATED /* as in kernels of loops: results are rounded to bf16 */
#define ml_exp_f32 ml_quick_exp_f32
#define ml_sigmoid_f32 ml_quick_sigmoid_f32
#define ml_tanh_f32 ml_quick_tanh_f32
#endif
ML_INLINE float gated(float x0, float x1, float x2, float x3) {
    (void)x2, (void)x3;
    GATED_BODY
    return GATED_RESULT;
}
#endif
